"""Which KV blocks a sequence holds: ids and counts only, no tensors, no I/O.

A memory worker keeps its store's block tables here; the engine keeps the same class as a ledger, so that it knows
before it sends a plan whether every worker will take it. What has one window length and the same lanes forms a *group*
and shares tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .block_counts import blocks_of_one, num_lanes
from .partition import Lanes
from .placement import FIRST, Deal, Place, Placement
from .plan import (
    Free,
    Grant,
    Keep,
    New,
    Rows,
    SequenceOp,
    StepPlan,
    Truncate,
)

NOT_HERE = -1  # a block that is to be taken


class PlanError(ValueError):
    """A plan that does not fit the sequences as they are: an unknown id, a gap, a position that was given back."""


class NoBlocksError(Exception):
    """Too few KV blocks for a plan. Nothing of the plan was applied."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """What a sequence holds: of its blocks ``starts[g] .. ceil(length / block_size)`` those that group g keeps."""

    length: int  # tokens up to the end of its last rows
    first: int  # first position of its last rows: a replay of them must still find its window
    starts: tuple[int, ...]
    place: Place = FIRST


class BlockTables:
    """The block tables of all sequences in all layer groups.

    Group g keeps what lies in ``lanes[g]``, by the places of sequences (protocol.placement). They come with their rows
    and grants; ``stripe`` is in blocks.
    """

    def __init__(
        self,
        windows: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        lanes: Sequence[Lanes] | None = None,
        stripe: int = 0,
    ) -> None:
        """``windows[g]`` in tokens (0 = all), ``num_blocks[g]`` KV blocks for group g; ``lanes`` None = all of them in
        every group.
        """
        lanes = [Lanes()] * len(windows) if lanes is None else lanes
        same = len(windows) == len(num_blocks) == len(lanes) > 0
        if not same or min(num_blocks) < 1 or min(windows) < 0 or block_size < 1:
            raise ValueError(f"block tables of windows {windows}, {num_blocks} blocks of {block_size} tokens")
        self.windows = tuple(windows)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.lanes = tuple(lanes)
        self.stripe = stripe
        self.placement = Placement(num_lanes(lanes), stripe)
        self._deals = [Deal(x, self.placement) for x in lanes]
        self._windowed = any(windows)
        self._keeps_all = all(x.all for x in lanes)  # wherever it lies
        self._sequences: dict[int, _Extent] = {}
        self._last: dict[int, StepPlan] = {}  # batch -> its last plan
        self._tables: list[dict[int, array[int]]] = [{} for _ in windows]
        self._free = [array("q", range(n - 1, -1, -1)) for n in num_blocks]  # the last one is handed out next

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Blocks that nobody holds, by group."""
        return tuple(len(free) for free in self._free)

    @property
    def num_lanes(self) -> int:
        """Of the partition, as far as it shows here."""
        return self.placement.num_lanes

    @property
    def sequences(self) -> list[int]:
        """The sequences that exist, oldest first."""
        return list(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of ``sequence`` up to the end of its last rows. Raises PlanError if it does not exist."""
        return self._extent(self._sequences, sequence).length

    def table(self, group: int, sequence: int) -> tuple[int, array[int]]:
        """(start, ids): the blocks of the sequence from the ``start``-th on that are kept, in order. Read only."""
        return self._extent(self._sequences, sequence).starts[group], self._tables[group][sequence]

    def block_ids(self, group: int, sequence: int, low: int, high: int) -> array[int]:
        """The ids of blocks ``low .. high`` of the sequence, counted from its token 0, which are all kept."""
        start, ids = self.table(group, sequence)
        deal, place = self._deals[group], self._sequences[sequence].place
        at = deal.kept(place, low) - deal.kept(place, start)
        return ids[at : at + high - low]

    def most_blocks(self, place: Place, length: int, max_rows: int) -> list[int]:
        """The most blocks by group that one sequence at ``place``, of up to ``length`` tokens, holds."""
        whole = -(-length // self.block_size)
        return [
            min(self._deals[g].kept(place, whole), blocks_of_one(length, w, self.block_size, max_rows))
            for g, w in enumerate(self.windows)
        ]

    def blocks_needed(self, rows: Iterable[Rows]) -> tuple[int, ...]:
        """Blocks by group that ``rows`` take more than they give back. A sequence that is not there starts empty.

        Raises PlanError.
        """
        change = [0] * len(self.windows)
        for row in rows:
            old = self._sequences.get(row.sequence, self._empty())
            before, after = (self._held(e) for e in (old, self._advance(old, row)))
            for g in range(len(change)):
                change[g] += after[g] - before[g]
        return tuple(change)

    def can_apply(self, plan: StepPlan) -> bool:
        """Whether there are blocks enough for ``plan``. Raises PlanError where blocks would not help."""
        try:
            self._after(plan)
        except NoBlocksError:
            return False
        return True

    def apply(self, plan: StepPlan) -> None:
        """Do the plan's ops in order, then hold blocks for all its rows: everything, or nothing and an exception.

        The last plan of a batch may come again (a replay): it changes nothing more. The rows of the one before it may
        too, under a number of their own. Raises NoBlocksError, PlanError.
        """
        changes = self._after(plan)
        self._last[plan.batch] = plan
        self._change(changes)

    def _change(self, changes: dict[int, _Extent | None]) -> None:
        other = [x for x in changes.items() if not self._holds_the_same(*x)]
        for sequence, extent in other:
            self._give_back(sequence, extent)
        for sequence, extent in other:
            if extent is not None:
                self._take(sequence, extent)
        for sequence, extent in changes.items():
            if extent is None:
                del self._sequences[sequence]
            else:
                self._sequences[sequence] = extent

    def forget_plans(self) -> None:
        """No plan from here on is a replay of one before."""
        self._last.clear()

    def held_of(self, keep: Keep) -> tuple[int, ...] | None:
        """Blocks by group of what ``keep`` leaves of its sequence; None where some of them were given back."""
        old, extent = self._sequences.get(keep.sequence), self._left(keep)
        held = self._held(extent)
        if not any(held):
            return held
        if old is None or old.place != extent.place or old.length < extent.length:
            return None
        gone = any(n and a > b for n, a, b in zip(held, old.starts, extent.starts, strict=True))
        return None if gone else held

    def reconcile(self, keep: Sequence[Keep]) -> None:
        """Hold what ``keep`` says, and nothing else, whatever plans were applied last: everything, or nothing and an
        exception. A sequence that is not there comes to be where none of its blocks are kept here. Raises PlanError.
        """
        changes: dict[int, _Extent | None] = dict.fromkeys(self._sequences)
        for each in keep:
            self._check_place(Rows(each.sequence, 0, 1, each.place))
            if each.length < 1 or changes.get(each.sequence) is not None:
                raise PlanError(f"sequence {each.sequence} is to be kept twice, or {each.length} tokens of it")
            if self.held_of(each) is None:
                raise PlanError(f"sequence {each.sequence}: the KV of its first {each.length} tokens is not here")
            changes[each.sequence] = self._left(each)
        self._change(changes)

    def check_integrity(self) -> None:
        """Every block is free or in one table, and every table is as long as its sequence, else RuntimeError."""
        for g, tables in enumerate(self._tables):
            owned = [b for table in tables.values() for b in table] + list(self._free[g])
            if sorted(owned) != list(range(self.num_blocks[g])):
                raise RuntimeError(f"layer group {g}: a KV block was lost or is owned twice")
            for sequence, extent in self._sequences.items():
                if len(tables[sequence]) != self._held(extent)[g]:
                    raise RuntimeError(f"layer group {g}: sequence {sequence} holds {len(tables[sequence])} blocks")
            if tables.keys() != self._sequences.keys():
                raise RuntimeError(f"layer group {g}: a table without a sequence")

    def _after(self, plan: StepPlan) -> dict[int, _Extent | None]:
        """The extents that ``plan`` changes (None = gone from now on), or an exception; touches nothing."""
        changes: dict[int, _Extent | None] = {}
        last = self._last.get(plan.batch)
        if last and (last.step, last.ops, last.rows) == (plan.step, plan.ops, plan.rows):
            return changes
        for op in plan.ops:
            changes[op.sequence] = self._operate(changes, op)
        seen: set[int] = set()
        for row in plan.rows:
            if row.sequence in seen:
                raise PlanError(f"sequence {row.sequence} is twice in step {plan.step}")
            seen.add(row.sequence)
            changes[row.sequence] = self._advance(self._extent(changes, row.sequence), row)
        changes = {s: e for s, e in changes.items() if e is not None or s in self._sequences}
        left = list(self.free_blocks)
        for sequence, extent in changes.items():
            if self._holds_the_same(sequence, extent):
                continue
            before, after = (self._held(e) for e in (self._sequences.get(sequence), extent))
            for g in range(len(left)):
                left[g] += before[g] - after[g]
        for g, blocks in enumerate(left):
            if blocks < 0:
                raise NoBlocksError(
                    f"step {plan.step} needs {-blocks} KV blocks of {self.block_size} tokens more than the "
                    f"{self.num_blocks[g]} of layer group {g} (window {self.windows[g]})"
                )
        return changes

    def _operate(self, changes: dict[int, _Extent | None], op: SequenceOp) -> _Extent | None:
        match op:
            case New():
                if changes.get(op.sequence, self._sequences.get(op.sequence)) is not None:
                    raise PlanError(f"new sequence {op.sequence} exists already")
                return self._empty()
            case Free():
                self._extent(changes, op.sequence)
                return None
            case Truncate():
                extent = self._extent(changes, op.sequence)
                if not 0 <= op.length <= extent.length:
                    raise PlanError(f"cannot truncate sequence {op.sequence} of {extent.length} tokens to {op.length}")
                return replace(extent, length=op.length) if op.length else self._empty()
            case Grant():
                return self._advance(self._extent(changes, op.sequence), op.rows)

    def _advance(self, extent: _Extent, row: Rows) -> _Extent:
        """The extent once ``row`` is planned: blocks that neither it nor the rows before it can see are given back."""
        if row.count < 1 or row.first < 0:
            raise PlanError(f"sequence {row.sequence}: {row.count} rows from position {row.first}")
        if row.first > extent.length:
            raise PlanError(f"sequence {row.sequence} has {extent.length} tokens, its rows start at {row.first}")
        starts, place = extent.starts, extent.place
        if self._windowed:
            starts = self._starts(extent, row)
        if row.place != place:
            self._check_place(row)
            place = row.place
        return _Extent(row.first + row.count, row.first, starts, place)

    def _starts(self, extent: _Extent, row: Rows) -> tuple[int, ...]:
        """The first block that is kept from ``row`` on, by group."""
        starts = []
        for window, start in zip(self.windows, extent.starts, strict=True):
            if start * self.block_size > max(0, row.first - window + 1):
                raise PlanError(
                    f"sequence {row.sequence}: position {row.first} sees tokens before {start * self.block_size}, "
                    f"whose blocks were given back (window {window}): free it and build it again"
                )
            unseen = min(extent.first, row.first) - window + 1 if window else 0
            starts.append(max(start, unseen // self.block_size))
        return tuple(starts)

    def _check_place(self, row: Rows) -> None:
        if not self._keeps_all:
            try:
                self.placement.check(row.place)
            except ValueError as e:
                raise PlanError(f"sequence {row.sequence}: {e}") from None

    def _extent(self, changes: dict[int, _Extent | None] | dict[int, _Extent], sequence: int) -> _Extent:
        extent = changes[sequence] if sequence in changes else self._sequences.get(sequence)
        if extent is None:
            raise PlanError(f"sequence {sequence} does not exist")
        return extent

    def _holds_the_same(self, sequence: int, extent: _Extent | None) -> bool:
        """Whether no block changes hands: so it is for most tokens of a sequence that decodes."""
        old, size = self._sequences.get(sequence), self.block_size
        if old is None or extent is None:
            return False
        same = old.starts == extent.starts and -(-old.length // size) == -(-extent.length // size)
        return same and (old.place is extent.place or old.place == extent.place)

    def _left(self, keep: Keep) -> _Extent:
        """As everybody has it who keeps so much: with the blocks that its next row can see."""
        starts = (max(0, keep.length - w + 1) // self.block_size if w else 0 for w in self.windows)
        return _Extent(keep.length, keep.length, tuple(starts), keep.place)

    def _empty(self) -> _Extent:
        return _Extent(0, 0, (0,) * len(self.windows))

    def _held(self, extent: _Extent | None) -> tuple[int, ...]:
        if extent is None:
            return (0,) * len(self.windows)
        stop = -(-extent.length // self.block_size)
        return tuple(
            deal.kept(extent.place, stop) - deal.kept(extent.place, min(start, stop))
            for deal, start in zip(self._deals, extent.starts, strict=True)
        )

    def _give_back(self, sequence: int, extent: _Extent | None) -> None:
        """Free what ``sequence`` holds outside ``extent``."""
        old = self._sequences.get(sequence)
        if old is None:
            return
        for g, tables in enumerate(self._tables):
            ids = tables[sequence]
            if extent is None or extent.starts[g] < old.starts[g]:  # gone, or a new one of the same id
                drop, keep = len(ids), 0
            elif extent.place != old.place:
                self._leave(g, ids, old, extent)
                continue
            else:
                deal = self._deals[g]
                left = deal.kept(old.place, extent.starts[g]) - deal.kept(old.place, old.starts[g])
                drop, keep = min(len(ids), left), self._held(extent)[g]
            self._free[g].extend(reversed(ids[:drop]))
            del ids[:drop]
            self._free[g].extend(reversed(ids[keep:]))
            del ids[keep:]
            if extent is None:
                del tables[sequence]

    def _leave(self, group: int, ids: array[int], old: _Extent, extent: _Extent) -> None:
        """Free those of a sequence's blocks that its new place has elsewhere; NOT_HERE for those that are to come."""
        here = dict(zip(self._numbers(group, old), ids, strict=True))
        numbers = self._numbers(group, extent)
        gone = here.keys() - set(numbers)
        self._free[group].extend(here[n] for n in sorted(gone, reverse=True))
        ids[:] = array("q", (here.get(n, NOT_HERE) for n in numbers))

    def _numbers(self, group: int, extent: _Extent) -> list[int]:
        """The blocks of a sequence that a group keeps, counted from its token 0."""
        numbers = range(extent.starts[group], -(-extent.length // self.block_size))
        if not self.stripe:
            return list(numbers) if extent.place.lane in self.lanes[group] else []
        lanes, lane_of = self.lanes[group], self.placement.lane
        return [n for n in numbers if lane_of(extent.place, n // self.stripe) in lanes]

    def _take(self, sequence: int, extent: _Extent) -> None:
        """Fill the tables of ``sequence`` up to ``extent``; the blocks are there."""
        old = self._sequences.get(sequence)
        for g, tables in enumerate(self._tables):
            ids, free = tables.setdefault(sequence, array("q")), self._free[g]
            if old is not None and old.place != extent.place:
                ids[:] = array("q", (free.pop() if x == NOT_HERE else x for x in ids))
            for _ in range(self._held(extent)[g] - len(ids)):
                ids.append(free.pop())
