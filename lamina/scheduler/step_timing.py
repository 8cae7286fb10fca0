"""How long KV takes to be computed and to be loaded, and a step to decode: what choices are made by. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lamina.protocol.step_plan import LoadKv

from .kv_manager.swap import SwapPolicy
from .scheduler_output import Round, ScheduledStep
from .sequence import Sequence
from .slo_admission import SloAdmission

PROMPT_ROUND_SHARE = 0.5  # of a round's rows are of prompts, where its time counts as theirs


class StepTimer:
    """Tells Swaps and Promises of what a clock has shown. Times are of one clock, in seconds."""

    def __init__(self, swap: SwapPolicy | None, slo_admission: SloAdmission) -> None:
        self._swaps, self._promises = swap, slo_admission
        self._began: dict[int, float] = {}  # round -> when it was sent
        self._loads: dict[int, float] = {}  # sequence -> the same
        self._mixed = set[int]()  # rounds that may have waited for what is loaded
        self._last = 0.0  # when the last round was done

    def on_round_sent(self, steps: Iterable[ScheduledStep], now: float) -> None:
        """A round is on its way."""
        for step in steps:
            self._began[step.plan.step] = now
            if self._swaps and any(sequence.num_loading_tokens for sequence in step.sequences):
                self._mixed.add(step.plan.step)
            for op in step.plan.ops:
                if isinstance(op, LoadKv):
                    self._loads[op.sequence] = now

    def on_round_done(self, number: int, done: Round, now: float) -> None:
        """A round is no longer on its way: its last step is done."""
        seconds = now - max(self._began.pop(number, now), self._last)
        self._last = now
        mixed = number in self._mixed
        self._mixed.discard(number)
        if not done.prompt_rows:
            self._promises.on_round_done(done.rows, done.tokens, seconds)
        elif self._swaps and done.prompt_rows > PROMPT_ROUND_SHARE * done.rows and not mixed:
            self._swaps.record_prefill(done.rows, seconds)

    def on_kv_loaded(self, sequence: Sequence, now: float) -> None:
        """All KV of a sequence that could be loaded is there."""
        began = self._loads.pop(sequence.id, None)
        if self._swaps and began is not None and sequence.num_cached_tokens:
            self._swaps.record_load(sequence.num_cached_tokens, now - began)

    def reset(self) -> None:
        """No round and no load is under way any more."""
        self._began.clear()
        self._mixed.clear()
        self._loads.clear()
