"""Allocates KV blocks, and chooses the places of new sequences. Pure policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple

from msgspec import structs

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import RowRange, SurvivingKv
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import KvStart

MAX_LISTED_SHARDS = 1 << 20
NO_SHARDS: Mapping[int, int] = {}
AFFINITY_MAX_LOAD, AFFINITY_MAX_SEQUENCES = (
    1.5,
    2,
)  # where kin lies may lie so many times the average of sequences, and so many


class Allocation(NamedTuple):
    """The place of a new sequence. ``blocks``: those that it takes in addition to its hit, by layer group."""

    location: KvLocation
    blocks: list[int]
    start: KvStart | None


class KvAllocator:
    """Allocates blocks of the block tables, by layer group. Promised blocks count as taken."""

    def __init__(self, accounting: BlockTables, max_rows: int, homes: int = 0, max_kept_tokens: int = 0) -> None:
        """``max_rows``: the most rows of a step. ``homes``: sequences begin in this many first KV shards; 0: in all.

        ``max_kept_tokens``: the tokens that a sequence keeps in sparse layers; 0: no blocks are dropped.
        """
        self._accounting, self._homes, self._max_kept_tokens = accounting, homes, max_kept_tokens
        self._max_rows = max_rows
        self.cordoned: set[int] = set()  # groups in which no sequence begins
        self._num_groups = len(accounting.kv_shards)

    @property
    def _all_locations(self) -> list[KvLocation]:
        """The places where sequences may begin."""
        return [
            KvLocation(lane) for lane in range(min(self._homes or MAX_LISTED_SHARDS, self._accounting.num_kv_shards))
        ]

    def max_blocks(self, location: KvLocation, length: int) -> list[int]:
        """Return the most blocks that a sequence at ``location``, of ``length`` tokens, takes."""
        return self._accounting.max_blocks(location, length, self._max_rows)

    def max_sequences(self, length: int) -> float:
        """The number of sequences of ``length`` tokens that all blocks hold, if each place has equally many.

        The newest one counts with the blocks that it has not dropped yet.
        """
        each = [self.max_blocks(place, length) for place in self._all_locations]
        whole: list[int] = [sum(n) for n in zip(*each, strict=True)]
        room = list(self._accounting.num_blocks)
        if self._max_kept_tokens:
            kept = -(-self._max_kept_tokens // self._accounting.block_size) * len(each)
            needed = [min(n, kept) if sparse else n for n, sparse in zip(whole, self._accounting.sparse, strict=True)]
            room, whole = [n - a + b for n, a, b in zip(room, whole, needed, strict=True)], needed
        return min(n * len(each) / needed for n, needed in zip(room, whole, strict=True) if needed)

    def find_room(
        self,
        sequence: Sequence,
        start: KvStart | None,
        left: list[int],
        running_load: Iterable[Sequence],
        running: Several[Sequence],
        affinity_location: KvLocation | None = None,
    ) -> Allocation | None:
        """Find room in ``left`` blocks for a new sequence that begins with ``start``; None if there is none.

        A preempted sequence may return to its KV in a cordoned place.
        """
        if self.cordoned and not (start is not None and start.is_swapped):
            left = [0 if group in self.cordoned else n for group, n in enumerate(left)]
        begun: KvLocation | None
        if start is not None and start.source is not None:
            (begun,) = start.locations
        else:
            among = start.locations if start else self._all_locations
            begun = self.choose_location(sequence, left, running_load, running, among, affinity_location)
        for place in self.possible_places(begun, sequence, start, left):
            blocks = self.max_blocks(place, sequence.num_tokens_with_placeholders)
            if start is not None and start.blocks:
                blocks = [max(0, n) for n in subtract(blocks, list(start.blocks))]
            if min(subtract(left, blocks)) >= 0:
                return Allocation(place, blocks, start)
        return None

    def possible_places(
        self, begun: KvLocation | None, sequence: Sequence, start: KvStart | None, left: list[int]
    ) -> Iterator[KvLocation]:
        """Yield the places of a new sequence to try, where it begins at ``begun``; None: no place has room for it."""
        if begun is not None:
            yield begun

    def can_never_fit(self, sequence: Sequence) -> bool:
        """Return True if a new sequence without stored tokens has no room, even if running ones take no more blocks.

        Must be fast; False may be wrong.
        """
        if any(self._accounting.windows):
            return False
        free, length = self._accounting.free_blocks, sequence.num_tokens_with_placeholders
        return all(min(subtract(list(free), self.max_blocks(place, length))) < 0 for place in self._all_locations)

    def held_blocks(self, sequences: Iterable[Sequence]) -> list[int]:
        """Blocks of all ``sequences``, by group."""
        each = [self.max_blocks(s.location, s.num_tokens_with_placeholders) for s in sequences]
        return [sum(n) for n in zip(*each, strict=True)] if each else [0] * len(self._accounting.kv_shards)

    def free_after(self, running: Iterable[Sequence], wanted: Mapping[Sequence, int]) -> list[int]:
        """Free blocks, less those for the rows ``wanted`` in this round, and for the rest of running prefills."""
        left = subtract(list(self._accounting.free_blocks), list(self._accounting.blocks_needed(next_rows(wanted))))
        for sequence in running:
            there = max(sequence.num_computed_tokens, sequence.transfer.loading_tokens)
            missing = sequence.num_tokens_with_placeholders - there - wanted.get(sequence, 0)
            if missing > 0 and (sequence.is_schedulable or sequence.transfer.lacks_kv):
                whole, part = (
                    self.max_blocks(sequence.location, sequence.num_tokens_with_placeholders - n) for n in (0, missing)
                )
                left = [n - a + b for n, a, b in zip(left, whole, part, strict=True)]
        return left

    def available_blocks(self, running: Iterable[Sequence], retained: Iterable[int]) -> list[int]:
        """Blocks that are free or held only by ``retained`` sequences, less those for the rest of running prefills."""
        own = (self._accounting.exclusive_blocks(number) for number in retained)
        left = self.free_after([s for s in running if not s.is_decoding], {})
        return [sum(n) for n in zip(left, *own, strict=True)]

    def place_rows(
        self, picked: Mapping[Sequence, int], held: Callable[[], tuple[Iterable[Sequence], Iterable[int]]]
    ) -> list[Sequence]:
        """Choose the places of the next rows of ``picked``. Returns sequences whose rows can have none: they must be
        preempted, and recomputed elsewhere. ``held``: returns running and retained sequences.
        """
        return []  # they follow the rows before them

    def num_without_room(self, other: BlockTables, running: Iterable[Sequence]) -> int:
        """Count the ``running`` sequences that would have no room in the blocks of ``other``."""
        keep = [SurvivingKv(s.id, s.num_tokens_with_placeholders, s.location) for s in running]
        return len(keep) - len(type(self)(other, self._max_rows, self._homes).reassign(keep))

    def reassign(
        self, keep: Iterable[SurvivingKv], last: Several[int] = (), stays: Mapping[int, int] = NO_SHARDS
    ) -> list[SurvivingKv]:
        """Return new places for sequences, as if all blocks were free.

        The longest sequences come first, so that each layer group holds its portion. Sequences without room are left
        out. ``last``: sequences that come after all others, in this order, each in one KV shard. ``stays``: maps KV
        shards whose sequences come first to their new KV shards. A cordoned group stays cordoned if its worker stays.
        """
        if len(self._accounting.kv_shards) != self._num_groups:
            closed = {stays[group] for group in self.cordoned if group in stays}
            self.cordoned.clear()
            self.cordoned.update(closed)
            self._num_groups = len(self._accounting.kv_shards)
        total = self._accounting.num_blocks
        left, kept = list(total), list[SurvivingKv]()

        def unevenness(rest: list[int]) -> float:
            return sum(
                (n - r) ** 2 / g.portion for n, r, g in zip(total, rest, self._accounting.kv_shards, strict=True)
            )

        order = {number: place for place, number in enumerate(last)}
        for each in sorted(
            keep, key=lambda k: (order.get(k.sequence, -1), k.location.kv_shard not in stays, -k.length)
        ):
            alone = each.sequence in order
            places = self._all_locations if alone else self.places_with_room(each.length + 1, left)
            rests = {x: subtract(left, self.max_blocks(x, each.length + 1)) for x in places}
            fitting = [x for x, rest in rests.items() if min(rest) >= 0]
            if fitting:
                stayed = KvLocation(stays.get(each.location.kv_shard, -1))
                place = stayed if stayed in fitting else min(fitting, key=lambda x: unevenness(rests[x]))
                left = rests[place]
                kept.append(structs.replace(each, location=place, previous_location=each.location))
        return kept

    def places_with_room(self, length: int, left: list[int]) -> list[KvLocation]:
        """Return the places where a sequence of ``length`` tokens may have room in the ``left`` blocks."""
        return self._all_locations

    def choose_location(
        self,
        sequence: Sequence,
        left: list[int],
        beside: Iterable[Sequence],
        running: Several[Sequence],
        among: Iterable[KvLocation],
        affinity: KvLocation | None = None,
    ) -> KvLocation | None:
        """Choose the place of a new sequence, ``among`` those with enough of the ``left`` blocks; None if none has.

        It is the place that brings each layer group's share of the KV closest to its portion. Shares of the sequences
        ``beside`` it in its batch decide first, then shares of all ``running`` ones. The place of its ``affinity`` wins
        over that, unless
        many more sequences are there than elsewhere.
        """
        places = {x: self.max_blocks(x, sequence.num_tokens_with_placeholders) for x in among}
        places = {x: blocks for x, blocks in places.items() if min(subtract(left, blocks)) >= 0}
        if len(places) < 2:
            return next(iter(places), None)
        if affinity in places:
            there = sum(s.location == affinity for s in running)
            if there < AFFINITY_MAX_LOAD * len(running) / len(self._all_locations) + AFFINITY_MAX_SEQUENCES:
                return affinity
        held, of_all = self.held_blocks(beside), self.held_blocks(running)

        def unevenness(blocks: list[int], more: list[int]) -> float:
            parts = zip(blocks, more, self._accounting.kv_shards, strict=True)
            return sum(float((n + m) ** 2) / g.portion for n, m, g in parts)

        return min(places, key=lambda x: (unevenness(held, places[x]), unevenness(of_all, places[x])))


def next_rows(picked: Mapping[Sequence, int]) -> list[RowRange]:
    """The row range of each sequence for its number of picked rows."""
    return [RowRange(s.id, s.num_computed_tokens, count, s.location) for s, count in picked.items()]


def subtract(blocks: list[int], taken: list[int]) -> list[int]:
    """Subtract by group."""
    return [b - t for b, t in zip(blocks, taken, strict=True)]
