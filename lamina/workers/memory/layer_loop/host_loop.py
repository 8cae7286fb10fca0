"""The layers of a memory worker's steps whose messages hosts send, from and to host memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lamina.netstack import Arrival, Channel
from lamina.observe.trace import Event, Recorder
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError
from lamina.workers.memory.attention_step import AttentionStep, StoredAttention, StoredKvRows
from lamina.workers.memory.epoch_messages import RESERVE_S, MessageInbox
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.kv_load import KvLoader
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import EMPTY_BYTES


class HostLayerLoop:
    """Serves an epoch's layers with messages in host memory."""

    def __init__(
        self,
        channels: Sequence[Channel],
        inbox: MessageInbox,
        store: KvStore,
        meter: Counters,
        trace: Recorder,
        loads: KvLoader | None = None,
    ) -> None:
        """``channels``: of all replicas, whose messages arrive by ``inbox``. ``loads``: loads KV that rows may need."""
        self._channels, self._inbox, self._store = channels, inbox, store
        self._loads = loads
        self._meter, self._trace = meter, trace

    def run(self, steps: Sequence[AttentionStep]) -> None:
        """Serve all layers of a round, one step after another in each."""
        last = len(self._store.layers) - 1
        for layer in range(last + 1):
            for step in steps:
                if self._loads is not None:
                    self._wait_for_loads(self._loads, step, layer)
                self._serve_layer(step, layer)
                self._meter.add("turns", 1)
                if layer == last:
                    self._commit_rows(step)

    def _wait_for_loads(self, loads: KvLoader, step: AttentionStep, layer: int) -> None:
        """Wait until KV that the rows of ``step`` attend in ``layer`` is loaded."""
        if not (needed := loads.needed_by(step.plan)):
            return
        start = self._trace.now()
        while not loads.wait(needed, layer, self._inbox.poll_timeout_s):
            self._inbox.receive_grant()
        self._trace.add(Event.WAIT_LAYER, start, step.plan, layer)

    def _commit_rows(self, step: AttentionStep) -> None:
        """Commit the rows of ``step``: all its layers are written."""
        if self._loads is not None:
            self._loads.collect()  # else its rows would be counted before the loaded tokens that precede them
        self._store.committed.commit(step.plan.rows)

    def _exchange_of(self, layer: int) -> int:
        """Return the number of the exchange of an attention layer, which is that of the slice before it."""
        return layer

    def _serve_layer(self, step: AttentionStep, layer: int) -> None:
        """Serve one layer of a step; K, V are written while the next slice runs. Receives Q and attends the stored
        tokens; receives K, V and attends the new ones. Then sends O and releases the received messages: the inbox has
        space for the next Q and K, V in addition to these.
        """
        if self._inbox.grants is not None:
            self._inbox.grants.receive_overdue()
        meter, trace, messages = self._meter, self._trace, step.messages(layer)
        overlap = self._store.bind_request.kv.overlap
        exchange = self._exchange_of(layer)
        source, reply = (self._channels[step.plan.replica_of(i)] for i in (exchange, exchange + 1))
        q_arrival = self._receive(step, layer, MessageKind.Q, messages.q_bytes, exchange)
        q = self._message(q_arrival)
        if overlap:
            stored = self._attend_stored(step, layer, q)
        kv_arrival = self._receive(step, layer, MessageKind.KV, messages.kv_bytes, exchange)
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
            reply.put_signal(slot, MessageKey.for_step(MessageKind.O, step.plan, layer).pack())
            start = trace.add(Event.SEND_O, start, step.plan, layer, 0, messages.o_bytes)
            meter.add("bytes_sent", messages.o_bytes)
        with meter.time("write_s"):
            step.write(layer, rows)
        if step.scoring is not None:
            with meter.time("score_s"):
                step.add_scores(layer, q)
        trace.add(Event.WRITE, start, step.plan, layer)
        for arrival in (q_arrival, kv_arrival):
            if arrival:
                source.release(arrival)

    def abort(self, reason: str) -> None:
        """Do nothing: the epoch server sends the reason in place of the O that a compute worker waits for."""

    def _message(self, arrival: Arrival | None) -> Tensor:
        return EMPTY_BYTES if arrival is None else self._store.message_tensor(arrival.data)

    def _finish(
        self,
        step: AttentionStep,
        layer: int,
        stored: list[StoredAttention],
        q: Tensor,
        rows: list[StoredKvRows],
        out: memoryview,
    ) -> None:
        """Write the layer's O into ``out``."""
        staging, upto = self._store.staging, step.messages(layer).partial_bytes
        partial, final = staging.device_buffer(out[:upto]), staging.device_buffer(out[upto:])
        step.finish(layer, stored, q, rows, partial, final)
        staging.copy_out(out[:upto], partial)
        staging.copy_out(out[upto:], final)

    def _attend_stored(self, step: AttentionStep, layer: int, q: Tensor) -> list[StoredAttention]:
        start = self._trace.now()
        with self._meter.time("attend_s"):
            stored = step.attend_stored(layer, q)
        self._trace.add(Event.STORED, start, step.plan, layer)
        self._meter.add("stored_bytes", step.stored_bytes(layer))
        return stored

    def _receive(
        self, step: AttentionStep, layer: int, kind: MessageKind, nbytes: int, exchange: int
    ) -> Arrival | None:
        """Return the next layer message of the step's replica in an exchange, which must be this one; None if it has no
        bytes. Raises ProtocolError.
        """
        if not nbytes:
            return None
        key, start = MessageKey.for_step(kind, step.plan, layer), self._trace.now()
        while (arrival := self._inbox.next_message(step.plan.replica_of(exchange))) is None:
            pass
        got = MessageKey.unpack(arrival.tag)
        if got != key or arrival.data.nbytes != nbytes:
            raise ProtocolError(unexpected_message(arrival, key, nbytes))
        self._trace.add(Event.WAIT_Q if kind == MessageKind.Q else Event.WAIT_KV, start, step.plan, layer, 0, nbytes)
        return arrival


class ParityLayerLoop(HostLayerLoop):
    """Serves a parity worker's layers. It receives no Q, and no worker waits for its O."""

    def _serve_layer(self, step: AttentionStep, layer: int) -> None:
        if self._inbox.grants is not None:
            self._inbox.grants.receive_overdue()
        arrival = self._receive(step, layer, MessageKind.KV, step.messages(layer).kv_bytes, layer)
        if arrival is None:
            return
        start = self._trace.now()
        with self._meter.time("write_s"):
            step.write(layer, step.rows(layer, self._message(arrival)))
        self._trace.add(Event.WRITE, start, step.plan, layer)
        self._channels[step.plan.replica_of(layer)].release(arrival)


def unexpected_message(arrival: Arrival, key: MessageKey, nbytes: int) -> str:
    """Return an error text: ``arrival`` came in place of ``key``."""
    return f"{MessageKey.unpack(arrival.tag)} of {arrival.data.nbytes} bytes in place of {key} of {nbytes} bytes"
