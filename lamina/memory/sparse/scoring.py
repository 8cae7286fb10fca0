"""The scores that a plan asks for: what the last rows of its sequences attend in the sparse layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.memory.store import Store, StoredPiece
from lamina.protocol.plan import Rows, StepPlan
from lamina.protocol.sparse_ops import Score, Scored


@dataclass
class Tally:
    """Of one sequence, in one group."""

    sequence: int
    group: int
    rows: slice  # of the step
    blocks: Tensor  # [B] ids
    numbers: Tensor  # [B] of these blocks, counted from the sequence's token 0
    seen: Tensor  # [R] tokens of these blocks
    size: int  # of the sequence, in blocks
    sums: Tensor  # [B] int64, over layers and heads; the native loop adds to it, too


class Scoring:
    """Of one step, whose sequences lie here with all their tokens."""

    def __init__(self, store: Store, plan: StepPlan) -> None:
        self._view, self._step, self.tallies = plan.view, plan.step, list[Tally]()
        self._backend = store.backend
        ops = [op for op in plan.ops if isinstance(op, Score)]
        rows, starts = ({r.sequence: r for r in plan.rows}, starts_of(plan.rows)) if ops else ({}, {})
        for op in ops:
            stop = starts[op.sequence] + rows[op.sequence].count
            self.tallies += _tallies(store, rows[op.sequence], op.rows, slice(stop - op.rows, stop))

    def __bool__(self) -> bool:
        return bool(self.tallies)

    def add(self, pieces: Sequence[tuple[StoredPiece, Tensor]]) -> None:
        """A layer's: each piece, in which the step's rows are written, and the Q of all rows for it."""
        for piece, q in pieces:
            for tally in self.tallies:
                if tally.group == piece.group:
                    of = piece.operator, piece.kv, tally.blocks, q[tally.rows], tally.seen
                    tally.sums += self._backend.scores(*of)

    def answers(self) -> Iterator[Scored]:
        """Once all layers are done."""
        totals = dict[int, Tensor]()
        for tally in self.tallies:
            total = totals.setdefault(tally.sequence, torch.zeros(tally.size, dtype=torch.int64))
            total[tally.numbers.cpu()] += tally.sums.cpu()
        for sequence, total in totals.items():
            yield Scored(view=self._view, step=self._step, sequence=sequence, scores=total.tolist())


def _tallies(store: Store, rows: Rows, count: int, of: slice) -> Iterator[Tally]:
    tables, device = store.tables, store.device
    size, stop = tables.block_size, rows.first + rows.count
    for group in (g for g, sparse in enumerate(tables.sparse) if sparse):
        _, ids = tables.table(group, rows.sequence)
        gone = set(tables.dropped(group, rows.sequence))
        numbers = [n for n in range(-(-stop // size)) if n not in gone]
        seen = torch.arange(stop - count + 1, stop + 1, device=device) - len(gone) * size
        blocks, kept = (torch.tensor(list(x), dtype=torch.int64, device=device) for x in (ids, numbers))
        yield Tally(rows.sequence, group, of, blocks, kept, seen, -(-stop // size), torch.zeros_like(blocks))


def starts_of(rows: Iterable[Rows]) -> dict[int, int]:
    """Sequence -> its first row in a message."""
    starts, at = dict[int, int](), 0
    for row in rows:
        starts.setdefault(row.sequence, at)
        at += row.count
    return starts
