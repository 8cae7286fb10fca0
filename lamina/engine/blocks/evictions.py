"""When a sequence loses blocks: behind its prompt, and again now and then. Pure policy: no torch, no I/O, no clock.

The last rows before that are scored by all memory workers. Behind its last such row a sequence has no rows until all
reports are there and its blocks are dropped, so its plans do not depend on the workers' speed. A sequence that begins
anew, behind a preemption or a loss, is not scored again up to where it was: it loses the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lamina.engine.sequence import Sequence
from lamina.kv.sparsity import DECODE_ROWS, BlockScores, Budget, budget_of
from lamina.protocol.options.sparsity import SCORE_TOKENS, SparsityOptions
from lamina.protocol.plan import Prune
from lamina.protocol.sparse import most_kept
from lamina.protocol.sparse_ops import Attend, RowOp, Score, Scored


def row_ops(picked: Mapping[Sequence, int], evictions: Evictions | None) -> list[RowOp]:
    """What a plan says of the next rows of ``picked``, so many each, besides the rows themselves."""
    lone = [s for s, count in picked.items() if count == 1 and (s.dense or s.budget)]
    return [*(Attend(s.id, 0 if s.dense else s.budget) for s in lone), *(evictions.scores(picked) if evictions else ())]


class Evictions:
    """Of all sequences that are sparse."""

    def __init__(self, options: SparsityOptions, block_size: int, num_workers: int) -> None:
        """``num_workers``: memory workers, each of which tells the scores of its heads."""
        self._budget, self._window = budget_of(options, block_size), options.kv_window
        self.most_kept = most_kept(options)  # tokens, in a sparse layer
        self._num_workers = num_workers
        self._asked: dict[int, Sequence] = {}  # sequences with reports to come, by number
        self._due: list[tuple[Sequence, Prune]] = []  # for the next round
        self.num_dropped = 0  # blocks, in each sparse layer

    @property
    def waiting(self) -> bool:
        """Whether reports are to come."""
        return bool(self._asked)

    def scores(self, picked: Mapping[Sequence, int]) -> list[Score]:
        """For a plan with the next rows of ``picked``, so many each."""
        ops = list[Score]()
        for sequence, count in picked.items():
            if not sequence.sparse:
                continue
            first, stop = sequence.num_scheduled, sequence.num_scheduled + count
            known = sequence.scores
            if known is None or known.stop <= first:  # it begins with KV of others, behind its lost blocks
                known = sequence.scores = self._begin(sequence)
            if known.again:
                if stop == known.stop:
                    self._drop(sequence, known.again.pop(0).blocks)
                continue
            rows = stop - max(first, known.due - known.window)
            if rows > 0:
                ops.append(Score(sequence.id, rows))
                known.rows += rows
                known.left += self._num_workers
                self._asked[sequence.id] = sequence
                sequence.awaits_scores = stop >= known.due
        return ops

    def _begin(self, sequence: Sequence) -> BlockScores:
        """Of one that has its first rows: all that is known of it counts as its prompt."""
        known, most = len(sequence.tokens), self._budget_of(sequence).tokens
        if known > most:
            return BlockScores(known, self._window)
        return BlockScores(most + SCORE_TOKENS, DECODE_ROWS)

    def _budget_of(self, sequence: Sequence) -> Budget:
        return self._budget._replace(tokens=sequence.budget or self._budget.tokens)

    def report(self, said: Scored) -> None:
        """A memory worker has told. Of sequences that are gone, or have begun anew, nobody wants to know."""
        sequence = self._asked.get(said.sequence)
        if sequence is None or (known := sequence.scores) is None or sequence.id != said.sequence:
            self._asked.pop(said.sequence, None)
            return
        known.add(said.scores)
        known.left -= 1
        if known.left:
            return
        del self._asked[said.sequence]
        if sequence.awaits_scores:
            blocks = known.drop(sequence.num_scheduled, self._budget_of(sequence))
            known.due, known.window = sequence.num_scheduled + SCORE_TOKENS, DECODE_ROWS
            sequence.awaits_scores = False
            self._drop(sequence, blocks)

    def _drop(self, sequence: Sequence, blocks: list[int]) -> None:
        if blocks:
            self._due.append((sequence, Prune(sequence.id, blocks)))

    def prunes(self, running: Iterable[Sequence]) -> list[Prune]:
        """For the next plan of a batch, of those that run in it. Of those that went or begin anew none is left."""
        if not self._due:
            return []
        numbers = {s.id for s in running}
        ops = [op for _, op in self._due if op.sequence in numbers]
        others = [(s, op) for s, op in self._due if op.sequence not in numbers]
        self._due = [(s, op) for s, op in others if s.id == op.sequence and not s.finished]
        self.num_dropped += sum(len(op.blocks) for op in ops)
        return ops

    def forget(self) -> None:
        """Behind a loss: no report will come, and whatever was dropped is computed again."""
        self._asked.clear()
        self._due.clear()
