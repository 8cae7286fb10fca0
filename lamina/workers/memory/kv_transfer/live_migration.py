"""Migration of stripes, or of whole sequences, from one memory worker to another while both continue to serve.

See protocol.migration_ops. Two workers have one channel for it in an epoch. A message has some whole KV blocks of a
layer: K, V, and their scales if there are any. Its tag names it and has a checksum. Data for a copy that is no longer
wanted is dropped, and so is all data that arrives after a worker has left the epoch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout, Geometry, Terms
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.protocol.control import LinkClosedError
from lamina.protocol.migration_ops import CommitMigration, CopyStripes, MigrationPeer, StripesCopied
from lamina.protocol.step_plan import Free, ProtocolError, StepPlan
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.block_bytes import BlockBytes
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import Staging, open_staging

SLOTS, PART_BYTES = 2, 1 << 18  # slots of an inbox; bytes of a message, unless a block is larger
CONNECT_TIMEOUT_S = 5.0  # seconds for other workers to connect; without them nothing is copied, and all else continues
SEND_S = 10.0  # seconds for a peer to free a slot
POLL_S = 1.0  # seconds of a wait for the next message, before a check for silent peers
IDLE_TIMEOUT_S = 30.0  # seconds without a message of a peer that has a copy to send
PLAN_S = 60.0  # seconds for the plan of a copy whose data has already arrived
END_S = 0.5
_TAG = struct.Struct(f"<QI{CHECKSUM_BYTES}s")


class _CopyMessage(NamedTuple):
    """One message: the KV blocks ``run`` of the stripes, in one layer."""

    layer: int
    run: range


class _CopyJob(NamedTuple):
    """A copy to send. ``blocks``: the stripes' blocks here, by group."""

    sequence: int
    peer: int
    blocks: list[Sequence[int]]


@dataclass
class _IncomingCopy:
    """A copy to receive. ``parts``: its messages in order, of which ``num_received`` have arrived."""

    peer: int
    blocks: list[Sequence[int]]
    parts: list[_CopyMessage]
    started_at: float  # when the plan arrived
    num_received: int = 0
    nbytes: int = 0


class LiveMigration:
    """The migrations of one epoch of a memory worker. Only the thread that serves rounds calls ``drop_cancelled`` and
    ``begin``.
    """

    def __init__(
        self,
        view: EpochFabric,
        peers: Sequence[MigrationPeer],
        report: Callable[[StripesCopied], None],
        meter: Counters,
        around: Runtime = RUNTIME,
    ) -> None:
        """``peers``: all workers of the partition, by number, including this one."""
        self._view, self._peers, self._report, self._meter = view, peers, report, meter
        self._runtime, self._clock, self._deadline = around, around.clock, math.inf
        self._names = {peer.name: n for n, peer in enumerate(peers) if peer.is_awaited}
        self._due = set(self._names)
        self._changed = around.condition()
        self._links: dict[int, Channel] = {}
        self._incoming: dict[int, _IncomingCopy] = {}  # by number of the copy
        self._last, self._over = -1, False  # the copy that a plan has named last
        self._jobs = around.queue()  # items are _CopyJob; None ends the thread
        self._running = 0  # number of threads
        self._store: KvStore | None = None
        self._stored: BlockBytes | None = None  # the blocks of the store
        self._connects = False  # if this worker connects to others

    @property
    def num_missing(self) -> int:
        """The number of workers that are still to connect; 0 after a time limit."""
        if self._due and self._clock() > self._deadline:
            self._due.clear()
        return len(self._due)

    def accept(self, channel: Channel) -> bool:
        """Keep ``channel`` if it belongs to another worker that copies stripes, and return whether it does."""
        peer = self._names.get(channel.peer_name)
        if peer is not None:
            self._due.discard(channel.peer_name)
            self._add(peer, channel)
        return peer is not None

    def start(self, store: KvStore) -> None:
        """Begin to receive copies into ``store`` and to send them from it."""
        with self._changed:
            self._store, self._stored = store, BlockBytes(store, PART_BYTES)
            waiting = list(self._links.items())
            self._deadline = self._clock() + CONNECT_TIMEOUT_S
        for peer, channel in waiting:
            self._listen(peer, channel)
        if any(peer.connects for peer in self._peers):
            self._connects = True
            self._runtime.start_background(self._connect, "lamina-meet")
        self._start(self._send_all, "lamina-copy")

    def drop_cancelled(self, plan: StepPlan) -> None:
        """Stop receiving copies that end with a plan, before it is applied. Reports them to the driver, which waits for
        a report of each worker.
        """
        ended = [
            op.copy if isinstance(op, CommitMigration) else op.sequence
            for op in plan.ops
            if isinstance(op, Free | CommitMigration)
        ]
        with self._changed:
            dropped = [number for number in ended if self._incoming.pop(number, None) is not None]
        for number in dropped:
            self._report_done(number)

    def begin(self, plan: StepPlan) -> None:
        """Begin the copies that an applied plan requests. Raises ProtocolError for an invalid plan."""
        for op in plan.ops:
            if isinstance(op, CopyStripes):
                self._begin(op)

    def stop(self) -> None:
        """Stop writing to the store. After that the epoch's channels may be closed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._jobs.put(None)
        if self._links or self._connects:
            self._view.end_epoch(f"epoch {self._view.epoch} is over")
        with self._changed:
            if self._running:
                self._changed.wait_for(lambda: not self._running, END_S)

    def _begin(self, op: CopyStripes) -> None:
        store = self._store
        assert store is not None
        tables, groups = store.tables, range(len(store.tables.windows))
        if op.sequence <= self._last:
            raise ProtocolError(f"copy {op.sequence} comes after copy {self._last}")
        there = all(s in tables.sequences for s in (op.source, op.sequence))
        size = store.placement.stripe // tables.block_size
        low, high = op.stripe * size, (op.stripe + op.count) * size
        if there and not op.count:
            high = -(-tables.length(op.source) // tables.block_size)
        source, target = self._sources(op) if there else set[int](), self._owner(op.kv_shard)
        gives, takes, error = self._me in source, self._me == target, ""
        if (gives or takes) and (len(source) != 1 or target in source):
            error = f"stripes of memory workers {sorted(source)} for memory worker {target}"
        if error or not (gives or takes):
            self._note(op.sequence)
            self._report_done(op.sequence, error=error)
            return
        (giver,), of = source, op.sequence if takes else op.source
        blocks: list[Sequence[int]] = [tables.block_ids(g, of, low, high) for g in groups]
        self._note(op.sequence, _IncomingCopy(giver, blocks, self._parts(blocks), self._clock()) if takes else None)
        if gives:
            self._jobs.put(_CopyJob(op.sequence, target, blocks))

    @property
    def _me(self) -> int:
        assert self._store is not None
        return self._store.bind_request.worker

    def _note(self, sequence: int, coming: _IncomingCopy | None = None) -> None:
        with self._changed:
            self._last = sequence
            if coming is not None:
                self._incoming[sequence] = coming
            self._changed.notify_all()

    def _sources(self, op: CopyStripes) -> set[int]:
        assert self._store is not None
        placement, place = self._store.placement, self._store.tables.location(op.source)
        return {self._owner(placement.kv_shard_of(place, n)) for n in range(op.stripe, op.stripe + max(1, op.count))}

    def _owner(self, kv_shard: int) -> int:
        assert self._store is not None
        partition = self._store.bind_request.partition
        owners = partition.tables[partition.layer_table[0]][0].owners
        return owners[kv_shard if len(owners) > 1 else 0]

    # Channels.
    def _connect(self) -> None:
        assert self._stored is not None
        inbox = Geometry(slots=SLOTS, slot_bytes=max(PART_BYTES, self._stored.max_block_bytes))
        name = self._peers[self._me].name
        for number, peer in enumerate(self._peers):
            terms = Terms(outbound=inbox, inbound=inbox, name=name, peer=peer.name, key=peer.key)
            with suppress(ChannelError):  # nothing is copied there, which is reported to the driver
                if peer.connects:
                    self._add(number, self._view.connect(peer.url, terms, timeout_s=CONNECT_TIMEOUT_S))

    def _add(self, peer: int, channel: Channel) -> None:
        with self._changed:
            self._links[peer], ready = channel, self._store is not None
            self._changed.notify_all()
        if ready:
            self._listen(peer, channel)

    def _listen(self, peer: int, channel: Channel) -> None:
        self._start(lambda: self._receive_all(peer, channel), "lamina-copied")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with self._changed:
            self._running += 1
        self._runtime.start(run, name)

    def _link(self, peer: int) -> Channel:
        """Return the channel to a peer, after it has connected. Raises ChannelError."""
        with self._changed:
            self._changed.wait_for(lambda: peer in self._links or self._over, CONNECT_TIMEOUT_S)
            if peer not in self._links or self._over:
                raise ChannelTimeout(f"{self._peers[peer].name} is not there")
            return self._links[peer]

    def _report_done(self, sequence: int, nbytes: int = 0, error: str = "") -> None:
        with suppress(LinkClosedError):
            self._report(StripesCopied(epoch=self._view.epoch, sequence=sequence, nbytes=nbytes, error=error))

    # Send.
    def _send_all(self) -> None:
        assert self._store is not None
        staging = open_staging(self._store.device)
        job: _CopyJob | None
        while (job := self._jobs.get()) is not None:
            error = ""
            try:
                channel = self._link(job.peer)
                for number, part in enumerate(self._parts(job.blocks)):
                    self._send(channel, job, number, part, staging)
            except ChannelError as e:
                error = str(e)
                with suppress(KeyError):
                    self._links[job.peer].abort(error)  # the receiver of the rest must notice
            self._report_done(job.sequence, error=error)

    def _send(self, channel: Channel, job: _CopyJob, number: int, part: _CopyMessage, staging: Staging) -> None:
        assert self._stored is not None
        slot = channel.reserve(self._stored.nbytes(*part), timeout_s=SEND_S)
        self._stored.gather(part.layer, _ids(job.blocks, part), slot.data, staging)
        channel.put_signal(slot, _TAG.pack(job.sequence, number, checksum(slot.data)))

    # Receive.
    def _receive_all(self, peer: int, channel: Channel) -> None:
        """Receive parts of copies until the channel ends."""
        assert self._store is not None
        staging, heard = open_staging(self._store.device), self._clock()
        try:
            while True:
                try:
                    arrival = channel.wait_signal(timeout_s=POLL_S)
                except ChannelTimeout:
                    self._check_hears(peer, heard)
                    continue
                try:
                    self._receive(peer, arrival, staging)
                finally:
                    channel.release(arrival)
                heard = self._clock()
        except (ChannelError, ProtocolError) as e:
            channel.abort(str(e))
            self._on_peer_lost(peer, str(e))

    def _check_hears(self, peer: int, heard: float) -> None:
        """Raise ProtocolError if a peer that has a copy to send was silent for IDLE_TIMEOUT_S seconds. ``heard``: the
        time of its last message.
        """
        with self._changed:
            since = [max(coming.started_at, heard) for coming in self._incoming.values() if coming.peer == peer]
        if since and self._clock() - min(since) > IDLE_TIMEOUT_S:
            raise ProtocolError(f"{self._peers[peer].name} has sent nothing of a copy for {IDLE_TIMEOUT_S:g} s")

    def _receive(self, peer: int, arrival: Arrival, staging: Staging) -> None:
        assert self._stored is not None
        sequence, number, sent_checksum = _TAG.unpack(arrival.tag[: _TAG.size])
        with self._changed:
            if not self._changed.wait_for(lambda: sequence <= self._last or self._over, PLAN_S):
                raise ProtocolError(f"no plan has named copy {sequence}")
            coming = self._incoming.get(sequence)
            if self._over or coming is None or coming.peer != peer:
                return
            part, due = coming.parts[coming.num_received], coming.num_received
            if number != due or arrival.data.nbytes != self._stored.nbytes(*part):
                raise ProtocolError(
                    f"part {number} of copy {sequence} with {arrival.data.nbytes} bytes, not part {due}"
                )
            if sent_checksum != checksum(arrival.data):
                raise ProtocolError(f"part {number} of copy {sequence} is damaged")
            self._stored.scatter(part.layer, _ids(coming.blocks, part), arrival.data, staging)
            coming.num_received += 1
            coming.nbytes += arrival.data.nbytes
            if coming.num_received < len(coming.parts):
                return
            del self._incoming[sequence]
        self._meter.add("moved_bytes", coming.nbytes)
        self._report_done(sequence, nbytes=coming.nbytes)

    def _on_peer_lost(self, peer: int, why: str) -> None:
        with self._changed:
            self._links.pop(peer, None)
            lost = [sequence for sequence, coming in self._incoming.items() if coming.peer == peer]
            for sequence in lost:
                del self._incoming[sequence]
            over = self._over
        for sequence in () if over else lost:
            self._report_done(sequence, error=why)

    def _parts(self, blocks: Sequence[Sequence[int]]) -> list[_CopyMessage]:
        """Return the messages of a copy, in the order in which they are sent."""
        stored = self._stored
        assert stored is not None
        return [_CopyMessage(n, run) for n in range(stored.num_layers) for run in stored.runs(n, len(blocks[0]))]


def _ids(blocks: Sequence[Sequence[int]], part: _CopyMessage) -> list[Sequence[int]]:
    return [group[part.run.start : part.run.stop] for group in blocks]
