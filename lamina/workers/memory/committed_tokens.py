"""The tokens of each sequence that a memory worker has written in all layers: the KV that survives a loss."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.protocol.blocks.extents import PlanError
from lamina.protocol.step_plan import (
    ContextShift,
    Fork,
    Free,
    LoadKv,
    New,
    PrefillGrant,
    RowRange,
    StepPlan,
    SurvivingKv,
    Truncate,
)


class CommittedTokens:
    """Counts tokens from the first one on. A step that ends half way changes nothing here."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by sequence

    def check(self, plan: StepPlan, block_size: int) -> None:
        """Raise PlanError if a block is to be copied whose tokens are not stored yet."""
        for op in plan.ops:
            if isinstance(op, Fork) and op.length % block_size and self.tokens_of(op.source) < op.length:
                stored = self.tokens_of(op.source)
                raise PlanError(f"cannot fork {op.length} tokens of sequence {op.source}: {stored} are stored")

    def begin(self, plan: StepPlan, *, is_replay: bool = False) -> None:
        """Lower the counts to tokens that an applied plan will not overwrite. ``is_replay``: the plan was applied
        before.
        """
        for op in plan.ops:
            if isinstance(op, New):
                self._tokens[op.sequence] = 0
            elif isinstance(op, Fork):
                self._tokens[op.sequence] = min(self._tokens.get(op.source, 0), op.length)
            elif isinstance(op, Free):
                self._tokens.pop(op.sequence, None)
            elif isinstance(op, Truncate):
                self._lower(op.sequence, op.length)
            elif isinstance(op, ContextShift) and not is_replay:
                had = self._tokens.get(op.sequence, 0)
                self._tokens[op.sequence] = had - op.count if had >= op.first + op.count else min(had, op.first)
            elif isinstance(op, PrefillGrant | LoadKv):
                self._lower(op.sequence, op.first)
        for row in plan.rows:
            self._lower(row.sequence, row.first)

    def commit(self, rows: Iterable[RowRange]) -> None:
        """Note that ``rows`` were written in all layers."""
        for row in rows:
            if self._tokens.get(row.sequence, -1) >= row.first:
                self._tokens[row.sequence] = max(self._tokens[row.sequence], row.first + row.count)

    def reconcile(self, keep: Iterable[SurvivingKv]) -> None:
        """Set the counts to those of ``keep``; other sequences are gone."""
        self._tokens = {each.sequence: each.length for each in keep}

    def tokens_of(self, sequence: int) -> int:
        """Return the tokens of one sequence; 0 if there is none."""
        return self._tokens.get(sequence, 0)

    def report(self) -> dict[int, int]:
        """Return the tokens by sequence."""
        return dict(self._tokens)

    def _lower(self, sequence: int, tokens: int) -> None:
        self._tokens[sequence] = min(self._tokens.get(sequence, 0), tokens)
