"""Shadows measure whether answers with a part of the KV are within their error budget; where they are not, more KV is
kept. Pure policy: no torch, no I/O, no clock.

Of a share of completions a shadow is computed with all KV; compute workers tell how far the distributions of both are
apart. Over budget, later sequences keep or attend twice as many tokens, on the last rung all. Running sequences are
computed again with all KV, and keep the tokens that they have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from lamina.config.sparsity import ErrorBudget, SparsityOptions
from lamina.protocol.control import SampledToken
from lamina.request import CompletionOutput
from lamina.scheduler.batch import requeue
from lamina.scheduler.feature import Feature, Loss, Scheduling
from lamina.scheduler.scheduler_output import Round, ScheduledStep
from lamina.scheduler.sequence import Sequence

from .error_budget import CompletionErrors, ErrorMonitor
from .kept_kv import FULL_ATTENTION_SALT

NUM_BUDGETS = 3  # budgets, each twice the one below it; the step after them is all KV


class ErrorState(msgspec.Struct, frozen=True, kw_only=True):
    """Errors that shadows have measured, of completions that keep or attend as much KV as new ones."""

    tokens: int
    kl: float  # nats, in the mean
    top1: float  # share of tokens whose most likely one would have been another
    budget: int  # tokens that new completions keep or attend; 0: all
    rebuilt: int  # completions that were computed again with all KV


class ReferenceSequence(Sequence):
    """A sequence that decodes with all KV the tokens of a sparse sequence, to measure the sparse one's error.

    It runs like others until it has caught up. Then its rows are in the same steps.
    """

    def __init__(self, of: Sequence) -> None:
        output = CompletionOutput(-1)
        params = replace(of.params, prompt_logprobs=None, logprobs=None)  # never read
        super().__init__(-1, params, 0, of.prompt, output, of.max_len, of.stop_tokens, of.salt, follows=of)
        self.target, self.tokens, self.do_not_cache, self.priority = of, of.tokens, True, of.priority
        self._attempt = of.num_preemptions
        self.errors = CompletionErrors(of.max_len - len(of.prompt))  # measured against the other sequence's tokens

    @property
    def is_orphaned(self) -> bool:
        """True if the other sequence has ended, or is recomputed."""
        return self.target.finished or self.target.num_preemptions != self._attempt

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish. If the other sequence is unfinished, its errors do not count."""
        if not self.finished:
            self.errors.end(whole=self.target.finished)
        super().finish(reason, stop_reason)

    @property
    def num_tokens_with_placeholders(self) -> int:
        return self.target.num_tokens_with_placeholders

    @property
    def is_schedulable(self) -> bool:
        return not self.finished and self.num_computed_tokens < max(
            len(self.prompt) - 1, self.target.num_computed_tokens + 1
        )

    def num_schedulable_tokens(self, picked: Mapping[Sequence, int]) -> int:
        """Return the rows up to the other sequence's position after this step, whose last token may be unknown."""
        of = self.target
        upto = of.num_computed_tokens + picked[of] if of in picked else min(of.num_computed_tokens, len(self.tokens))
        return max(upto, len(self.prompt) - 1, self.num_computed_tokens) - self.num_computed_tokens


class ReferenceDecoder(Feature):
    """Measures the errors of an engine whose sequences keep or attend some of their KV."""

    def __init__(self, options: SparsityOptions, budget: ErrorBudget) -> None:
        self._options, self._budget = options, budget
        self._budget_step = 0
        self._credit = 1.0 - budget.shadow  # of a shadow: the first sequence has one
        self._stale = False  # whether sequences of a lower rung may run
        self._num_batches = 0
        self.monitor = ErrorMonitor(budget)  # of the rung
        self.num_rebuilt = 0  # sequences that were computed again with all KV

    @property
    def budget_tokens(self) -> int:
        """The tokens that a sequence keeps or attends which begins now; 0: all."""
        return self._options.kv_budget << self._budget_step if self._budget_step < NUM_BUDGETS else 0

    @property
    def errors(self) -> ErrorState:
        watch = self.monitor
        return ErrorState(
            tokens=watch.tokens, kl=watch.kl, top1=watch.top1, budget=self.budget_tokens, rebuilt=self.num_rebuilt
        )

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> ReferenceSequence | None:
        """Have a new sequence keep or attend as many tokens as the budget. Returns its shadow, if it gets one."""
        if not is_new or not self._is_approximate(sequence):
            return None
        if not self.budget_tokens:
            self._keep_all(sequence)
            return None
        sequence.kept.budget = self.budget_tokens
        self._credit += self._budget.shadow
        if self._credit < 1.0 or sequence.external_sampling:
            return None
        self._credit -= 1.0
        shadow = ReferenceSequence(sequence)
        self._keep_all(shadow)
        return shadow

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Take in the tokens of shadows. What follows from them is a warning."""
        for sequence, drawn in zip(step.sampled_sequences, step.drawn, strict=False):
            if isinstance(sequence, ReferenceSequence) and not sequence.finished and not self._stale:
                self._compare(step, sequence, drawn)

    def _compare(self, step: ScheduledStep, shadow: ReferenceSequence, drawn: SampledToken) -> None:
        different, kl = drawn.divergence or (False, math.nan)
        if drawn.divergence is None or not self.monitor.add(shadow.errors, top1_changed=different, kl=kl):
            return
        why, self._budget_step = self.monitor.alarm, self._budget_step + 1
        self._stale, self.monitor = True, ErrorMonitor(self._budget)
        now = f"{self.budget_tokens} tokens" if self.budget_tokens else "all"
        step.warnings.append(
            f"--kv-sparsity evict:max-top1=: {why}: running completions begin anew with all KV, new ones have {now} "
            f"of it in sparse layers"
        )

    def begin_round(self, scheduling: Scheduling) -> None:
        """End the shadows of sequences that go on no more, and have sequences of a lower rung begin anew."""
        waiting, batches = scheduling.waiting, scheduling.batches
        running = [s for batch in batches for s in batch.running]
        if len(batches) != self._num_batches:  # they were distributed anew, apart from those that they follow
            self._num_batches = len(batches)
            _end_shadows(running)
        if self._stale:
            self._stale = False
            for sequence in filter(self._is_approximate, waiting):
                if sequence.num_output_tokens:
                    self._rebuild(sequence)
                elif self.budget_tokens:
                    sequence.kept.budget, sequence.kept.scores = self.budget_tokens, None
                else:
                    self._keep_all(sequence)
            for batch in batches:
                for sequence in [s for s in reversed(batch.running) if self._is_stale(s)]:
                    scheduling.preempt(batch, sequence)
                    self._rebuild(sequence)
                    requeue(waiting, sequence)
        _end_shadows(s for s in (*waiting, *running) if isinstance(s, ReferenceSequence) and s.is_orphaned)

    def roll_back(self, loss: Loss) -> None:
        """End all shadows, whose rows can no longer be in the steps of the others."""
        _end_shadows(loss.sequences)

    def _is_approximate(self, sequence: Sequence) -> bool:
        return sequence.kept.drops_blocks or (self._options.selects_blocks and not sequence.kept.full_attention)

    def _is_stale(self, sequence: Sequence) -> bool:
        return self._is_approximate(sequence) and not sequence.finished and sequence.kept.budget != self.budget_tokens

    def _rebuild(self, sequence: Sequence) -> None:
        self._keep_all(sequence)
        sequence.output.kv_rebuilt = True
        self.num_rebuilt += 1

    def _keep_all(self, sequence: Sequence) -> None:
        kept = sequence.kept
        kept.drops_blocks, kept.budget, kept.scores = False, 0, None
        if self._options.selects_blocks and not kept.full_attention:
            kept.full_attention, sequence.salt = True, sequence.salt + FULL_ATTENTION_SALT
            sequence.known_keys.forget()


def _end_shadows(sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        if isinstance(sequence, ReferenceSequence):
            sequence.finish("abort")
