"""Placement with ``--partition spill``: a sequence lies on its home worker, except stripes that do not fit there.

Stripes are borrowed when a sequence is admitted, so no prompt migrates, and one by one as it grows. A creditor computes
attention over the stripes that it holds (arXiv 2401.02669 section 4). Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.loan_placement import (
    free_stripes_by_shard,
    location_of_prefix,
    num_fitting_stripes,
    spill_locations,
    spill_to,
)
from lamina.protocol.step_plan import SurvivingKv
from lamina.scheduler.feature import Feature
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import KvStart

from .allocator import NO_SHARDS, KvAllocator


class SpillPlacement:
    """Places sequences and borrows stripes. Blocks are counted by layer group."""

    def __init__(self, accounting: BlockTables, homes: int = 0) -> None:
        """``homes``: sequences begin in this many first KV shards; 0: in all."""
        self._homes = homes or accounting.num_kv_shards
        self._accounting, self._placement = accounting, accounting.placement
        self._stripe_blocks = accounting.block_size
        first = self.free_stripes(accounting.num_blocks)  # one KV shard of each worker
        self._owners = {
            lane: next(at for at in first if self._same(at, lane)) for lane in range(accounting.num_kv_shards)
        }

    def choose_location(
        self, begun: KvLocation | None, length: int, kept: int, blocks: Iterable[int]
    ) -> KvLocation | None:
        """Choose the place of a new sequence of ``length`` tokens in ``blocks``; None if it does not fit.

        ``begun``: where its first ``kept`` tokens are; None: it has none.
        """
        room, first = self.free_stripes(blocks), self._stripes(kept)
        home = max((lane for lane in room if lane < self._homes), key=lambda lane: room[lane])
        place = KvLocation(home) if begun is None else location_of_prefix(begun, first)
        return spill_locations(place, first, self._stripes(length), room)

    def candidate_locations(self, length: int, blocks: list[int]) -> list[KvLocation]:
        """Return the possible places of a new sequence of ``length`` tokens.

        They are single KV shards; if none has room, several shards, from the one with the most room.
        """
        whole = [
            KvLocation(lane) for lane, room in self.free_stripes(blocks).items() if self._can_begin(lane, room, length)
        ]
        lent = None if whole else self.choose_location(None, length, 0, blocks)
        return whole or ([lent] if lent else [])

    def _can_begin(self, kv_shard: int, room: int, length: int) -> bool:
        return kv_shard < self._homes and room >= self._stripes(length)

    def location_of_prefix(self, location: KvLocation, length: int) -> KvLocation:
        """Return where the first ``length`` tokens of a sequence at ``location`` are."""
        return location_of_prefix(location, self._stripes(length))

    def spill_next_stripes(self, wanted: Mapping[Sequence, int], free: Callable[[], list[int]]) -> list[Sequence]:
        """Borrow stripes for the next rows of decoding sequences that begin a stripe without room at home.

        ``free``: returns the available blocks; called only if needed. Returns sequences whose place cannot name one
        more piece; they must be recomputed elsewhere.
        """
        blocks: list[int] | None = None
        stuck = list[Sequence]()
        for sequence, count in wanted.items():
            begun = self._stripes(
                sequence.num_computed_tokens if sequence.is_decoding else sequence.num_tokens_with_placeholders
            )
            for number in range(begun, self._stripes(sequence.num_computed_tokens + count)):
                blocks = free() if blocks is None else blocks
                if not self._begin(sequence, number, blocks):
                    stuck.append(sequence)
                    break
        return stuck

    def _begin(self, sequence: Sequence, number: int, blocks: list[int]) -> bool:
        """Find a worker for that stripe. False: its place cannot have one more piece."""
        place, stripe = sequence.location, self._placement.stripe
        need = min(stripe, -(-sequence.max_len // self._stripe_blocks) - number * stripe)
        owner = self._owners[self._placement.kv_shard_of(place, number)]
        if self._least_blocks(owner, blocks) < need or (
            place.moved_runs and not num_fitting_stripes(place, owner, number, 1)
        ):
            room = self.free_stripes(blocks)
            fit = [lane for lane in room if num_fitting_stripes(place, lane, number, 1)]
            if not fit:
                return False
            last = place.moved_runs[-1].kv_shard if place.moved_runs else place.kv_shard
            owner = max(fit, key=lambda lane: (room[lane] > 0, lane == place.kv_shard, lane == last, room[lane]))
            sequence.location = spill_to(location_of_prefix(place, number), number, number + 1, owner)
        for group, lanes in enumerate(self._accounting.kv_shards):
            if owner in lanes and not self._accounting.windows[group]:
                blocks[group] -= need
        return True

    def borrowed_blocks(self, sequences: Iterable[Sequence]) -> list[int]:
        """The borrowed KV blocks by layer group; groups with a window count none."""
        counts = [0] * len(self._accounting.kv_shards)
        for sequence in sequences:
            most = -(-sequence.num_computed_tokens // self._stripe_blocks)
            for run in sequence.location.moved_runs:
                low, high = (min(x * self._placement.stripe, most) for x in (run.start, run.stop))
                for group, lanes in enumerate(self._accounting.kv_shards):
                    counts[group] += (high - low) * (run.kv_shard in lanes and not self._accounting.windows[group])
        return counts

    def free_stripes(self, blocks: Iterable[int]) -> dict[int, int]:
        """KV shard -> stripes, the first KV shard of each memory worker."""
        return free_stripes_by_shard(self._placement, self._accounting.kv_shards, self._accounting.windows, blocks)

    def _least_blocks(self, kv_shard: int, blocks: list[int]) -> int:
        each = zip(blocks, self._accounting.kv_shards, self._accounting.windows, strict=True)
        return min((n for n, lanes, window in each if kv_shard in lanes and not window), default=0)

    def _same(self, one: int, other: int) -> bool:
        return all((one in lanes) == (other in lanes) for lanes in self._accounting.kv_shards)

    def _stripes(self, length: int) -> int:
        return -(-length // (self._placement.stripe * self._stripe_blocks))


class SpillAllocator(KvAllocator, Feature):
    """The allocator of sequences that borrow stripes, while there are several KV shards to divide them among."""

    def __init__(self, accounting: BlockTables, max_rows: int, homes: int = 0, max_kept_tokens: int = 0) -> None:
        super().__init__(accounting, max_rows, homes, max_kept_tokens)
        self._find_lenders()

    def _find_lenders(self) -> None:
        several = self._accounting.placement.single_shard
        self.spill = SpillPlacement(self._accounting, self._homes) if several else None

    def may_start(self, sequence: Sequence) -> bool:
        """True if a sequence may borrow what its home has not."""
        return self.spill is not None

    def possible_places(
        self, begun: KvLocation | None, sequence: Sequence, start: KvStart | None, left: list[int]
    ) -> Iterator[KvLocation]:
        """Yield the place of a prefix without loans after it, and then one with new loans. A load borrows nothing."""
        kept, is_loaded = start.length if start else 0, start is not None and start.source is None
        if begun is not None:
            yield self.spill.location_of_prefix(begun, kept) if self.spill and start and not is_loaded else begun
        if self.spill and not is_loaded:
            lent = self.spill.choose_location(begun, sequence.num_tokens_with_placeholders, kept, left)
            yield from [] if lent is None else [lent]

    def place_rows(
        self, picked: Mapping[Sequence, int], held: Callable[[], tuple[Iterable[Sequence], Iterable[int]]]
    ) -> list[Sequence]:
        """Borrow stripes for the next rows of ``picked`` whose home has no room."""
        return self.spill.spill_next_stripes(picked, lambda: self.available_blocks(*held())) if self.spill else []

    def reassign(
        self, keep: Iterable[SurvivingKv], last: Several[int] = (), stays: Mapping[int, int] = NO_SHARDS
    ) -> list[SurvivingKv]:
        """Return new places for sequences, with loans of the workers that are there now."""
        self._find_lenders()
        return super().reassign(keep, last, stays)

    def places_with_room(self, length: int, left: list[int]) -> list[KvLocation]:
        """Return single KV shards, or if none has room, several."""
        return self.spill.candidate_locations(length, left) if self.spill else super().places_with_room(length, left)
