"""When a sequence loses blocks: behind its prompt, and again now and then. Pure policy: no torch, no I/O, no clock.

The last rows before that are scored by all memory workers. Behind its last such row a sequence has no rows until all
reports are there and its blocks are dropped, so its plans do not depend on the workers' speed. A sequence that begins
anew, behind a preemption or a loss, is not scored again up to where it was: it loses the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

from lamina.config.sparsity import SCORE_TOKENS, SparsityOptions
from lamina.kv.sparsity import OBSERVED_DECODE_ROWS, BlockScores, KvBudget, kv_budget
from lamina.protocol.executor import Report
from lamina.protocol.sparse_ops import BlockScoresReport, ScoreBlocks
from lamina.protocol.step_plan import DropBlocks
from lamina.scheduler.feature import Feature, Loss, PlanDraft
from lamina.scheduler.sequence import Sequence


class BlockPruner(Feature):
    """Of all sequences that are sparse."""

    def __init__(self, options: SparsityOptions, block_size: int, num_workers: int) -> None:
        """``num_workers``: memory workers, each of which tells the scores of its heads."""
        self._budget, self._window = kv_budget(options, block_size), options.kv_window
        self._num_workers = num_workers
        self._requested: dict[int, Sequence] = {}  # sequences with reports to come, by number
        self._due: list[tuple[Sequence, DropBlocks]] = []  # for the next round
        self.num_dropped = 0  # blocks, in each sparse layer

    @property
    def has_transfers(self) -> bool:
        """Whether reports are to come."""
        return bool(self._requested)

    def extend_plan(self, draft: PlanDraft) -> None:
        """Have the next rows of sparse sequences scored."""
        draft.batch.ops += self.score_ops(draft.picked)

    def on_report(self, report: Report) -> None:
        """Take in the scores of a memory worker."""
        if isinstance(report, BlockScoresReport):
            self.on_scores(report)

    def batch_ops(self, running: Several[Sequence]) -> list[DropBlocks]:
        """The blocks that running sequences lose."""
        return self.prune_ops(running)

    def score_ops(self, picked: Mapping[Sequence, int]) -> list[ScoreBlocks]:
        """For a plan with the next rows of ``picked``, so many each."""
        ops = list[ScoreBlocks]()
        for sequence, count in picked.items():
            if not sequence.evicts_kv:
                continue
            first, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            known = sequence.block_scores
            if known is None or known.next_drop_length <= first:  # it begins with KV of others, behind its lost blocks
                known = sequence.block_scores = self._begin(sequence)
            if known.drops_to_repeat:
                if stop == known.next_drop_length:
                    self._drop(sequence, known.drops_to_repeat.pop(0).blocks)
                continue
            rows = stop - max(first, known.num_due - known.observation_window)
            if rows > 0:
                ops.append(ScoreBlocks(sequence.id, rows))
                known.num_rows += rows
                known.num_missing_reports += self._num_workers
                self._requested[sequence.id] = sequence
                sequence.awaits_block_scores = stop >= known.num_due
        return ops

    def _begin(self, sequence: Sequence) -> BlockScores:
        """Of one that has its first rows: all that is known of it counts as its prompt."""
        known, most = len(sequence.tokens), self._budget_of(sequence).tokens
        if known > most:
            return BlockScores(known, self._window)
        return BlockScores(most + SCORE_TOKENS, OBSERVED_DECODE_ROWS)

    def _budget_of(self, sequence: Sequence) -> KvBudget:
        return self._budget._replace(tokens=sequence.kv_budget or self._budget.tokens)

    def on_scores(self, scores: BlockScoresReport) -> None:
        """A memory worker has told. Of sequences that are gone, or have begun anew, nobody wants to know."""
        sequence = self._requested.get(scores.sequence)
        if sequence is None or (known := sequence.block_scores) is None or sequence.id != scores.sequence:
            self._requested.pop(scores.sequence, None)
            return
        known.add(scores.scores)
        known.num_missing_reports -= 1
        if known.num_missing_reports:
            return
        del self._requested[scores.sequence]
        if sequence.awaits_block_scores:
            blocks = known.drop(sequence.num_computed_tokens, self._budget_of(sequence))
            known.num_due, known.observation_window = sequence.num_computed_tokens + SCORE_TOKENS, OBSERVED_DECODE_ROWS
            sequence.awaits_block_scores = False
            self._drop(sequence, blocks)

    def _drop(self, sequence: Sequence, blocks: list[int]) -> None:
        if blocks:
            self._due.append((sequence, DropBlocks(sequence.id, blocks)))

    def prune_ops(self, running: Iterable[Sequence]) -> list[DropBlocks]:
        """For the next plan of a batch, of those that run in it. Of those that went or begin anew none is left."""
        if not self._due:
            return []
        numbers = {s.id for s in running}
        ops = [op for _, op in self._due if op.sequence in numbers]
        others = [(s, op) for s, op in self._due if op.sequence not in numbers]
        self._due = [(s, op) for s, op in others if s.id == op.sequence and not s.finished]
        self.num_dropped += sum(len(op.blocks) for op in ops)
        return ops

    def roll_back(self, loss: Loss) -> None:
        """Expect no report, as whatever was dropped is computed again."""
        self._requested.clear()
        self._due.clear()
