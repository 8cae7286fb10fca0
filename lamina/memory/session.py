"""One view on a memory worker, from its Bind to its end: rounds of steps, layer by layer.

Every step of a round has its turn in each layer, in the order of the plans; so the worker knows at any time whose
message is next, and waits for that one alone. The store is not the session's: it was there before, or stays behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import structs

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.observe.trace import FLIP, Event, Recorder
from lamina.protocol.blocks.tables import NoBlocksError, PlanError
from lamina.protocol.options.resolve import LayerPath, layer_path
from lamina.protocol.plan import (
    Adopt,
    Bind,
    Export,
    Import,
    Key,
    Kind,
    MediumOp,
    MoveStripes,
    ProtocolError,
    StepPlan,
    decode_bind,
    decode_direct,
    decode_join,
    decode_plan,
    encode,
)
from lamina.protocol.sparse_ops import Scored
from lamina.workers.wire import LayerWire, can_be_direct

from .copies import StripeCopies
from .grants import Grants
from .inbox import RoundInbox
from .layers.device import DeviceLayers
from .layers.host import RESERVE_S, HostLayers
from .layers.native import NativeLayers, can_be_native
from .layers.parity import ParityLayers
from .meter import Meter
from .pages.transfers import Transfers
from .step import Step
from .store import Store
from .sums import damage


class Layers(Protocol):
    """The way of a layer's messages, for all steps of a view; and the work of a layer between them."""

    def run(self, steps: Sequence[Step]) -> None:
        """All layers of a round: of each layer, in the order of ``steps``, take Q, K and V, attend, store, send O. The
        store is told of rows that are written in all layers. Raises ChannelError, ProtocolError.
        """
        ...

    def refuse(self, reason: str) -> None:
        """A step was refused: whoever waits for its messages is to know."""
        ...


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Waits for a Bind on ``channel``, for which ``open_store`` gives the store. ``names``: of all that come, by
        number.
        """
        self._channels = [channel]
        self._view, self._names = view, names
        self._meter = meter
        self._trace = trace
        self._grants = Grants(meter, trace, clock, view)
        self._inbox = RoundInbox(self._channels, self._grants, meter, view)
        self._direct_due = False  # whether a channel for hosts is still to come
        self._store = self._bind(open_store)
        self._grants.serve(self._store)
        self._device_layers: DeviceLayers | None = None
        self.transfers: Transfers | None = None  # set before ``run``, where pages are kept beside the pool
        self.copies: StripeCopies | None = None  # set before ``run``, where stripes may move
        self.report: Callable[[Scored], None] = lambda scored: None  # to the driver; set before ``run``

    @property
    def missing(self) -> int:
        """Channels that are still to come: of replicas, of prefill workers, and one for hosts if it is due."""
        bind = self._store.bind
        return bind.replicas + bind.prefill_workers - len(self._channels) + self._direct_due

    def join(self, channel: Channel) -> None:
        """Take the next one in, or tell one of another view that it is. Raises ProtocolError if it is not the one that
        is due, or has another model.
        """
        arrival = self._inbox.receive(channel)
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
        order = decode_direct(arrival.data)
        channel.release(arrival)
        self._send(channel, Key(Kind.BOUND), encode(self._store.bound))
        self._direct_due = False
        first, self._channels[0] = self._channels[0], channel  # for hosts, as the first one may not be
        if order.wait_s > 0:
            wire = LayerWire(first, self._store.staging, order.wait_s)
            self._device_layers = DeviceLayers(wire, self._store, self._meter, graphs=order.graphs)
        else:
            first.close()

    def check_idle(self) -> None:
        """Raises ChannelError when a replica was lost, ProtocolError if one sends before all have joined."""
        for channel in self._channels:
            with suppress(ChannelTimeout):
                raise ProtocolError(f"{Key.unpack(channel.wait_signal(timeout_s=0.0).tag)} before all have joined")

    def run(self) -> None:
        """Serve rounds until a channel ends. All have joined. Raises ChannelError, ProtocolError, DamagedError."""
        layers = self._device_layers or self._host_layers()
        while True:
            steps, sums = self._round(layers), self._store.sums
            if layers is self._device_layers:
                self._await_loads(steps)
            if self._trace.due(FLIP) and damage(self._store, steps):
                self._trace.done(FLIP)
            if sums:
                sums.begin(steps)
            layers.run(steps)
            if sums:
                sums.end(steps)
            for scored in (x for step in steps for x in step.scoring.answers()):
                self.report(scored)

    def _host_layers(self) -> Layers:
        replicas = self._channels[: self._store.bind.replicas]
        form = NativeLayers if can_be_native(self._store, replicas) else HostLayers
        if self._store.bind.parity:
            form = ParityLayers
        loads = self.transfers.loads if self.transfers else None
        return form(replicas, self._inbox, self._store, self._grants, self._meter, self._trace, loads)

    def _await_loads(self, steps: Sequence[Step]) -> None:
        """Kernels wait for no layer: all that they will see has to be there."""
        loads = self.transfers.loads if self.transfers else None
        if loads is None:
            return
        for step in steps:
            while not loads.wait(loads.needed_by(step.plan), len(self._store.layers) - 1, self._grants.patience_s):
                self._grants.take()
            loads.settle()

    def _round(self, layers: Layers) -> list[Step]:
        """Begin the steps of the next round; those that have rows."""
        steps, more = list[Step](), True
        while more:
            start = self._trace.now()
            while not self._inbox.plans:
                if (arrival := self._inbox.take(0)) is not None:
                    raise ProtocolError(f"{Key.unpack(arrival.tag)} in place of a plan")
            key, data = self._inbox.plans.popleft()
            start = self._trace.add(Event.WAIT_PLAN, start, key)
            step, more = self._begin(key, data, layers)
            self._trace.add(Event.PLAN, start, key)
            if step is not None and step.plan.num_rows:
                steps.append(step)
        return steps

    def _begin(self, key: Key, data: bytes, layers: Layers) -> tuple[Step | None, bool]:
        """Apply a plan, or refuse it; and whether the round goes on behind it."""
        plan = None
        try:
            with self._meter.time("plan_s"):
                plan = decode_plan(data)
                if key != Key.of(Kind.PLAN, plan):
                    raise ProtocolError(f"the plan of step {plan.step} came as {key}")
                if plan.view != self._view:
                    raise ProtocolError(self._other_view(f"step {plan.step}", plan.view))
                self._grants.check(plan)
                self._begin_store(plan)
                self._grants.add(plan, self._store)
                step = Step(self._store, plan)
        except (ProtocolError, PlanError, NoBlocksError) as e:
            self._inbox.refused[key.batch] = key
            self._meter.add("refused", 1)
            reader = plan.replica_of(1) if plan else 0
            channel = self._channels[reader if 0 <= reader < len(self._channels) else 0]
            self._send(channel, key._replace(kind=Kind.REFUSED), str(e).encode())
            layers.refuse(str(e))
            return None, plan is not None and plan.more
        self._inbox.refused.pop(key.batch, None)
        self._meter.add("steps", 1)
        self._meter.add("rows", step.plan.num_rows)
        self._meter.add("remote_bytes", step.remote_bytes)
        return step, plan.more

    def _begin_store(self, plan: StepPlan) -> None:
        if self.transfers is not None:
            self.transfers.settle()
            self.transfers.begin(plan)  # which copies what is still to be saved, and wipes
        elif any(isinstance(op, Export | Import | MediumOp) for op in plan.ops):
            raise ProtocolError(f"step {plan.step} saves or loads, and there is no medium beside the pool")
        elif any(isinstance(op, MoveStripes | Adopt) for op in plan.ops) and self.copies is None:
            raise ProtocolError(f"step {plan.step} moves stripes, and no memory worker has come for any")
        else:
            again = self._store.tables.comes_again(plan)
            if self.copies is not None and not again:
                self.copies.expect(plan)
            self._store.begin(plan)
            self._store.make_ready()
            if self.copies is not None and not again:
                self.copies.begin(plan)

    def _bind(self, open_store: Callable[[Bind], Store]) -> Store:
        """Wait for a Bind that can be; the peer may try again after a refusal, or leave."""
        channel = self._channels[0]
        while True:
            arrival = self._inbox.receive(channel)
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
        kernels = bind.direct and can_be_direct(self._channels[0], store.staging)
        path = layer_path(bind.partition, bind.replicas, bind.prefill_workers, kernels=kernels)
        return path is LayerPath.DEVICE

    def _send(self, channel: Channel, key: Key, data: bytes) -> None:
        slot = channel.reserve(len(data), timeout_s=RESERVE_S)
        slot.data[:] = data
        self._meter.add("bytes_sent", len(data))
        channel.put_signal(slot, key.pack())
