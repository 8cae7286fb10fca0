"""The KV blocks of sequences as plans change them: ids and counts only, no tensors, no I/O.

A memory worker keeps its store's block tables here. The engine keeps the same class as a ledger, so that it knows
before it sends a plan whether every worker will accept it. There are tables for each *group*: one window length and set
of KV shards.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from lamina.protocol.step_plan import (
    CommitMigration,
    ContextShift,
    DropBlocks,
    FetchPrefix,
    Fork,
    Free,
    LoadKv,
    PrefillGrant,
    RowRange,
    ScoreBlocks,
    SelectBlocks,
    StateRows,
    StepPlan,
    StorageOp,
    SurvivingKv,
)

from .extents import Extent, extent_after, sequences_of_op
from .extents import NoBlocksError as NoBlocksError
from .extents import PlanError as PlanError
from .held_blocks import BlockCopy, PlannedExtents, SequenceBlocks

UNALLOCATED = -1  # a block that is yet to be allocated


class BlockTables(SequenceBlocks):
    """The block tables of all sequences in all layer groups, and the changes that plans make."""

    def blocks_needed(self, rows: Iterable[RowRange]) -> tuple[int, ...]:
        """Return, by group, the blocks that ``rows`` take minus those that they free. For a new sequence, the tokens
        before its rows count as stored.

        Raises PlanError.
        """
        change = [0] * len(self.windows)
        for row in rows:
            old = self.sequence_extents.get(row.sequence) or self._extents.extent_before(row)
            if self._extents.stays_in_block(old, row):
                continue
            after = self._extents.advance(old, row)
            if not self._holds_the_same(row.sequence, after):
                self._add(change, self._num_new_blocks(row.sequence, old, after))
        return tuple(change)

    def can_apply(self, plan: StepPlan) -> bool:
        """Return whether there are enough blocks for ``plan``. Raises PlanError if more blocks would not help."""
        try:
            self._checked = plan, list(plan.ops), self._after(plan)
        except NoBlocksError:
            return False
        return True

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's ops in order, then hold blocks for all its rows: everything, or nothing and an exception.

        The last plan of a batch may come again (a replay): it changes nothing more. The rows of the plan before it may
        also come again, under a new step number. ``pending_copies`` then has the partial blocks that the plan's forks
        copy. All must be read before one is written. Raises NoBlocksError, PlanError.
        """
        changes, steady, forks = self._checked_after(plan)
        ops = [] if self.is_replay(plan) else plan.ops
        shifts = [op for op in ops if isinstance(op, ContextShift)]
        adopts = [op for op in ops if isinstance(op, CommitMigration) and changes.get(op.sequence) is not None]
        self._last[plan.batch] = plan
        begun = [self._fork_copies(fork) for fork in forks]
        for fork in forks:
            self._share(fork)
        for op in shifts:
            self._shift(op)
        for adopt in adopts:
            self._commit_migration(adopt)
        self._change(changes)
        self._num_taken.clear()
        self.sequence_extents |= steady
        self.pending_copies = [self._copies(group, forks, begun) for group in range(len(self.windows))]

    def _checked_after(self, plan: StepPlan) -> PlannedExtents:
        """Return the result of ``can_apply`` for this very plan, if nothing has changed since; else compute it."""
        known, ops, after = self._checked or (None, None, None)
        return after if after and known is plan and ops == plan.ops else self._after(plan)

    def is_replay(self, plan: StepPlan) -> bool:
        """Return whether ``plan`` is the last one of its batch."""
        last = self._last.get(plan.batch)
        return last is not None and (last.step, last.ops, last.rows) == (plan.step, plan.ops, plan.rows)

    def _change(self, changes: dict[int, Extent | None]) -> None:
        self._checked = None
        other = [x for x in changes.items() if not self._holds_the_same(*x)]
        for sequence, extent in other:
            self._free(sequence, extent)
        for sequence, extent in other:
            if extent is not None:
                self._take(sequence, extent)
        for sequence, extent in changes.items():
            if extent is None:
                del self.sequence_extents[sequence]
            else:
                self.sequence_extents[sequence] = extent

    def forget_plans(self) -> None:
        """Treat no later plan as a replay of an earlier one."""
        self._last.clear()
        self._checked = None

    def replace_with(self, other: BlockTables) -> None:
        """Take over the groups and contents of ``other``, which is not used any more."""
        vars(self).update(vars(other))

    def surviving_blocks(self, keep: SurvivingKv) -> tuple[int, ...] | None:
        """Return, by group, the number of blocks of ``keep``; None if some of them were freed."""
        old, extent = self.sequence_extents.get(keep.sequence), self._extents.extent_of_surviving(keep)
        held = self._extents.num_held_blocks(extent)
        if not any(held):
            return held
        return held if old is not None and self._extents.covers(old, extent) else None

    def reconcile(self, keep: Sequence[SurvivingKv], *, moved: bool = False) -> None:
        """Hold only the KV of ``keep``, whichever plans were applied last: everything, or nothing and an exception.

        A new sequence may appear if none of its blocks are kept here, or its KV is ``moved`` to here. Raises PlanError,
        and NoBlocksError for KV that is moved.
        """
        changes: dict[int, Extent | None] = dict.fromkeys(self.sequence_extents)
        coming = [self._extents.num_held_blocks(self._extents.extent_of_surviving(x)) for x in keep] if moved else []
        if any(sum(n) > free for *n, free in zip(*coming, self.free_blocks, strict=True)):
            raise NoBlocksError(f"{len(keep)} sequences come: {list(self.free_blocks)} KV blocks are too few for them")
        for each in keep:
            self._extents.check_place(RowRange(each.sequence, 0, 1, each.location))
            if each.length < 1 or changes.get(each.sequence) is not None:
                raise PlanError(f"sequence {each.sequence} is to be kept twice, or {each.length} tokens of it")
            if not moved and self.surviving_blocks(each) is None:
                raise PlanError(f"sequence {each.sequence}: the KV of its first {each.length} tokens is not here")
            changes[each.sequence] = self._extents.extent_of_surviving(each)
        self._change(changes)

    def forkable_blocks(self, keep: SurvivingKv) -> tuple[int, ...] | None:
        """Return, by group, the blocks that a fork of ``keep`` shares with its source; None as ``surviving_blocks``."""
        held, copied = (
            self.surviving_blocks(keep),
            self._extents.num_blocks_after(self._extents.extent_of_surviving(keep), keep.length),
        )
        return None if held is None else tuple(n - own for n, own in zip(held, copied, strict=True))

    def _after(self, plan: StepPlan) -> PlannedExtents:
        """Return the extents that ``plan`` changes (None: freed), and its forks. Raises an exception if it does not
        fit.

        This changes nothing. Blocks with several holders that ``plan`` frees do not count as free, nor those freed by a
        shift.
        """
        changes: dict[int, Extent | None] = {}
        steady: dict[int, Extent] = {}
        if self.is_replay(plan):
            return changes, steady, []
        shifted = {op.sequence for op in plan.ops if isinstance(op, ContextShift)}
        shared, forked = self._after_ops(plan, changes, shifted)
        seen = set(shifted)
        shares = bool(shared) or any(pool.has_shared for pool in self._pools)
        extents, stays_in_block = self.sequence_extents, self._extents.stays_in_block
        for row in plan.rows:
            sequence, first = row.sequence, row.first
            if sequence in seen:
                raise PlanError(f"sequence {sequence} is twice in step {plan.step}, or shifted")
            seen.add(sequence)
            old = None if shares or sequence in changes else extents.get(sequence)
            # True of most rows: no block is taken or freed.
            if old is not None and stays_in_block(old, row):
                steady[sequence] = Extent(first + row.count, first, old.starts, old.location, old.dropped_blocks)
                continue
            before = changes.get(row.sequence) or self._extent(changes, row.sequence)
            length = forked.get(row.sequence, 0)
            if length and not self._extents.same_owners(before.location, row.location, length):
                raise PlanError(f"sequence {row.sequence} is forked in step {plan.step}: it lies where its source does")
            changes[row.sequence] = self._extents.advance(before, row)
            if shares:
                self._check_alone(row, shared)
        if not changes:  # true of most plans: no block is taken or freed
            return changes, steady, []
        changes = {s: e for s, e in changes.items() if e is not None or s in self.sequence_extents}
        forks = [op for op in plan.ops if isinstance(op, Fork) and op.sequence in changes]
        self._check_room(plan.step, {s: e for s, e in changes.items() if e is None or s not in shifted}, forks)
        return changes, steady, forks

    def _after_ops(
        self, plan: StepPlan, changes: dict[int, Extent | None], shifted: set[int]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Put the extents that the ops of ``plan`` change into ``changes``. Raises PlanError.

        Returns two tables by sequence: the number of tokens that another sequence will also hold, and the length of a
        fork.
        """
        shared, forked = dict[int, int](), dict[int, int]()
        for op in plan.ops:
            if isinstance(op, StorageOp | SelectBlocks | StateRows):
                continue
            if isinstance(op, ScoreBlocks):
                self._check_score(plan, op)
                continue
            if not isinstance(op, ContextShift | Free) and not shifted.isdisjoint(sequences_of_op(op)):
                raise PlanError(f"a sequence is shifted in step {plan.step}: it may be freed, and no {op}")
            if op.sequence in forked and not isinstance(op, FetchPrefix | Free):
                raise PlanError(f"sequence {op.sequence} is forked in step {plan.step}: it may have rows, and no {op}")
            changes[op.sequence] = extent_after(
                op, self._extents, partial(self._known, changes), self._check_fork, self._shifted
            )
            if isinstance(op, CommitMigration):
                self._extent(self.sequence_extents, op.copy)  # begun by an earlier plan
                changes[op.copy] = None
            if isinstance(op, Fork):
                forked[op.sequence] = op.length
                shared |= dict.fromkeys((op.sequence, op.source), op.length)
            elif isinstance(op, PrefillGrant | FetchPrefix | LoadKv):
                self._check_alone(op.rows, shared)
            elif isinstance(op, DropBlocks) and op.sequence in shared:
                raise PlanError(f"sequence {op.sequence} is forked and loses blocks in step {plan.step}")
        return shared, forked

    def _check_score(self, plan: StepPlan, op: ScoreBlocks) -> None:
        """Raise PlanError if the rows of a sequence cannot be scored."""
        rows = [r.count for r in plan.rows if r.sequence == op.sequence]
        twice = sum(isinstance(x, ScoreBlocks) and x.sequence == op.sequence for x in plan.ops) > 1
        if not any(self.sparse) or twice or not rows or not 1 <= op.rows <= rows[0]:
            raise PlanError(f"step {plan.step} has {rows or 'no'} rows of sequence {op.sequence}: no {op} can be")

    def _check_room(self, step: int, changes: Mapping[int, Extent | None], forks: Sequence[Fork]) -> None:
        """Raise NoBlocksError if there are too few blocks for ``changes``."""
        need, shared = [0] * len(self.windows), [set[int]() for _ in self.windows]
        forked = {fork.sequence: fork for fork in forks}
        for fork in forks:
            for group, ids in enumerate(shared):
                ids.update(self._blocks_shared(group, fork))
        for sequence, extent in changes.items():
            if extent is not None and sequence in forked:
                self._add(need, self._extents.num_blocks_after(extent, forked[sequence].length))
            elif not self._holds_the_same(sequence, extent):
                self._add(need, self._num_new_blocks(sequence, self.sequence_extents.get(sequence), extent, shared))
        for g, (blocks, pool) in enumerate(zip(need, self._pools, strict=True)):
            if blocks > pool.num_free:
                raise NoBlocksError(
                    f"step {step} needs {blocks - pool.num_free} KV blocks of {self.block_size} tokens more than the "
                    f"{self.num_blocks[g]} of layer group {g} (window {self.windows[g]})"
                )

    def _num_new_blocks(
        self, sequence: int, old: Extent | None, extent: Extent | None, shared: Sequence[Collection[int]] = ()
    ) -> tuple[int, ...]:
        """Return, by group, the free blocks that ``sequence`` takes, minus those that become free. ``shared``: by
        group, blocks that other sequences will hold, too.
        """
        taken = [
            b - a
            for a, b in zip(self._extents.num_held_blocks(old), self._extents.num_held_blocks(extent), strict=True)
        ]
        if sequence in self.sequence_extents and (any(shared) or any(pool.has_shared for pool in self._pools)):
            for g, pool in enumerate(self._pools):
                gone, _ = self._split(g, sequence, extent)
                taken[g] += sum(pool.num_holders(b) > 1 or (b in shared[g] if shared else False) for b in gone)
        return tuple(taken)

    def holds_exclusively(self, sequence: int, position: int) -> bool:
        """Return whether no other sequence holds the blocks from that of ``position`` on."""
        known, alone = self.sequence_extents.get(sequence), True
        if known is not None and any(pool.has_shared for pool in self._pools):
            number = max(position // self.block_size, 0)
            for g, pool in enumerate(self._pools):
                first = max(0, self._extents.table_index(g, known, number))
                alone = alone and all(pool.num_holders(b) == 1 for b in self._tables[g][sequence][first:])
        return alone

    def _check_alone(self, row: RowRange, shared: Mapping[int, int]) -> None:
        """Raise PlanError if other sequences hold blocks from that of the row's position on. ``shared``: tokens of
        sequences that the same plan forks.
        """
        if row.first < shared.get(row.sequence, 0) or not self.holds_exclusively(row.sequence, row.first):
            raise PlanError(f"sequence {row.sequence}: others hold blocks from that of position {row.first} on")

    def _holds_the_same(self, sequence: int, extent: Extent | None) -> bool:
        """Return whether no block is taken or freed, which is true of most tokens of a decoding sequence."""
        old, size = self.sequence_extents.get(sequence), self.block_size
        if old is None or extent is None:
            return False
        same = old.starts == extent.starts and old.dropped_blocks == extent.dropped_blocks
        same = same and -(-old.length // size) == -(-extent.length // size)
        return same and (old.location is extent.location or old.location == extent.location)

    def _check_fork(self, fork: Fork) -> Extent:
        """Return the extent of the sequence that ``fork`` starts. Raises PlanError if its source lacks the blocks."""
        source = self._extent(self.sequence_extents, fork.source)
        if fork.length < 1:
            raise PlanError(f"a fork of {fork.length} tokens of sequence {fork.source}")
        kept = SurvivingKv(fork.source, fork.length, source.location)
        if self.surviving_blocks(kept) is None:
            raise PlanError(f"cannot fork {fork.length} tokens of sequence {fork.source}: their KV is not here")
        return self._extents.extent_of_surviving(kept)

    def _blocks_shared(self, group: int, fork: Fork) -> array[int]:
        """Return the whole blocks that both sequences will hold."""
        extent, source = self._check_fork(fork), self.sequence_extents[fork.source]
        numbers = extent.starts[group], fork.length // self.block_size
        low, high = (self._extents.table_index(group, source, n) for n in numbers)
        return self._tables[group][fork.source][low:high]

    def can_shift(self, op: ContextShift) -> bool:
        """Return whether every memory worker can apply ``op``, if no other change comes first."""
        with suppress(PlanError):
            return self._shifted(op).length > 0
        return False

    def blocks_after(self, group: int, sequence: int, position: int) -> list[int]:
        """Return the ids of the kept blocks of a sequence, from that of ``position`` on."""
        at = self._extents.table_index(
            group, self._extent(self.sequence_extents, sequence), position // self.block_size
        )
        return list(self._tables[group][sequence][max(0, at) :])

    def _shifted(self, op: ContextShift) -> Extent:
        """Return the extent of a sequence after the shift. Raises PlanError."""
        after = self._extents.after_shift(self._extent(self.sequence_extents, op.sequence), op)
        for group, pool in enumerate(self._pools):
            if any(pool.num_holders(b) > 1 for b in self.blocks_after(group, op.sequence, op.first + op.count)):
                raise PlanError(f"{op}: others hold blocks after position {op.first + op.count}")
        return after

    def _shift(self, op: ContextShift) -> None:
        after, before, size = self._shifted(op), self.sequence_extents[op.sequence], self.block_size
        gone = range(op.first // size, (op.first + op.count) // size)
        for group, (pool, tables) in enumerate(zip(self._pools, self._tables, strict=True)):
            each = list(zip(self._extents.block_numbers(group, before), tables[op.sequence], strict=True))
            pool.free(block for number, block in reversed(each) if number in gone)
            tables[op.sequence] = array("q", (block for number, block in each if number not in gone))
        self.sequence_extents[op.sequence] = after

    def _share(self, fork: Fork) -> None:
        """Start the fork's sequence with the blocks that it shares, still without the block of which it gets a copy."""
        extent = self._check_fork(fork)
        extent = extent._replace(length=fork.length // self.block_size * self.block_size)
        for g, (pool, tables) in enumerate(zip(self._pools, self._tables, strict=True)):
            ids = self._blocks_shared(g, fork)
            tables[fork.sequence] = ids
            pool.share(ids)
        self.sequence_extents[fork.sequence] = extent

    def _commit_migration(self, op: CommitMigration) -> None:
        """Give the copy's blocks to its sequence, which takes them in place of free ones."""
        copy = self.sequence_extents[op.copy]
        for g, tables in enumerate(self._tables):
            numbers = self._extents.block_numbers(g, copy)
            self._num_taken[g, op.sequence] = dict(zip(numbers, tables[op.copy], strict=True))
            tables[op.copy] = array("q")

    def _fork_copies(self, fork: Fork) -> list[int | None]:
        """Return, by group, the source's partial last block of the fork; None if there is none, or it is elsewhere."""
        number, more = divmod(fork.length, self.block_size)
        kept = self._extents.num_blocks_after(self._check_fork(fork), fork.length)
        source = fork.source, number, number + 1
        return [self.block_ids(g, *source)[0] if more and n else None for g, n in enumerate(kept)]

    def _copies(self, group: int, forks: Sequence[Fork], begun: Sequence[Sequence[int | None]]) -> list[BlockCopy]:
        copies = list[BlockCopy]()
        for fork, blocks in zip(forks, begun, strict=True):
            if (block := blocks[group]) is not None:
                number = fork.length // self.block_size
                copies.append((block, self.block_ids(group, fork.sequence, number, number + 1)[0]))
        return copies

    def _free(self, sequence: int, extent: Extent | None) -> None:
        """Free the blocks that ``sequence`` holds outside ``extent``."""
        old = self.sequence_extents.get(sequence)
        if old is None or (extent is not None and _grows(old, extent)):
            return
        for g, (pool, tables) in enumerate(zip(self._pools, self._tables, strict=True)):
            gone, stay = self._split(g, sequence, extent)
            pool.free(reversed(gone))
            tables[sequence] = stay
            if extent is None:
                del tables[sequence]

    def _split(self, group: int, sequence: int, extent: Extent | None) -> tuple[array[int], array[int]]:
        """Return the blocks that ``sequence`` frees for ``extent``, and those that stay, UNALLOCATED for new ones."""
        old, ids = self.sequence_extents[sequence], self._tables[group][sequence]
        if extent is None or extent.starts[group] < old.starts[group]:  # gone, or a new one of the same id
            return ids, array("q")
        if extent.location != old.location or extent.dropped_blocks != old.dropped_blocks:
            here = dict(zip(self._extents.block_numbers(group, old), ids, strict=True)) | self._num_taken.get(
                (group, sequence), {}
            )
            numbers = self._extents.block_numbers(group, extent)
            gone = array("q", (here[n] for n in sorted(here.keys() - set(numbers))))
            return gone, array("q", (here.get(n, UNALLOCATED) for n in numbers))
        low = self._extents.table_index(group, old, extent.starts[group])
        high = low + self._extents.num_held_blocks(extent)[group]
        return ids[:low] + ids[high:], ids[low:high]

    def _take(self, sequence: int, extent: Extent) -> None:
        """Fill the tables of ``sequence`` up to ``extent``; enough blocks are free."""
        old = self.sequence_extents.get(sequence)
        moved = old is not None and (old.location, old.dropped_blocks) != (extent.location, extent.dropped_blocks)
        for pool, tables, held in zip(self._pools, self._tables, self._extents.num_held_blocks(extent), strict=True):
            ids = tables.setdefault(sequence, array("q"))
            if moved:
                ids[:] = array("q", (pool.allocate() if x == UNALLOCATED else x for x in ids))
            if (more := held - len(ids)) > 0:
                ids.extend(pool.allocate_many(more))

    @staticmethod
    def _add(counts: list[int], more: Iterable[int]) -> None:
        for g, n in enumerate(more):
            counts[g] += n


def _grows(old: Extent, extent: Extent) -> bool:
    """Return whether ``extent`` has all that ``old`` has, at the same location."""
    return extent.length >= old.length and extent[2:] == old[2:]
