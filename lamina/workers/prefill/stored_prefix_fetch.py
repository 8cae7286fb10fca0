"""Fetches of stored KV: a prefill worker gets K and V of a prompt's beginning from the memory workers, and computes the
rest.

In an epoch it has a second channel to each memory worker. It requests a coming step's KV at once. Each memory worker
replies with its heads and tokens, one layer after another, so rows go through a layer as soon as that has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lamina.config.partition import Partition
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.protocol.control import Address, TransferPeer
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.prefix_fetch import StoredPrefixRequest, owned_blocks
from lamina.protocol.step_plan import GRANTS_AHEAD, MEMORY_WORKERS, FetchPrefix, ProtocolError, StepPlan, encode
from lamina.workers.compute.attention_client import MissingKvError
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.block_parts import block_parts, max_block_bytes, scatter, whole_blocks
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer_link import Transfer, TransferPart, TransferRefusedError, inbox
from lamina.workers.runtime import RUNTIME, Runtime


class StoredPrefixFetch:
    """The fetches of a prefill worker from memory workers, in one epoch."""

    def __init__(
        self,
        store: KvStore,
        partition: Partition,
        first_layer: int,
        timeout_s: float,
        around: Runtime = RUNTIME,
        trace: Recorder = NULL_RECORDER,
    ) -> None:
        """``store``: of the layers from ``first_layer`` on. ``partition``: of the memory workers. ``timeout_s``: of a
        step.
        """
        self._store, self._partition, self._first_layer = store, partition, first_layer
        self._timeout_s, self._runtime, self._trace = timeout_s, around, trace
        self._placement = KvPlacement(
            partition.num_kv_shards, partition.stripe_chunks * CHUNK_TOKENS, partition.single_shard
        )
        self._links: PeerLinks | None = None  # set by ``connect``
        self._step: StepPlan | None = None
        self._pending: list[Transfer] = []  # of the current step, by memory worker
        self._counted = 0  # bytes of these

    def connect(self, memory: Sequence[Address], name: str, fabric: EpochFabric, limit_s: float) -> None:
        """Connect to the memory workers in the background. ``name``: that this worker proves."""
        peers = [TransferPeer(there.name, connects=True, url=there.url, key=there.key) for there in memory]
        own, each = TransferPeer(name, is_receiver=True), inbox(max_block_bytes(self._store))
        self._links = PeerLinks(fabric, [*peers, own], self._runtime)
        silence_s = (GRANTS_AHEAD + 1) * self._timeout_s  # steps that may be planned first
        self._links.open(silence_s, limit_s, limit_s, inboxes=(each, each), device=self._store.device)

    def stop(self) -> None:
        """Write nothing to the store from now on, and end the epoch of the channels."""
        if self._links is not None:
            self._links.stop()

    def request(self, plan: StepPlan) -> None:
        """Request the KV that a coming step fetches. Raises ProtocolError."""
        for op in plan.ops:
            if isinstance(op, FetchPrefix) and op.worker == MEMORY_WORKERS:
                if self._links is None:
                    raise ProtocolError(f"{op}: there is no channel for it")
                layers = self._first_layer, self._first_layer + len(self._store.layers)
                data = encode(StoredPrefixRequest(op.source, op.first, op.count, *layers))
                for link in self._links.by_number.values():
                    link.request(plan.step, data)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin the step of an applied plan. Raises ProtocolError."""
        self._step, self._pending, self._counted = plan, [], 0
        for op in plan.ops:
            if isinstance(op, FetchPrefix) and op.worker == MEMORY_WORKERS and self._links is not None:
                ids = whole_blocks(self._store, op.sequence, op.first, op.count)
                if ids is None or self._pending:
                    raise ProtocolError(f"step {plan.step}: {op} does not begin with a block, or is not the only one")
                self._store.staging.record_event()()  # waits until the device no longer uses the blocks
                self._pending = [
                    link.expect(Transfer(plan.step, self._parts(op, ids, worker), self._timeout_s))
                    for worker, link in self._links.by_number.items()
                ]

    def receive_layer(self, layer: int) -> int:
        """Wait until the fetched KV of ``layer``, counted from the store's first one, is stored. Returns the bytes that
        have come since the last call. Raises ChannelError.
        """
        if not self._pending or self._links is None or self._step is None:
            return 0
        start = self._trace.now()
        for transfer, link in zip(self._pending, self._links.by_number.values(), strict=True):
            try:
                link.wait(transfer, layer)
            except TransferRefusedError as e:
                raise MissingKvError(f"{link.peer}: {e}") from e
        before, self._counted = self._counted, sum(transfer.nbytes for transfer in self._pending)
        nbytes = self._counted - before
        self._trace.add(Event.FETCH, start, self._step, layer, MEMORY_WORKERS, nbytes)
        return nbytes

    def _parts(self, op: FetchPrefix, ids: Sequence[Sequence[int]], worker: int) -> Iterator[TransferPart]:
        """Yield the parts of a memory worker: its heads of the blocks that lie there."""
        size = self._store.tables.block_size
        low, high = op.first // size, -(-(op.first + op.count) // size)
        for layer, (own,) in enumerate(self._store.layers):
            for piece in self._partition.pieces(self._first_layer + layer, worker):
                there = owned_blocks(self._placement, piece.kv_shards, op.source_location, range(low, high), size)
                blocks = [ids[own.group][n - low] for n in there]
                yield from block_parts(self._store, layer, 0, blocks, scatter, (piece.head_start, piece.head_stop))
