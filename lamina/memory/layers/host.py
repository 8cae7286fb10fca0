"""The layers of a memory worker's steps whose messages hosts send: through channels, from and to host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lamina.memory.grants import Grants
from lamina.memory.inbox import RoundInbox
from lamina.memory.meter import Meter
from lamina.memory.pages.loads import Loads
from lamina.memory.step import Step, Stored
from lamina.memory.store import Store
from lamina.memory.write import Written
from lamina.netstack import Arrival, Channel
from lamina.observe.trace import Event, Recorder
from lamina.protocol.plan import Key, Kind, ProtocolError
from lamina.workers.staging import NOTHING

RESERVE_S = 60.0  # for a compute worker to take what it was sent before


class HostLayers:
    """The Layers of a session whose messages are in host memory."""

    def __init__(
        self,
        channels: Sequence[Channel],
        inbox: RoundInbox,
        store: Store,
        grants: Grants,
        meter: Meter,
        trace: Recorder,
        loads: Loads | None = None,
    ) -> None:
        """``channels``: of all replicas, whose messages come by ``inbox``. ``loads``: whose layers rows may need."""
        self._channels, self._inbox, self._store, self._grants = channels, inbox, store, grants
        self._loads = loads
        self._meter, self._trace = meter, trace

    def run(self, steps: Sequence[Step]) -> None:
        """All layers of a round, one step after another in each."""
        last = len(self._store.layers) - 1
        for layer in range(last + 1):
            for step in steps:
                self._await_loads(step, layer)
                self._turn(step, layer)
                self._meter.add("turns", 1)
                if layer == last:
                    self._written(step)

    def _await_loads(self, step: Step, layer: int) -> None:
        """Until what the rows of ``step`` see in ``layer`` is loaded."""
        needed = self._loads.needed_by(step.plan) if self._loads else []
        if self._loads is None or not needed:
            return
        start = self._trace.now()
        while not self._loads.wait(needed, layer, self._grants.patience_s):
            self._grants.take()
        self._trace.add(Event.WAIT_LAYER, start, step.plan, layer)

    def _written(self, step: Step) -> None:
        """All layers of ``step`` are."""
        if self._loads is not None:
            self._loads.settle()  # else its rows would count before the loaded tokens in front of them
        self._store.written.done(step.plan.rows)

    def _turn(self, step: Step, layer: int) -> None:
        """Q in, attend the stored tokens; KV in, attend the new ones; O out, then write KV, while the next slice runs.

        What came is released behind O: the inbox has room for the next Q and KV beside this one's.
        """
        self._grants.take_overdue()
        meter, trace, messages, overlap = self._meter, self._trace, step.messages(layer), self._store.bind.kv.overlap
        source, reply = (self._channels[step.plan.replica_of(i)] for i in (layer, layer + 1))
        q_arrival = self._expect(step, layer, Kind.Q, messages.q_bytes)
        q = self._message(q_arrival)
        if overlap:
            stored = self._attend_stored(step, layer, q)
        kv_arrival = self._expect(step, layer, Kind.KV, messages.kv_bytes)
        kv = self._message(kv_arrival)
        if not overlap:
            stored = self._attend_stored(step, layer, q)
        start = trace.now()
        rows = step.rows(layer, kv)
        if messages.o_bytes:
            slot = reply.reserve(messages.o_bytes, timeout_s=RESERVE_S)
            start = trace.add(Event.RESERVE, start, step.plan, layer)
            with meter.time("attend_s"):
                self._finish(step, layer, stored, q, rows, slot.data)
            start = trace.add(Event.NEW, start, step.plan, layer)
            reply.put_signal(slot, Key.of(Kind.O, step.plan, layer).pack())
            start = trace.add(Event.SEND_O, start, step.plan, layer, 0, messages.o_bytes)
            meter.add("bytes_sent", messages.o_bytes)
        with meter.time("write_s"):
            step.write(layer, rows)
        with meter.time("score_s"):
            step.score(layer, q)
        trace.add(Event.WRITE, start, step.plan, layer)
        for arrival in (q_arrival, kv_arrival):
            if arrival:
                source.release(arrival)

    def refuse(self, reason: str) -> None:
        """Nothing to do: the session sends the reason in place of the O that a compute worker waits for."""

    def _message(self, arrival: Arrival | None) -> Tensor:
        return NOTHING if arrival is None else self._store.message(arrival.data)

    def _finish(
        self, step: Step, layer: int, stored: list[Stored], q: Tensor, rows: list[Written], out: memoryview
    ) -> None:
        """The layer's O into ``out``."""
        staging, upto = self._store.staging, step.messages(layer).partial_bytes
        partial, final = staging.room(out[:upto]), staging.room(out[upto:])
        step.finish(layer, stored, q, rows, partial, final)
        staging.fill(out[:upto], partial)
        staging.fill(out[upto:], final)

    def _attend_stored(self, step: Step, layer: int, q: Tensor) -> list[Stored]:
        start = self._trace.now()
        with self._meter.time("attend_s"):
            stored = step.attend_stored(layer, q)
        self._trace.add(Event.STORED, start, step.plan, layer)
        self._meter.add("stored_bytes", step.stored_bytes(layer))
        return stored

    def _expect(self, step: Step, layer: int, kind: Kind, nbytes: int) -> Arrival | None:
        """The layer message whose turn it is, and which must be the next of its replica; None where there is none.

        Raises ProtocolError.
        """
        if not nbytes:
            return None
        key, start = Key.of(kind, step.plan, layer), self._trace.now()
        while (arrival := self._inbox.take(step.plan.replica_of(layer))) is None:
            pass
        got = Key.unpack(arrival.tag)
        if got != key or arrival.data.nbytes != nbytes:
            raise ProtocolError(wrong_message(arrival, key, nbytes))
        self._trace.add(Event.WAIT_Q if kind == Kind.Q else Event.WAIT_KV, start, step.plan, layer, 0, nbytes)
        return arrival


def wrong_message(arrival: Arrival, key: Key, nbytes: int) -> str:
    """A fault: ``arrival`` came where ``key`` was due."""
    return f"{Key.unpack(arrival.tag)} of {arrival.data.nbytes} bytes in place of {key} of {nbytes} bytes"
