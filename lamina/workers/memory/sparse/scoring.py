"""The block scores that a plan requests: what the last rows of its sequences attend in the sparse layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.protocol.codec import first_rows
from lamina.protocol.step_plan import BlockScoresReport, RowRange, ScoreBlocks, StepPlan
from lamina.workers.memory.kv_store import KvStore, StoredPiece


@dataclass
class ScoreSum:
    """The scores of one sequence in one group."""

    sequence: int
    group: int
    rows: slice  # the sequence's rows in the step
    blocks: Tensor  # [B] ids
    numbers: Tensor  # [B] the blocks' numbers in the sequence
    seen: Tensor  # [R] tokens of these blocks that each row attends
    size: int  # blocks of the whole sequence
    sums: Tensor  # [B] int64, over layers and heads; the native loop adds to it, too


class BlockScoring:
    """The scores of one step, whose sequences lie here with all their tokens."""

    def __init__(self, store: KvStore, plan: StepPlan) -> None:
        self._view, self._step, self.score_sums = plan.epoch, plan.step, list[ScoreSum]()
        self._backend = store.backend
        rows, starts = {r.sequence: r for r in plan.rows}, first_rows(plan.rows)
        for op in (op for op in plan.ops if isinstance(op, ScoreBlocks)):
            stop = starts[op.sequence] + rows[op.sequence].count
            self.score_sums += _tallies(store, rows[op.sequence], op.rows, slice(stop - op.rows, stop))

    def add(self, pieces: Sequence[tuple[StoredPiece, Tensor]]) -> None:
        """Add the scores of a layer. ``pieces``: each with the step's rows written, and the Q of all rows for it."""
        for piece, q in pieces:
            for tally in self.score_sums:
                if tally.group == piece.group:
                    of = piece.operator, piece.kv, tally.blocks, q[tally.rows], tally.seen
                    tally.sums += self._backend.block_scores(*of)

    def reports(self) -> Iterator[BlockScoresReport]:
        """Yield a report for each sequence, after all layers are done."""
        totals = dict[int, Tensor]()
        for tally in self.score_sums:
            total = totals.setdefault(tally.sequence, torch.zeros(tally.size, dtype=torch.int64))
            total[tally.numbers.cpu()] += tally.sums.cpu()
        for sequence, total in totals.items():
            yield BlockScoresReport(epoch=self._view, step=self._step, sequence=sequence, scores=total.tolist())


def _tallies(store: KvStore, rows: RowRange, count: int, of: slice) -> Iterator[ScoreSum]:
    tables, device = store.tables, store.device
    size, stop = tables.block_size, rows.first + rows.count
    for group in (g for g, sparse in enumerate(tables.sparse) if sparse):
        _, ids = tables.block_table(group, rows.sequence)
        gone = set(tables.dropped_blocks(group, rows.sequence))
        numbers = [n for n in range(-(-stop // size)) if n not in gone]
        seen = torch.arange(stop - count + 1, stop + 1, device=device) - len(gone) * size
        blocks, kept = (torch.tensor(list(x), dtype=torch.int64, device=device) for x in (ids, numbers))
        yield ScoreSum(rows.sequence, group, of, blocks, kept, seen, -(-stop // size), torch.zeros_like(blocks))
