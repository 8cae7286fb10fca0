"""One epoch on a memory worker, from its Bind to its end: its workers, and rounds of steps, layer by layer.

In each layer, the steps of a round are served in the order of their plans. So the worker always knows which message is
next, and waits for that one alone. The store is older than the epoch and outlives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import structs

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.observe.trace import FLIP_BIT, Event, Recorder
from lamina.protocol.blocks.block_tables import NoBlocksError, PlanError
from lamina.protocol.step_plan import (
    BlockScoresReport,
    CommitMigration,
    CopyStripes,
    DevicePathRequest,
    FetchPrefix,
    JoinRequest,
    LoadKv,
    MessageKey,
    MessageKind,
    PrefillGrant,
    ProtocolError,
    SaveKv,
    StepPlan,
    StorageOp,
    decode,
    encode,
)
from lamina.workers.device_transport import DeviceTransport

from .attention_step import AttentionStep
from .epoch_messages import MessageInbox, check_name, other_epoch_error, send_message
from .kv_checksums import flip_bit
from .kv_store import KvStore
from .kv_transfer.live_migration import LiveMigration
from .kv_transfer.prefill_receive import PrefillReceiver
from .kv_transfer.prefix_send import PrefixSender
from .layer_loop.device_loop import DeviceLayerLoop
from .layer_loop.host_loop import HostLayerLoop, ParityLayerLoop
from .layer_loop.hybrid_loop import HybridLayerLoop
from .layer_loop.native_loop import NativeLayerLoop, can_use_native_loop
from .offload.page_transfers import PageTransfers
from .worker_counters import Counters


class LayerLoop(Protocol):
    """Serves the messages and the attention of each layer, for all steps of an epoch."""

    def run(self, steps: Sequence[AttentionStep]) -> None:
        """Serve all layers of a round. In each layer, and for each step in order: receive Q, K and V, attend, store,
        send O. Reports rows that all layers have written to the store. Raises ChannelError, ProtocolError.
        """
        ...

    def abort(self, reason: str) -> None:
        """Notify peers that wait for the messages of a refused step."""
        ...


class EpochServer:
    """Serves the channels of all replicas and prefill workers in one epoch. Replica 0 sends the plans."""

    def __init__(
        self,
        channel: Channel,
        store: KvStore,
        meter: Counters,
        trace: Recorder,
        epoch: int = 0,
        names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        page_transfers: PageTransfers | None = None,
        live_migration: LiveMigration | None = None,
        prefixes: PrefixSender | None = None,
        report: Callable[[BlockScoresReport], None] = lambda scored: None,
    ) -> None:
        """``store``: of the Bind that came on ``channel``. ``names``: those of all workers that will connect, by their
        number. ``page_transfers``: if pages are offloaded. ``live_migration``: if stripes may migrate.
        ``prefixes``: if prefill workers get stored KV. ``report``: sends to the driver.
        """
        self._channels = [channel]
        self._store, self._meter, self._trace = store, meter, trace
        self._epoch, self._names = epoch, names
        self._page_transfers, self._live_migration = page_transfers, live_migration
        self._prefixes, self._report = prefixes, report
        self._loads = page_transfers.loader if page_transfers else None
        grants = None
        if store.bind_request.prefill_workers:
            grants = PrefillReceiver(store, meter, trace, clock, epoch, self._loads, prefixes)
        self._inbox = MessageInbox(self._channels, meter, epoch, grants)
        # True if a second channel, for messages of hosts, is still due.
        self._awaits_host_channel = store.bind_reply.device_path
        self._device_layers: DeviceLayerLoop | None = None

    @property
    def num_missing(self) -> int:
        """The number of channels still due: of replicas, of prefill workers, and one for messages of hosts if
        needed.
        """
        bind = self._store.bind_request
        return bind.replicas + bind.prefill_workers - len(self._channels) + self._awaits_host_channel

    def add_channel(self, channel: Channel) -> None:
        """Add the channel of the next worker, or refuse one of another epoch. Raises ProtocolError if it is not the
        worker that is due, or has another model.
        """
        arrival = self._inbox.receive(channel)
        key, bind = MessageKey.unpack(arrival.tag), self._store.bind_request
        if key.kind == MessageKind.DIRECT and self._awaits_host_channel:
            self._join_direct(channel, arrival)
            return
        if key.kind != MessageKind.JOIN:
            raise ProtocolError(f"{key} in place of a join")
        join = decode(JoinRequest, arrival.data)
        channel.release(arrival)
        if join.epoch != self._epoch:
            error = other_epoch_error("join", join.epoch, self._epoch)
            self._send(channel, MessageKey(MessageKind.REFUSED), error.encode())
            channel.close()
            return
        check_name(channel, join.peer_number, self._names)
        if join.peer_number != len(self._channels):
            raise ProtocolError(f"worker {join.peer_number} came when worker {len(self._channels)} was due")
        computes = join.peer_number < bind.replicas  # prefill workers do not prove how keys rotate
        if join.layers != (bind.layers if computes else [structs.replace(x, rotary=None) for x in bind.layers]):
            raise ProtocolError(f"worker {join.peer_number} has another model than the one that was bound")
        self._channels.append(channel)
        if join.peer_number >= bind.replicas and self._inbox.grants is not None:
            self._inbox.grants.add_sender(channel)
        self._send(channel, MessageKey(MessageKind.BOUND), encode(self._store.bind_reply))

    def _join_direct(self, channel: Channel, arrival: Arrival) -> None:
        check_name(channel, 0, self._names)
        order = decode(DevicePathRequest, arrival.data)
        channel.release(arrival)
        self._send(channel, MessageKey(MessageKind.BOUND), encode(self._store.bind_reply))
        self._awaits_host_channel = False
        # For messages of hosts, which the first channel may not carry.
        first, self._channels[0] = self._channels[0], channel
        if order.wait_s > 0:
            wire = DeviceTransport(first, self._store.staging, order.wait_s)
            self._device_layers = DeviceLayerLoop(wire, self._store, self._meter, graphs=order.graphs)
        else:
            first.close()

    def check_channels(self) -> None:
        """Raise ChannelError if a replica was lost, ProtocolError if one sends before all have joined."""
        for channel in self._channels:
            with suppress(ChannelTimeout):
                raise ProtocolError(
                    f"{MessageKey.unpack(channel.wait_signal(timeout_s=0.0).tag)} before all have joined"
                )

    def run(self) -> None:
        """Serve rounds until a channel ends; all workers have joined before. Raises ChannelError, ProtocolError,
        CorruptedMemoryError.
        """
        layers = self._device_layers or self._host_layers()
        while True:
            steps, sums = self._round(layers), self._store.checksums
            if layers is self._device_layers:
                self._await_loads(steps)
            if self._trace.is_due(FLIP_BIT) and flip_bit(self._store, steps):
                self._trace.on_failpoint_passed(FLIP_BIT)
            if sums:
                sums.verify_before_step(steps)
            layers.run(steps)
            if sums:
                sums.update_after_step(steps)
            for scored in (x for step in steps if step.scoring for x in step.scoring.reports()):
                self._report(scored)

    def _host_layers(self) -> LayerLoop:
        replicas = self._channels[: self._store.bind_request.replicas]
        form = NativeLayerLoop if can_use_native_loop(self._store, replicas) else HostLayerLoop
        if self._store.bind_request.parity:
            form = ParityLayerLoop
        elif self._store.states:
            form = HybridLayerLoop
        return form(replicas, self._inbox, self._store, self._meter, self._trace, self._loads)

    def _await_loads(self, steps: Sequence[AttentionStep]) -> None:
        """Wait until the KV that these steps load is there: kernels do not wait for single layers."""
        if (loads := self._loads) is None:
            return
        for step in steps:
            needed, last = loads.needed_by(step.plan), len(self._store.layers) - 1
            while not loads.wait(needed, last, self._inbox.poll_timeout_s):
                self._inbox.receive_grant()
            loads.collect()

    def _round(self, layers: LayerLoop) -> list[AttentionStep]:
        """Begin the steps of the next round and return those that have rows."""
        steps, more = list[AttentionStep](), True
        while more:
            start = self._trace.now()
            while not self._inbox.plans:
                if (arrival := self._inbox.next_message(0)) is not None:
                    raise ProtocolError(f"{MessageKey.unpack(arrival.tag)} in place of a plan")
            key, data = self._inbox.plans.popleft()
            start = self._trace.add(Event.WAIT_PLAN, start, key)
            step, more = self._begin(key, data, layers)
            self._trace.add(Event.PLAN, start, key)
            if step is not None and step.plan.num_rows:
                steps.append(step)
        return steps

    def _begin(self, key: MessageKey, data: bytes, layers: LayerLoop) -> tuple[AttentionStep | None, bool]:
        """Apply a plan or refuse it. Returns its step, None if refused, and whether the round has more plans."""
        plan = None
        try:
            with self._meter.time("plan_s"):
                plan = decode(StepPlan, data)
                if key != MessageKey.for_step(MessageKind.PLAN, plan):
                    raise ProtocolError(f"the plan of step {plan.step} came as {key}")
                if plan.epoch != self._epoch:
                    raise ProtocolError(other_epoch_error(f"step {plan.step}", plan.epoch, self._epoch))
                grants = self._inbox.grants
                if grants is not None:
                    grants.check_plan(plan)
                elif any(isinstance(op, PrefillGrant | FetchPrefix) for op in plan.ops):
                    raise ProtocolError(f"step {plan.step} grants or fetches, and there are no prefill workers")
                sends = self._prefixes is not None or self._store.bind_request.parity
                if not sends and any(isinstance(op, PrefillGrant) and op.num_fetched for op in plan.ops):
                    raise ProtocolError(f"step {plan.step} lets a prefill worker fetch, and none is connected for it")
                self._begin_store(plan)
                if grants is not None:
                    grants.expect(plan)
                step = AttentionStep(self._store, plan)
        except (ProtocolError, PlanError, NoBlocksError) as e:
            self._inbox.refused_plans[key.batch] = key
            self._meter.add("refused", 1)
            reader = plan.replica_of(1) if plan else 0
            channel = self._channels[reader if 0 <= reader < len(self._channels) else 0]
            self._send(channel, key._replace(kind=MessageKind.REFUSED), str(e).encode())
            layers.abort(str(e))
            return None, plan is not None and plan.has_more
        self._inbox.refused_plans.pop(key.batch, None)
        self._meter.add("steps", 1)
        self._meter.add("rows", step.plan.num_rows)
        self._meter.add("remote_bytes", step.remote_bytes)
        return step, plan.has_more

    def _begin_store(self, plan: StepPlan) -> None:
        if self._page_transfers is not None:
            self._page_transfers.collect()
            self._page_transfers.begin_plan(plan)  # also copies blocks that are still to be saved, and wipes freed ones
        elif any(isinstance(op, SaveKv | LoadKv | StorageOp) for op in plan.ops):
            raise ProtocolError(f"step {plan.step} saves or loads, but KV offload is off")
        elif any(isinstance(op, CopyStripes | CommitMigration) for op in plan.ops) and self._live_migration is None:
            raise ProtocolError(f"step {plan.step} moves stripes, but no memory worker has connected for a migration")
        else:
            again = self._store.tables.is_replay(plan)
            if self._live_migration is not None and not again:
                self._live_migration.drop_cancelled(plan)
            self._store.apply_plan(plan)
            self._store.apply_block_copies()
            if self._live_migration is not None and not again:
                self._live_migration.begin(plan)

    def _send(self, channel: Channel, key: MessageKey, data: bytes) -> None:
        send_message(channel, key, data, self._meter)
