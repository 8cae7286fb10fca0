"""Room for grants beside the rows of a step, known without another look at all of these. Pure policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.step_plan import Fork, Free, New, PrefillGrant, RowRange, SequenceOp, StepPlan

from .batch import Batch
from .kv_manager.allocator import next_rows
from .kv_manager.block_accounting import BlockAccounting
from .preemption import Preemption
from .prefill_dispatch import PrefillDispatcher
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


def grant_chunks(
    prefill: PrefillDispatcher,
    accounting: BlockAccounting,
    batch: Batch,
    picked: dict[Sequence, int],
    plan: Callable[[Batch, dict[Sequence, int]], StepPlan],
    preemption: Preemption,
) -> tuple[StepPlan | None, list[ScheduledStep]]:
    """Let prefill workers go on with sequences of ``batch``, as far as there are blocks beside those of ``picked``, for
    which ``plan`` gives a plan; what is retained gives way. The plan that says so, None where nobody does; and the
    steps of these workers.
    """
    sure, view, steps = None, 0, list[ScheduledStep]()
    forked = {op.sequence for op in batch.ops if isinstance(op, Fork)}  # they have to be there first
    for sequence in (s for s in batch.running if s.id not in forked):
        while (grant := prefill.next_grant(sequence)) is not None and not sequence.finished:
            if sure is None:
                sure, view = GrantBudget(accounting, batch.ops, next_rows(picked)), plan(batch, picked).epoch
            at = len(batch.ops)
            batch.ops.append(grant)
            if not sure.try_reserve(grant) and not _make_room(accounting, batch, picked, plan, preemption):
                del batch.ops[at]
                return plan(batch, picked), steps
            steps.append(prefill.begin_chunk(sequence, grant, view))
    return plan(batch, picked) if steps else None, steps


def _make_room(
    accounting: BlockAccounting,
    batch: Batch,
    picked: dict[Sequence, int],
    plan: Callable[[Batch, dict[Sequence, int]], StepPlan],
    preemption: Preemption,
) -> bool:
    """Whether the batch's plan can be; as much as that needs is given up."""
    while not accounting.can_apply(plan(batch, picked)):
        if not preemption.free_blocks_for_grants(batch, picked):
            return False
    return True
