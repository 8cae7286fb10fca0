"""Counts the blocks for grants in a plan that also has rows. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from lamina.protocol.blocks.block_tables import BlockTables, PlanError
from lamina.protocol.step_plan import Free, New, PrefillGrant, RowRange, SequenceOp

from .feature import PlanDraft
from .kv_manager.allocator import next_rows


class GrantBudget:
    """The blocks for grants of one plan: free blocks, less those of its rows and of earlier grants.

    Blocks that its ops free do not count. With other ops than New and Free, the budget is unknown.
    """

    def __init__(self, accounting: BlockTables, ops: Iterable[SequenceOp], rows: Iterable[RowRange]) -> None:
        self._accounting = accounting
        self._granted = dict[int, RowRange]()  # by sequence: all rows of its grants
        self._free: list[int] = []  # by group; empty: unknown
        if all(isinstance(op, New | Free) for op in ops):
            self._free = self._less(accounting.free_blocks, self._needed(rows))

    def try_reserve(self, grant: PrefillGrant) -> bool:
        """Reserve blocks for a grant. Returns True if it surely fits.

        After False, ``can_apply`` must decide, and the budget is unknown.
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
        """Return the blocks that rows take, by group; empty if that is not known."""
        with suppress(PlanError):
            return [max(0, n) for n in self._accounting.blocks_needed(rows)]
        return []

    @staticmethod
    def _less(have: Iterable[int], needed: Iterable[int]) -> list[int]:
        """Subtract by group; empty if one of both is."""
        return [n - taken for n, taken in zip(have, needed, strict=False)]


def make_room(draft: PlanDraft) -> bool:
    """Evict retained KV until the batch's plan fits. Returns False if it does not."""
    while not draft.accounting.can_apply(draft.build()):
        if not draft.evict_for(draft.batch, [*next_rows(draft.picked), *_granted(draft.batch.ops)]):
            return False
    return True


def _granted(ops: Iterable[SequenceOp]) -> list[RowRange]:
    """Return all granted rows of each sequence."""
    rows = dict[int, RowRange]()
    for op in ops:
        if isinstance(op, PrefillGrant):
            first = rows[op.sequence].first if op.sequence in rows else op.first
            rows[op.sequence] = RowRange(op.sequence, first, op.first + op.count - first, op.location)
    return list(rows.values())
