"""Places of a sequence that one memory worker cannot hold: whole at home, but for what does not fit there. Pure policy:
no torch, no I/O, no clock.

Stripes are lent as a sequence is admitted, so no prompt migrates, and one by one as it grows. (Borrowing among
instances, arXiv 2401.02669 section 4: the creditor computes attention over what it holds, and no K or V comes back.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.loan_placement import (
    free_stripes_by_shard,
    location_of_prefix,
    num_fitting_stripes,
    spill_locations,
    spill_to,
)
from lamina.scheduler.sequence import Sequence


class SpillPlacement:
    """The loans of a ledger whose sequences stay, but for stripes on loan. Blocks are by layer group."""

    def __init__(self, accounting: BlockTables, homes: int = 0) -> None:
        """``homes``: KV shards in which sequences begin, the first ones; 0 = all."""
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
        """Choose a place of a new sequence of ``length`` tokens in ``blocks``; None if it does not fit. ``begun``:
        where its first ``kept`` tokens are; None: nowhere.
        """
        room, first = self.free_stripes(blocks), self._stripes(kept)
        home = max((lane for lane in room if lane < self._homes), key=lambda lane: room[lane])
        place = KvLocation(home) if begun is None else location_of_prefix(begun, first)
        return spill_locations(place, first, self._stripes(length), room)

    def candidate_locations(self, length: int, blocks: list[int]) -> list[KvLocation]:
        """Return the places of a sequence of ``length`` tokens that may begin anywhere: whole in a KV shard; else
        spread over several, from the one with the most room on.
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
        """Borrow for the next rows of sequences that decode, so many each, where they begin a stripe for which home has
        no room. ``free``: blocks that they can have; most steps do not ask. Returns the sequences that lie in as many
        pieces as a place can name: they have to begin anew elsewhere.
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
        """KV blocks by layer group that lie with a creditor; of groups with a window none are counted."""
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
