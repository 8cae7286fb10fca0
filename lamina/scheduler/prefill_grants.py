"""Room for grants beside the rows of a step, known without another look at all of these. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.step_plan import Fork, Free, New, PrefillGrant, RowRange, SequenceOp

from .feature import PlanDraft
from .kv_manager.allocator import next_rows
from .kv_manager.block_accounting import BlockAccounting
from .scheduler_output import ScheduledStep
from .sequence import Sequence


class GrantBudget:
    """Of one plan: blocks that are free now, less those of its rows and of the grants that were taken. Blocks that its
    ops give back do not count; where sequences go on from what its ops make of them, nothing is sure.
    """

    def __init__(self, accounting: BlockAccounting, ops: Iterable[SequenceOp], rows: Iterable[RowRange]) -> None:
        self._accounting = accounting
        self._granted = dict[int, RowRange]()  # by sequence: all rows of its grants
        self._free: list[int] = []  # by group; empty = nothing is sure
        if all(isinstance(op, New | Free) for op in ops):
            self._free = self._less(accounting.free_blocks, self._needed(rows))

    def try_reserve(self, grant: PrefillGrant) -> bool:
        """Whether it surely fits; it has its blocks then. False: ``can_apply`` has to look, and nothing is sure from
        then on, as the grant may have its blocks in spite of this.
        """
        before = self._granted.get(grant.sequence)
        first = before.first if before else grant.first
        rows = RowRange(grant.sequence, first, grant.first + grant.count - first, grant.location)
        own = self._less(self._needed([rows]), self._needed([before] if before else []))
        self._free = self._less(self._free, [max(0, n) for n in own])
        if not self._free or min(self._free) < 0:
            return False
        self._granted[grant.sequence] = rows
        return True

    def _needed(self, rows: Iterable[RowRange]) -> list[int]:
        """By group; empty where nobody knows."""
        with suppress(PlanError):
            return [max(0, n) for n in self._accounting.blocks_needed(rows)]
        return []

    @staticmethod
    def _less(have: Iterable[int], needed: Iterable[int]) -> list[int]:
        """Empty where one of both is."""
        return [n - taken for n, taken in zip(have, needed, strict=False)]


class Granting(Protocol):
    """The prefill workers, by what they may compute next."""

    def next_grant(self, sequence: Sequence) -> PrefillGrant | None:
        """A grant for the next chunk of ``sequence``, if it is its turn."""
        ...

    def begin_chunk(self, sequence: Sequence, grant: PrefillGrant, epoch: int = 0) -> ScheduledStep:
        """The worker's step for a grant that was given, under ``epoch``."""
        ...


def grant_chunks(prefill: Granting, draft: PlanDraft) -> list[ScheduledStep]:
    """Let prefill workers go on with sequences of a batch, as far as there are blocks besides those of its rows; what
    is retained gives way. The plan gets a grant for each of the returned steps.
    """
    sure, epoch, steps, ops = None, 0, list[ScheduledStep](), draft.batch.ops
    forked = {op.sequence for op in ops if isinstance(op, Fork)}  # they have to be there first
    for sequence in (s for s in draft.batch.running if s.id not in forked):
        while (grant := prefill.next_grant(sequence)) is not None and not sequence.finished:
            if sure is None:
                sure, epoch = GrantBudget(draft.accounting, ops, next_rows(draft.picked)), draft.build().epoch
            at = len(ops)
            ops.append(grant)
            if not sure.try_reserve(grant) and not _make_room(draft):
                del ops[at]
                return steps
            steps.append(prefill.begin_chunk(sequence, grant, epoch))
    return steps


def _make_room(draft: PlanDraft) -> bool:
    """Whether the batch's plan can be; as much as that needs is given up."""
    while not draft.accounting.can_apply(draft.build()):
        if not draft.evict_for(draft.batch, [*next_rows(draft.picked), *_granted(draft.batch.ops)]):
            return False
    return True


def _granted(ops: Iterable[SequenceOp]) -> list[RowRange]:
    """All rows of each sequence that prefill workers go on with in the next plan."""
    rows = dict[int, RowRange]()
    for op in ops:
        if isinstance(op, PrefillGrant):
            first = rows[op.sequence].first if op.sequence in rows else op.first
            rows[op.sequence] = RowRange(op.sequence, first, op.first + op.count - first, op.location)
    return list(rows.values())
