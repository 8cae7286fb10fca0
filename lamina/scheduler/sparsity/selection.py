"""Rows that attend another number of KV blocks than others. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from lamina.protocol.step_plan import SelectBlocks
from lamina.scheduler.feature import Feature, PlanDraft


class BlockSelection(Feature):
    """Tells memory workers of rows that attend another number of blocks than the engine's options say."""

    def extend_plan(self, draft: PlanDraft) -> None:
        """Add an op for each sequence that decodes and has a number of its own."""
        for sequence, count in draft.picked.items():
            if count == 1 and (sequence.full_attention or sequence.kv_budget):
                draft.batch.ops.append(SelectBlocks(sequence.id, 0 if sequence.full_attention else sequence.kv_budget))
