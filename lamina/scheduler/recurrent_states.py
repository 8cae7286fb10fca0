"""The versions of recurrent states that memory workers must keep. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from lamina.protocol.step_plan import StateRows

from .feature import Feature, Leaving, Loss, PlanDraft
from .scheduler_output import Round, ScheduledStep


class RecurrentStates(Feature):
    """Tells memory workers with each row which older versions are not needed: a step that is done is never undone. It
    also tells where prompts end, since some recurrences compute prompts in another way.
    """

    def __init__(self) -> None:
        self._done: dict[int, int] = {}  # sequence -> tokens after the last step that is done

    def extend_plan(self, draft: PlanDraft) -> None:
        """Add an op for each sequence with rows."""
        for sequence, count in draft.picked.items():
            first = sequence.num_computed_tokens
            oldest = self._done.setdefault(sequence.id, first)
            prompt = min(max(len(sequence.prompt) - first, 0), count)
            draft.batch.ops.append(StateRows(sequence.id, oldest, prompt))

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Note the versions that the next steps read."""
        for row in step.plan.rows:
            if row.sequence in self._done:
                self._done[row.sequence] = row.first + row.count

    def on_leave(self, leaving: Leaving) -> None:
        """Forget a sequence, whose state is freed with its KV."""
        self._done.pop(leaving.sequence.id, None)

    def roll_back(self, loss: Loss) -> None:
        """Forget all: each sequence has one version left, at which it continues. One whose last token is computed, and
        waits for its caller's choice, has to compute that row again, whose version is gone.
        """
        self._done.clear()
        loss.distrusted |= {s.id for s in loss.sequences if s.num_computed_tokens >= len(s.tokens)}
