"""Rows that attend another number of KV blocks than others. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from lamina.protocol.step_plan import SelectBlocks
from lamina.scheduler.feature import Feature, PlanDraft


class BlockSelection(Feature):
    """Tells memory workers of rows that attend another number of blocks than the engine's options say."""

    def extend_plan(self, draft: PlanDraft) -> None:
        """Add an op for each sequence with one row that attends another number of blocks.

        Prompt tokens attend all blocks. One may be alone in a step: the last one if the KV of all others is cached.
        """
        for sequence, count in draft.picked.items():
            is_dense = sequence.kept.full_attention or sequence.num_computed_tokens < len(sequence.prompt)
            if count == 1 and (is_dense or sequence.kept.budget):
                draft.batch.ops.append(SelectBlocks(sequence.id, 0 if is_dense else sequence.kept.budget))
