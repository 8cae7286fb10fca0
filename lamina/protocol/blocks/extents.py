"""The KV blocks that a sequence holds, as counts by layer group, given windows, KV shards, lengths and ops."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lamina.config.partition import KvShards
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation, KvPlacement, ShardCounter
from lamina.protocol.step_plan import (
    BlockOp,
    CommitMigration,
    ContextShift,
    CopyStripes,
    DropBlocks,
    FetchPrefix,
    Fork,
    Free,
    LoadKv,
    New,
    PrefetchHint,
    PrefillGrant,
    RowRange,
    SaveKv,
    SequenceOp,
    SurvivingKv,
    Truncate,
)


class PlanError(ValueError):
    """A plan does not fit the present sequences: an unknown id, a gap, a position that was freed."""


class NoBlocksError(Exception):
    """A plan needs more KV blocks than there are. Nothing of the plan was applied."""


class Extent(NamedTuple):
    """The blocks that a sequence holds: of ``starts[g] .. ceil(length / block_size)`` those that group g keeps."""

    length: int  # tokens up to the end of its last rows
    first: int  # first position of its last rows: a replay of them must still find its window
    starts: tuple[int, ...]
    location: KvLocation = FIRST_LOCATION
    dropped_blocks: tuple[int, ...] = ()  # blocks that sparse groups no longer keep, ascending


class Extents:
    """The arithmetic of extents. Group g keeps what lies in ``kv_shards[g]``, and sees ``windows[g]`` tokens."""

    def __init__(
        self,
        windows: Sequence[int],
        block_size: int,
        kv_shards: Sequence[KvShards],
        placement: KvPlacement,
        sparse: Sequence[bool] = (),
    ) -> None:
        """``sparse[g]``: whether blocks may be dropped; such a group has no window, and all KV shards. Empty: none."""
        self._windows, self._block_size = windows, block_size
        self._sparse = tuple(sparse) or (False,) * len(windows)
        self._kv_shards, self._placement = kv_shards, placement
        self._shard_counters = [ShardCounter(x, placement) for x in kv_shards]
        self._windowed = any(windows)
        self._keeps_all_blocks = all(x.has_all for x in kv_shards)  # at any location
        self.empty = Extent(0, 0, (0,) * len(windows))

    def extent_of_surviving(self, keep: SurvivingKv) -> Extent:
        """Return the extent of a sequence of which ``keep`` survives: it has the blocks that its next row can see."""
        starts = (max(0, keep.length - w + 1) // self._block_size if w else 0 for w in self._windows)
        return Extent(keep.length, keep.length, tuple(starts), keep.location)

    def extent_before(self, row: RowRange) -> Extent:
        """Return the extent of a sequence that does not exist yet, as if all tokens before ``row`` were stored."""
        return self.extent_of_surviving(SurvivingKv(row.sequence, row.first, row.location)) if row.first else self.empty

    def num_held_blocks(self, extent: Extent | None) -> tuple[int, ...]:
        """Return the number of blocks that ``extent`` holds, by group."""
        if extent is None:
            return (0,) * len(self._windows)
        stop = -(-extent.length // self._block_size)
        if self._keeps_all_blocks and not extent.dropped_blocks:
            return tuple([max(0, stop - start) for start in extent.starts])
        place = extent.location
        if self._placement.stripe:
            deals = zip(self._shard_counters, extent.starts, strict=True)
            held = tuple(
                [deal.num_owned(place, stop) - deal.num_owned(place, min(start, stop)) for deal, start in deals]
            )
        else:  # the sequence is whole, in one KV shard
            lanes = zip(self._kv_shards, extent.starts, strict=True)
            held = tuple([stop - start if start < stop and place.kv_shard in own else 0 for own, start in lanes])
        if not extent.dropped_blocks:
            return held
        return tuple(n - len(extent.dropped_blocks) * sparse for n, sparse in zip(held, self._sparse, strict=True))

    def num_blocks_after(self, extent: Extent, length: int) -> list[int]:
        """Return, by group, the number of blocks after the whole ones of the first ``length`` tokens."""
        low, high = length // self._block_size, -(-extent.length // self._block_size)
        return [
            deal.num_owned(extent.location, high) - deal.num_owned(extent.location, low)
            for deal in self._shard_counters
        ]

    def max_blocks(self, location: KvLocation, length: int, max_rows: int) -> list[int]:
        """Return, by group, the most blocks that a sequence of up to ``length`` tokens holds."""
        whole = -(-length // self._block_size)
        return [
            min(deal.num_owned(location, whole), max_blocks_of_sequence(length, window, self._block_size, max_rows))
            for deal, window in zip(self._shard_counters, self._windows, strict=True)
        ]

    def after_shift(self, extent: Extent, op: ContextShift) -> Extent:
        """Return the extent after ``op`` has removed tokens and moved the later ones. Raises PlanError."""
        self.check_whole(extent, op)
        size = self._block_size
        unit = size * max(1, self._placement.stripe * self._placement.num_kv_shards)
        if op.first < 0 or op.count < 1 or op.first % size or op.count % unit or extent.location.moved_runs:
            raise PlanError(f"{op}: blocks have {size} tokens, and stripes of all KV shards {unit}")
        length = extent.length - op.count
        if op.first > length:
            raise PlanError(f"{op}: the sequence has {extent.length} tokens")
        low, gone = op.first // size, op.count // size
        starts = tuple(s if s <= low else max(low, s - gone) for s in extent.starts)
        for window, start in zip(self._windows, starts, strict=True):
            if window and start * size > max(0, length - window + 1):
                raise PlanError(f"{op}: tokens that a window of {window} then sees were given back")
        return Extent(length, length, starts, extent.location)

    def table_index(self, group: int, extent: Extent, number: int) -> int:
        """Return the index in the table of ``group`` of the sequence's block ``number``, counted from token 0."""
        deal, start = self._shard_counters[group], extent.starts[group]
        at = (
            number - start
            if self._keeps_all_blocks
            else deal.num_owned(extent.location, number) - deal.num_owned(extent.location, start)
        )
        return at - bisect_left(extent.dropped_blocks, number) if extent.dropped_blocks and self._sparse[group] else at

    def block_numbers(self, group: int, extent: Extent) -> list[int]:
        """Return the numbers of the sequence's blocks that a group keeps, counted from token 0."""
        numbers, stripe = range(extent.starts[group], -(-extent.length // self._block_size)), self._placement.stripe
        if extent.dropped_blocks and self._sparse[group]:
            gone = set(extent.dropped_blocks)
            return [n for n in numbers if n not in gone]
        if not stripe:
            return list(numbers) if extent.location.kv_shard in self._kv_shards[group] else []
        stripes = range(numbers.start // stripe, -(-numbers.stop // stripe))
        runs = self._placement.owned_runs(self._kv_shards[group], extent.location, stripes)
        return [n for run in runs for n in range(run.start * stripe, run.stop * stripe) if n in numbers]

    def covers(self, extent: Extent, part: Extent) -> bool:
        """Return whether a holder of ``extent`` holds all of ``part``, of the same sequence, at any location."""
        if extent.length < part.length or extent.dropped_blocks != part.dropped_blocks:
            return False
        if extent.location == part.location:
            held = zip(self.num_held_blocks(part), extent.starts, part.starts, strict=True)
            return not any(n and a > b for n, a, b in held)
        groups = range(len(self._windows))
        return all(set(self.block_numbers(g, part)) <= set(self.block_numbers(g, extent)) for g in groups)

    def same_owners(self, one: KvLocation, other: KvLocation, length: int) -> bool:
        """Return whether the first ``length`` tokens of a sequence have the same owners at both locations. A worker
        that keeps all tokens has them at every location, so it always returns True.
        """
        stripe = self._placement.stripe * self._block_size
        return self._keeps_all_blocks or self._placement.same_owners(one, other, -(-length // stripe) if stripe else 0)

    def advance(self, extent: Extent, row: RowRange) -> Extent:
        """Return the extent once ``row`` is planned, without blocks that no row can still see. Raises PlanError."""
        if row.count < 1 or row.first < 0:
            raise PlanError(f"sequence {row.sequence}: {row.count} rows from position {row.first}")
        if row.first > extent.length:
            raise PlanError(f"sequence {row.sequence} has {extent.length} tokens, its rows start at {row.first}")
        starts, place = extent.starts, extent.location
        if extent.dropped_blocks and row.first // self._block_size <= extent.dropped_blocks[-1]:
            raise PlanError(
                f"sequence {row.sequence}: position {row.first} is not after block {extent.dropped_blocks[-1]}, "
                f"which was dropped: free it and build it again"
            )
        if self._windowed:
            starts = self._starts(extent, row)
        if row.location != place:
            self.check_place(row)
            place = row.location
        return Extent(row.first + row.count, row.first, starts, place, extent.dropped_blocks)

    def stays_in_block(self, extent: Extent, row: RowRange) -> bool:
        """Return whether ``row`` stays in the last held block and no window frees any. This quick check suffices for
        most rows; False means that a full check is needed.
        """
        first, count = row.first, row.count
        goes_on = first == extent.length and count > 0 and 0 < first % self._block_size <= self._block_size - count
        if not goes_on or self._windowed:
            return False
        return row.location is extent.location or row.location == extent.location

    def _starts(self, extent: Extent, row: RowRange) -> tuple[int, ...]:
        """Return the first block that is kept from ``row`` on, by group."""
        starts = []
        for window, start in zip(self._windows, extent.starts, strict=True):
            if start * self._block_size > max(0, row.first - window + 1):
                raise PlanError(
                    f"sequence {row.sequence}: position {row.first} sees tokens before {start * self._block_size}, "
                    f"whose blocks were given back (window {window}): free it and build it again"
                )
            unseen = min(extent.first, row.first) - window + 1 if window else 0
            starts.append(max(start, unseen // self._block_size))
        return tuple(starts)

    def after_prune(self, extent: Extent, op: DropBlocks) -> Extent:
        """Return the extent after ``op`` has dropped blocks. Raises PlanError."""
        if not any(self._sparse):
            raise PlanError(f"sequence {op.sequence} is to lose blocks, and no layer is sparse")
        whole, gone = extent.length // self._block_size, set(extent.dropped_blocks)
        ascend = all(a < b for a, b in pairwise([-1, *op.blocks]))
        if not op.blocks or not ascend or op.blocks[-1] >= whole or not gone.isdisjoint(op.blocks):
            raise PlanError(
                f"sequence {op.sequence} of {whole} whole blocks, {len(gone)} of them dropped, cannot lose {op.blocks}"
            )
        return extent._replace(dropped_blocks=tuple(sorted(gone.union(op.blocks))))

    def after_copy(self, extent: Extent, op: CopyStripes) -> Extent:
        """Return the extent of the sequence that ``op`` begins, given its source's ``extent``. Raises PlanError."""
        self.check_whole(extent, op)
        stripe, size, place = self._placement.stripe, self._block_size, KvLocation(op.kv_shard)
        first, stop = op.stripe * stripe, (op.stripe + op.count) * stripe
        if stripe:
            there, length = self._placement.single_shard and 0 <= first < stop <= extent.length // size, stop * size
        else:  # all of it
            there, length = not (self._keeps_all_blocks or op.stripe or op.count) and extent.length > 0, extent.length
        if self._windowed or not there:
            raise PlanError(f"{op}: of {extent.length} tokens in stripes of {stripe * size}")
        self.check_place(RowRange(op.sequence, 0, 1, place))
        return Extent(length, length, (first,) * len(self._windows), place)

    def after_migration(self, extent: Extent, copy: Extent, op: CommitMigration) -> Extent:
        """Return the extent of a sequence that gets the blocks of ``copy``. Raises PlanError if ``op`` does not fit."""
        self.check_place(RowRange(op.sequence, 0, 1, op.location))
        unit, lane = max(1, self._placement.stripe) * self._block_size, self._placement.kv_shard_of
        whole = not self._placement.stripe
        stripes = range(copy.starts[0] * self._block_size // unit, -(-copy.length // unit))
        for number in range(-(-extent.length // unit)):
            wanted = copy.location.kv_shard if number in stripes else lane(extent.location, number)
            if lane(op.location, number) != wanted:
                raise PlanError(f"{op}: stripe {number} would not be in KV shard {wanted}")
        fits = copy.length == extent.length if whole else copy.length <= extent.length and not copy.length % unit
        if copy.location.moved_runs or copy.dropped_blocks or not fits:
            raise PlanError(f"{op}: sequence {op.copy} is no copy of it")
        return extent._replace(location=op.location)

    @staticmethod
    def check_whole(extent: Extent, op: object) -> None:
        """Raise PlanError if blocks of the sequence were dropped, as it can then be no source of ``op``."""
        if extent.dropped_blocks:
            raise PlanError(f"{len(extent.dropped_blocks)} blocks were dropped of a sequence, and then comes {op}")

    def check_place(self, row: RowRange) -> None:
        """Raise PlanError if a sequence cannot have the location of ``row``."""
        if not self._keeps_all_blocks:
            try:
                self._placement.check(row.location)
            except ValueError as e:
                raise PlanError(f"sequence {row.sequence}: {e}") from None


def max_blocks_of_sequence(length: int, window: int, block_size: int, max_rows: int) -> int:
    """Return the most blocks that one sequence of up to ``length`` tokens holds in a group, with ``max_rows`` rows a
    step.

    A windowed group keeps what the queries of the last two steps can see, and those steps' own tokens.
    """
    whole = -(-length // block_size)
    return min(whole, -(-(window + 2 * max_rows) // block_size) + 1) if window else whole


def extent_after(
    op: BlockOp,
    extents: Extents,
    known: Callable[[int], Extent | None],
    forked: Callable[[Fork], Extent],
    shifted: Callable[[ContextShift], Extent],
) -> Extent | None:
    """Return the extent of a sequence after ``op``; None if the sequence ends. Raises PlanError.

    ``known``: returns the extent of a sequence before ``op``. ``forked``, ``shifted``: return the extent with which a
    fork begins, or which a context shift leaves.
    """
    match op:
        case New():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.empty
        case Fork():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            source = check_exists(known(op.source), op.source)
            extents.check_whole(source, op)
            if source.length < op.length:
                raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: it has fewer")
            return forked(op)
        case Free():
            check_exists(known(op.sequence), op.sequence)
            return None
        case Truncate():
            extent = check_exists(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.length <= extent.length:
                raise PlanError(f"cannot truncate sequence {op.sequence} of {extent.length} tokens to {op.length}")
            return extent._replace(length=op.length) if op.length else extents.empty
        case ContextShift():
            return shifted(op)
        case DropBlocks():
            return extents.after_prune(check_exists(known(op.sequence), op.sequence), op)
        case CopyStripes():
            if known(op.sequence) is not None:
                raise PlanError(f"new sequence {op.sequence} exists already")
            return extents.after_copy(check_exists(known(op.source), op.source), op)
        case CommitMigration():
            copy = check_exists(known(op.copy), op.copy)
            return extents.after_migration(check_exists(known(op.sequence), op.sequence), copy, op)
        case LoadKv() if op.is_of_states:
            extent = check_exists(known(op.sequence), op.sequence)
            if op.first > extent.length:
                raise PlanError(f"cannot load states after {op.first} tokens of sequence {op.sequence}: it has fewer")
            return extent
        case PrefillGrant() | FetchPrefix() | LoadKv():
            return extents.advance(check_exists(known(op.sequence), op.sequence), op.rows)
        case SaveKv():
            extent = check_exists(known(op.sequence), op.sequence)
            extents.check_whole(extent, op)
            if not 0 <= op.first <= op.first + op.count <= extent.length:
                raise PlanError(
                    f"cannot save tokens {op.first}..{op.first + op.count} of sequence {op.sequence} of "
                    f"{extent.length} tokens"
                )
            return extent


def check_exists(extent: Extent | None, sequence: int) -> Extent:
    """Return ``extent``. Raises PlanError if it is None."""
    if extent is None:
        raise PlanError(f"sequence {sequence} does not exist")
    return extent


def sequences_of_op(op: SequenceOp) -> tuple[int, ...]:
    """Return the ids of the sequences that an op concerns."""
    if isinstance(op, PrefetchHint):
        return ()
    if isinstance(op, CommitMigration):
        return op.sequence, op.copy
    return (op.sequence, op.source) if isinstance(op, Fork | CopyStripes) else (op.sequence,)
