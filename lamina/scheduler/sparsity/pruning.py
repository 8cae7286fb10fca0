"""The times at which a sequence loses blocks: after its prompt, and again now and then. Pure policy: no torch, no I/O,
no clock.

Memory workers score the last rows before that. Then the sequence has no rows until all reports are there and its blocks
are dropped, so its plans do not depend on the workers' speed. A sequence that is computed again, after a preemption or
a loss, is not scored up to where it was: it loses the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

from lamina.config.sparsity import SCORE_TOKENS, SparsityOptions
from lamina.kv.sparsity import OBSERVED_DECODE_ROWS, BlockScores, KvBudget, kv_budget
from lamina.protocol.executor import Report
from lamina.protocol.step_plan import BlockScoresReport, DropBlocks, ScoreBlocks
from lamina.scheduler.feature import Feature, Loss, PlanDraft
from lamina.scheduler.sequence import Sequence


class BlockPruner(Feature):
    """Has sequences with KV sparsity scored, and lose blocks."""

    def __init__(self, options: SparsityOptions, block_size: int, num_workers: int) -> None:
        """``num_workers``: memory workers, each of which reports the scores of its heads."""
        self._budget, self._window = kv_budget(options, block_size), options.kv_observation_window
        self._num_workers = num_workers
        self._requested: dict[int, Sequence] = {}  # sequences with reports to come, by number
        self.due: list[tuple[Sequence, DropBlocks]] = []  # for the next round
        self.num_dropped = 0  # blocks, in each sparse layer

    @property
    def has_transfers(self) -> bool:
        """True while reports are to come."""
        return bool(self._requested)

    def batch_ops(self, running: Several[Sequence]) -> list[DropBlocks]:
        """Return the blocks that running sequences lose. Forget those of sequences that have ended or begin anew."""
        if not self.due:
            return []
        numbers = {s.id for s in running}
        ops = [op for _, op in self.due if op.sequence in numbers]
        others = [(s, op) for s, op in self.due if op.sequence not in numbers]
        self.due = [(s, op) for s, op in others if s.id == op.sequence and not s.finished]
        self.num_dropped += sum(len(op.blocks) for op in ops)
        return ops

    def extend_plan(self, draft: PlanDraft) -> None:
        """Have the next rows of sparse sequences scored."""
        draft.batch.ops += self.score_ops(draft.picked)

    def score_ops(self, picked: Mapping[Sequence, int]) -> list[ScoreBlocks]:
        """Return the ops of a plan with the next rows of ``picked``, so many each."""
        ops = list[ScoreBlocks]()
        for sequence, count in picked.items():
            if not sequence.kept.drops_blocks:
                continue
            first, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            known = sequence.kept.scores
            if known is None or known.next_drop_length <= first:  # it begins with KV of others, which has all blocks
                known = sequence.kept.scores = self._begin(sequence)
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
                sequence.set_transfer(is_scored=stop >= known.num_due)
        return ops

    def on_report(self, report: Report) -> None:
        """Take in the scores of a memory worker, unless the sequence has ended or begun anew."""
        if not isinstance(report, BlockScoresReport):
            return
        sequence = self._requested.get(report.sequence)
        if sequence is None or (known := sequence.kept.scores) is None or sequence.id != report.sequence:
            self._requested.pop(report.sequence, None)
            return
        known.add(report.scores)
        known.num_missing_reports -= 1
        if known.num_missing_reports:
            return
        del self._requested[report.sequence]
        if sequence.transfer.is_scored:
            blocks = known.drop(sequence.num_computed_tokens, self._budget_of(sequence))
            known.num_due, known.observation_window = sequence.num_computed_tokens + SCORE_TOKENS, OBSERVED_DECODE_ROWS
            sequence.set_transfer(is_scored=False)
            self._drop(sequence, blocks)

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> None:
        """Have a sequence that begins anew drop the same blocks again."""
        if sequence.kept.scores is not None:
            sequence.kept.scores.reset()

    def roll_back(self, loss: Loss) -> None:
        """Expect no report. All KV of sequences that drop blocks is computed again, since the rest needs it."""
        self._requested.clear()
        self.due.clear()
        loss.distrusted.update(s.id for s in loss.sequences if s.kept.drops_blocks)

    def _begin(self, sequence: Sequence) -> BlockScores:
        """Return the scores of a sequence that has its first rows: all its known tokens count as its prompt."""
        known, most = len(sequence.tokens), self._budget_of(sequence).tokens
        if known > most:
            return BlockScores(known, self._window)
        return BlockScores(most + SCORE_TOKENS, OBSERVED_DECODE_ROWS)

    def _budget_of(self, sequence: Sequence) -> KvBudget:
        return self._budget._replace(tokens=sequence.kept.budget or self._budget.tokens)

    def _drop(self, sequence: Sequence, blocks: list[int]) -> None:
        if blocks:
            self.due.append((sequence, DropBlocks(sequence.id, blocks)))
