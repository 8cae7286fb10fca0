"""Migration of stripes, or of whole sequences, from one memory worker to another while both continue to serve.

See CopyStripes. Two workers have one channel for it in an epoch, with one transfer for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from lamina.protocol.control import LinkClosedError
from lamina.protocol.step_plan import CommitMigration, CopyStripes, Free, ProtocolError, StepPlan, StripesCopied
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.worker_counters import Counters

from .block_parts import gather, layer_parts, max_block_bytes, scatter
from .peer_links import PeerLinks
from .transfer import Transfer
from .transfer_link import CONNECT_TIMEOUT_S, inbox

SILENCE_S = 30.0  # seconds without a message of a peer that has a copy to send, or without room for one


class LiveMigration:
    """The migrations of one epoch of a memory worker. Only the thread that serves rounds calls ``drop_cancelled`` and
    ``begin``.
    """

    def __init__(
        self,
        store: KvStore,
        links: PeerLinks,
        epoch: int,
        report: Callable[[StripesCopied], None],
        meter: Counters,
    ) -> None:
        """``links``: to all workers of the partition; opened here."""
        self._store, self._links, self._epoch, self._report, self._meter = store, links, epoch, report, meter
        self._last = -1  # the copy that a plan has named last
        each = inbox(max_block_bytes(store))
        links.open(SILENCE_S, inboxes=(each, each), device=store.device, connect_s=CONNECT_TIMEOUT_S)

    def drop_cancelled(self, plan: StepPlan) -> None:
        """Stop receiving copies that end with a plan, before it is applied. Reports them to the driver, which waits for
        a report of each worker.
        """
        for op in plan.ops:
            if isinstance(op, Free | CommitMigration):
                number = op.copy if isinstance(op, CommitMigration) else op.sequence
                if any(link.cancel(number) for link in self._links.by_number.values()):
                    self._report_end(number)

    def begin(self, plan: StepPlan) -> None:
        """Begin the copies that an applied plan requests. Raises ProtocolError for an invalid plan."""
        for op in plan.ops:
            if isinstance(op, CopyStripes):
                self._begin(op)

    def _begin(self, op: CopyStripes) -> None:
        store = self._store
        if op.sequence <= self._last:
            raise ProtocolError(f"copy {op.sequence} comes after copy {self._last}")
        self._last, tables = op.sequence, store.tables
        there = all(s in tables.sequences for s in (op.source, op.sequence))
        size = store.placement.stripe // tables.block_size
        low, high = op.stripe * size, (op.stripe + op.count) * size
        if there and not op.count:
            high = -(-tables.length(op.source) // tables.block_size)
        source, target = self._sources(op) if there else set[int](), self._owner(op.kv_shard)
        own = store.bind_request.worker
        gives, takes = own in source, own == target

        def blocks(sequence: int) -> list[Sequence[int]]:
            return [tables.block_ids(group, sequence, low, high) for group in range(len(tables.windows))]

        if (gives or takes) and (len(source) != 1 or target in source):
            error = f"stripes of memory workers {sorted(source)} for memory worker {target}"
            self._report_end(op.sequence, error=error)
        elif takes:
            parts, (giver,) = layer_parts(store, blocks(op.sequence), scatter), source
            self._links.by_number[giver].expect(Transfer(op.sequence, parts, SILENCE_S, self._report_received))
        elif gives:
            parts = layer_parts(store, blocks(op.source), gather)
            self._links.by_number[target].send(Transfer(op.sequence, parts, on_end=self._report_sent))
        else:
            self._report_end(op.sequence)

    def _sources(self, op: CopyStripes) -> set[int]:
        placement, place = self._store.placement, self._store.tables.location(op.source)
        return {self._owner(placement.kv_shard_of(place, n)) for n in range(op.stripe, op.stripe + max(1, op.count))}

    def _owner(self, kv_shard: int) -> int:
        partition = self._store.bind_request.partition
        owners = partition.tables[partition.layer_table[0]][0].owners
        return owners[kv_shard if len(owners) > 1 else 0]

    def _report_received(self, copy: Transfer) -> None:
        if copy.error is None:
            self._meter.add("moved_bytes", copy.nbytes)
        self._report_end(copy.number, nbytes=0 if copy.error else copy.nbytes, error=str(copy.error or ""))

    def _report_sent(self, copy: Transfer) -> None:
        self._report_end(copy.number, error=str(copy.error or ""))

    def _report_end(self, sequence: int, nbytes: int = 0, error: str = "") -> None:
        with suppress(LinkClosedError):
            self._report(StripesCopied(epoch=self._epoch, sequence=sequence, nbytes=nbytes, error=error))
