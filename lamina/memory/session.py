"""One view on a memory worker, from its Bind to its end: rounds of steps, layer by layer.

Every step of a round has its turn in each layer, in the order of the plans; so the worker knows at any time whose
message is next, and waits for that one alone. The store is not the session's: it was there before, or stays behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import structs
from torch import Tensor

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.observe.trace import Event, Recorder
from lamina.protocol.plan import (
    Bind,
    Key,
    Kind,
    ProtocolError,
    StepPlan,
    decode_bind,
    decode_direct,
    decode_join,
    decode_plan,
    encode,
)
from lamina.protocol.resolve import devices_may_talk
from lamina.protocol.tables import NoBlocksError, PlanError
from lamina.workers.staging import NOTHING
from lamina.workers.wire import Wire, can_be_direct

from .direct import DirectLayers
from .grants import Grants
from .meter import Meter
from .step import Step, Stored
from .store import Store
from .write import Written

RESERVE_S = 60.0  # for a compute worker to take what it was sent before
MOST_PLANS = 64  # that may lie here before their round


class Session:
    """The channels of all replicas and prefill workers under one view. Replica 0 binds and sends the plans."""

    def __init__(
        self,
        channel: Channel,
        open_store: Callable[[Bind], Store],
        meter: Meter,
        trace: Recorder,
        view: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        """Waits for a Bind on ``channel``, for which ``open_store`` gives the store. ``names``: of all that come, by
        number.
        """
        self._channels = [channel]
        self._view, self._names = view, names
        self._meter = meter
        self._trace = trace
        self._plans: deque[tuple[Key, bytes]] = deque()  # that came before their round
        self._refused: dict[int, Key] = {}  # batch -> its last plan, if refused: its layer messages are dropped
        self._grants = Grants(meter, trace, view=view)
        self._direct: DirectLayers | None = None  # where what is of a layer travels on a channel of its own
        self._direct_due = False  # and that channel is still to come
        self._store = self._bind(open_store)

    @property
    def missing(self) -> int:
        """Channels that are still to come: of replicas, of prefill workers, and one for layer messages if it is due."""
        bind = self._store.bind
        return bind.replicas + bind.prefill_workers - len(self._channels) + self._direct_due

    def join(self, channel: Channel) -> None:
        """Take the next one in, or tell one of another view that it is. Raises ProtocolError if it is not the one that
        is due, or has another model.
        """
        arrival = self._receive(channel)
        key, bind = Key.unpack(arrival.tag), self._store.bind
        if key.kind == Kind.DIRECT and self._direct_due:
            self._join_direct(channel, arrival)
            return
        if key.kind != Kind.JOIN:
            raise ProtocolError(f"{key} in place of a join")
        join = decode_join(arrival.data)
        channel.release(arrival)
        if join.view != self._view:
            self._send(channel, Key(Kind.REFUSED), self._other_view("join", join.view).encode())
            channel.close()
            return
        self._check_name(channel, join.number)
        if join.number != len(self._channels):
            raise ProtocolError(f"worker {join.number} came when worker {len(self._channels)} was due")
        if join.layers != bind.layers:
            raise ProtocolError(f"worker {join.number} has another model than the one that was bound")
        self._channels.append(channel)
        if join.number >= bind.replicas:
            self._grants.join(channel)
        self._send(channel, Key(Kind.BOUND), encode(self._store.bound))

    def _join_direct(self, channel: Channel, arrival: Arrival) -> None:
        self._check_name(channel, 0)
        wait_s = decode_direct(arrival.data).wait_s
        channel.release(arrival)
        self._send(channel, Key(Kind.BOUND), encode(self._store.bound))
        self._direct_due = False
        if wait_s > 0:
            self._direct = DirectLayers(Wire(channel, self._store.staging, wait_s), self._store, self._meter)

    def check_idle(self) -> None:
        """Raises ChannelError when a replica was lost, ProtocolError if one sends before all have joined."""
        for channel in self._channels:
            with suppress(ChannelTimeout):
                raise ProtocolError(f"{Key.unpack(channel.wait_signal(timeout_s=0.0).tag)} before all have joined")

    def run(self) -> None:
        """Serve rounds until a channel ends."""
        while True:
            steps = self._round()
            for layer in range(len(self._store.layers)):
                for step in steps:
                    self._layer(step, layer)
            if self._direct:
                self._direct.settle()

    def _round(self) -> list[Step]:
        """Begin the steps of the next round; those that have rows."""
        steps, more = list[Step](), True
        while more:
            start = self._trace.now()
            while not self._plans:
                if (arrival := self._take(0)) is not None:
                    raise ProtocolError(f"{Key.unpack(arrival.tag)} in place of a plan")
            key, data = self._plans.popleft()
            start = self._trace.add(Event.WAIT_PLAN, start, key)
            step, more = self._begin(key, data)
            self._trace.add(Event.PLAN, start, key)
            if step is not None and step.plan.num_rows:
                steps.append(step)
        return steps

    def _begin(self, key: Key, data: bytes) -> tuple[Step | None, bool]:
        """Apply a plan, or refuse it; and whether the round goes on behind it."""
        plan = None
        try:
            with self._meter.time("plan_s"):
                plan = decode_plan(data)
                if key != _key(Kind.PLAN, plan, -1):
                    raise ProtocolError(f"the plan of step {plan.step} came as {key}")
                if plan.view != self._view:
                    raise ProtocolError(self._other_view(f"step {plan.step}", plan.view))
                self._grants.check(plan)
                self._store.begin(plan)
                self._grants.add(plan, self._store)
                step = Step(self._store, plan)
        except (ProtocolError, PlanError, NoBlocksError) as e:
            self._refused[key.batch] = key
            self._meter.add("refused", 1)
            reader = plan.replica_of(1) if plan else 0
            channel = self._channels[reader if 0 <= reader < len(self._channels) else 0]
            self._send(channel, key._replace(kind=Kind.REFUSED), str(e).encode())
            if self._direct:
                self._direct.wire.channel.abort(str(e))  # kernels of the compute worker wait for an O
            return None, plan is not None and plan.more
        self._refused.pop(key.batch, None)
        self._meter.add("steps", 1)
        self._meter.add("rows", step.plan.num_rows)
        return step, plan.more

    def _take(self, replica: int) -> Arrival | None:
        """The next layer message of ``replica``; None for a plan, which waits now, one of a refused step, or whatever
        is of an older view.
        """
        channel = self._channels[replica]
        arrival = self._receive(channel)
        key = Key.unpack(arrival.tag)
        if key.view < self._view:
            self._meter.add("dropped", 1)
        elif key.kind == Kind.PLAN and replica == 0:
            if len(self._plans) == MOST_PLANS:
                raise ProtocolError(f"{MOST_PLANS} plans in place of a layer message")
            self._plans.append((key, bytes(arrival.data)))
        elif not ((bad := self._refused.get(key.batch)) and key == bad._replace(kind=key.kind, layer=key.layer)):
            return arrival
        channel.release(arrival)
        return None

    def _layer(self, step: Step, layer: int) -> None:
        """Q in, attend the stored tokens; KV in, attend the new ones; O out, then write KV, while the next slice runs.

        What came is released behind O: the inbox has room for the next Q and KV beside this one's.
        """
        if self._direct:
            self._direct.run(step, layer)
            return
        self._grants.take_overdue()
        meter, trace, messages = self._meter, self._trace, step.messages(layer)
        source, reply = (self._channels[step.plan.replica_of(i)] for i in (layer, layer + 1))
        q_arrival = self._expect(step, layer, Kind.Q, messages.q_bytes)
        q = self._message(q_arrival)
        if self._store.bind.kv.overlap:
            stored = self._attend_stored(step, layer, q)
        kv_arrival = self._expect(step, layer, Kind.KV, messages.kv_bytes)
        kv = self._message(kv_arrival)
        if not self._store.bind.kv.overlap:
            stored = self._attend_stored(step, layer, q)
        start = trace.now()
        rows = step.rows(layer, kv)
        if messages.o_bytes:
            slot = reply.reserve(messages.o_bytes, timeout_s=RESERVE_S)
            start = trace.add(Event.RESERVE, start, step.plan, layer)
            with meter.time("attend_s"):
                self._finish(step, layer, stored, q, rows, slot.data)
            start = trace.add(Event.NEW, start, step.plan, layer)
            reply.put_signal(slot, _key(Kind.O, step.plan, layer).pack())
            start = trace.add(Event.SEND_O, start, step.plan, layer, 0, messages.o_bytes)
            meter.add("bytes_sent", messages.o_bytes)
        with meter.time("write_s"):
            step.write(layer, rows)
        trace.add(Event.WRITE, start, step.plan, layer)
        for arrival in (q_arrival, kv_arrival):
            if arrival:
                source.release(arrival)

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
        key, start = _key(kind, step.plan, layer), self._trace.now()
        while (arrival := self._take(step.plan.replica_of(layer))) is None:
            pass
        got = Key.unpack(arrival.tag)
        if got != key or arrival.data.nbytes != nbytes:
            raise ProtocolError(f"{got} of {arrival.data.nbytes} bytes in place of {key} of {nbytes} bytes")
        self._trace.add(Event.WAIT_Q if kind == Kind.Q else Event.WAIT_KV, start, step.plan, layer, 0, nbytes)
        return arrival

    def _bind(self, open_store: Callable[[Bind], Store]) -> Store:
        """Wait for a Bind that can be; the peer may try again after a refusal, or leave."""
        channel = self._channels[0]
        while True:
            arrival = self._receive(channel)
            key = Key.unpack(arrival.tag)
            if key.kind != Kind.BIND:
                raise ProtocolError(f"{key} in place of a bind")
            try:
                bind = decode_bind(arrival.data)
                if bind.view != self._view:
                    raise ProtocolError(self._other_view("bind", bind.view))
                self._check_name(channel, 0)
                store = open_store(bind)
            except (ValueError, ImportError, MemoryError, ProtocolError) as e:
                answer, text = Kind.REFUSED, str(e).encode()
            else:
                self._direct_due = self._may_be_direct(store)
                store.bound = structs.replace(store.bound, direct=self._direct_due)
                answer, text = Kind.BOUND, encode(store.bound)
            channel.release(arrival)
            self._send(channel, Key(answer), text)
            if answer == Kind.BOUND:
                return store

    def _check_name(self, channel: Channel, number: int) -> None:
        """Raises ProtocolError where ``channel`` is not of the worker of that number."""
        name = self._names[number] if number < len(self._names) else ""
        if channel.peer_name != name:
            raise ProtocolError(f"worker {number} is {name!r} by the driver, and {channel.peer_name!r} came for it")

    def _other_view(self, what: str, view: int) -> str:
        return f"{what} is of view {view}, this worker is in view {self._view}"

    def _may_be_direct(self, store: Store) -> bool:
        bind = store.bind
        may = bind.direct and devices_may_talk(bind.partition, bind.replicas, bind.prefill_workers)
        return may and can_be_direct(self._channels[0], store.staging)

    def _receive(self, channel: Channel) -> Arrival:
        """The next message. Waits as long as the peer and the driver live: an idle worker is no fault. While it waits,
        what prefill workers send is stored.
        """
        while (arrival := self._poll(channel)) is None:
            self._grants.take()
        self._meter.add("bytes_received", arrival.data.nbytes)
        return arrival

    def _poll(self, channel: Channel) -> Arrival | None:
        with self._meter.time("wait_s"):
            try:
                return channel.wait_signal(timeout_s=self._grants.patience_s)
            except ChannelTimeout:
                return None

    def _send(self, channel: Channel, key: Key, data: bytes) -> None:
        slot = channel.reserve(len(data), timeout_s=RESERVE_S)
        slot.data[:] = data
        channel.put_signal(slot, key.pack())
        self._meter.add("bytes_sent", len(data))


def _key(kind: Kind, plan: StepPlan, layer: int) -> Key:
    return Key(kind, plan.step, plan.batch, plan.view, layer)
