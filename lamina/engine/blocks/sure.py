"""Room for grants beside the rows of a step, known without another look at all of these. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from lamina.protocol.blocks.tables import PlanError
from lamina.protocol.plan import Free, Grant, New, Rows, SequenceOp

from .ledger import Ledger


class SureRoom:
    """Of one plan: blocks that are free now, less those of its rows and of the grants that were taken. Blocks that its
    ops give back do not count; where sequences go on from what its ops make of them, nothing is sure.
    """

    def __init__(self, ledger: Ledger, ops: Iterable[SequenceOp], rows: Iterable[Rows]) -> None:
        self._ledger = ledger
        self._left: list[int] = []  # by group; empty = nothing is sure
        if all(isinstance(op, New | Free) for op in ops):
            self._left = self._without(ledger.free_blocks, rows)

    def _without(self, left: Iterable[int], rows: Iterable[Rows]) -> list[int]:
        with suppress(PlanError):
            needed = self._ledger.blocks_needed(rows)
            return [have - max(0, n) for have, n in zip(left, needed, strict=True)]
        return []

    def takes(self, grant: Grant) -> bool:
        """Whether it surely fits; it has its blocks then. False: ``can_apply`` has to look."""
        left = self._without(self._left, [grant.rows]) if self._left else []
        if not left or min(left) < 0:
            return False
        self._left = left
        return True
