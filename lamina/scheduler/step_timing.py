"""Measures how long prompts are computed and KV is loaded, and how long a step decodes. Pure policy."""

from __future__ import annotations

from lamina.protocol.step_plan import LoadKv

from .feature import Feature, Loss, PlanDraft
from .kv_manager.swap import SwapPolicy
from .scheduler_output import Round, ScheduledStep
from .sequence import Sequence
from .slo_admission import SloAdmission

PROMPT_ROUND_SHARE = 0.5  # of a round's rows are of prompts, where its time counts as theirs


class StepTimer(Feature):
    """Measures rounds and loads for the features that choose by time."""

    def __init__(self, slo_admission: SloAdmission, swap: SwapPolicy | None) -> None:
        self._swap, self._slo_admission, self._clock = swap, slo_admission, slo_admission.now_s
        self._began: dict[int, float] = {}  # round -> when it was planned
        self._loads: dict[int, float] = {}  # sequence -> the same
        self._mixed = set[int]()  # rounds that may have waited for what is loaded
        self._last = 0.0  # when the last round was done

    def extend_plan(self, draft: PlanDraft) -> None:
        """Note when a round, and each of its loads, began."""
        now = self._clock()
        self._began[draft.round] = now
        if self._swap and any(sequence.transfer.loading_tokens for sequence in draft.picked):
            self._mixed.add(draft.round)
        self._loads |= {op.sequence: now for op in draft.batch.ops if isinstance(op, LoadKv)}

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Measure a round that is done: from its beginning, or from the end of the one before."""
        if done is None:
            return
        number, now = step.plan.step, self._clock()
        seconds = now - max(self._began.pop(number, now), self._last)
        self._last = now
        mixed = number in self._mixed
        self._mixed.discard(number)
        if not done.prompt_rows:
            self._slo_admission.on_round_done(done.rows, done.tokens, seconds)
        elif self._swap and done.prompt_rows > PROMPT_ROUND_SHARE * done.rows and not mixed:
            self._swap.record_prefill(done.rows, seconds)

    def on_loaded(self, sequence: Sequence) -> tuple[()]:
        """Measure a load."""
        began = self._loads.pop(sequence.id, None)
        if self._swap and began is not None and sequence.num_cached_tokens:
            self._swap.record_load(sequence.num_cached_tokens, self._clock() - began)
        return ()

    def roll_back(self, loss: Loss) -> None:
        """Forget rounds and loads, none of which will be done."""
        self._began.clear()
        self._mixed.clear()
        self._loads.clear()
