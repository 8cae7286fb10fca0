"""The times that a running engine promises its prompts, and the refusals of prompts that it cannot promise. Pure
policy: no torch, no I/O; the clock comes in.

A prompt is booked with the Conductor at its arrival, so that the next prompt sees it wait; from then on the Conductor
hears of each change of it. Without prefill workers, the compute workers are the Conductor's only worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamina.request import OverloadedError, Refusal

from .conductor import Conductor, ConductorConfig, PromptInfo
from .conductor.decision_log import INLINE, DecisionLog, LoggedPrompt
from .conductor.latency_model import (
    SINGLE_STAGE,
    PrefillLatency,
    PrefillLatencyEstimator,
    PrefillPipelineShape,
    StepLatencyEstimator,
    TransferLatencyEstimator,
)
from .conductor.overload import NO_LIMITS, DecodeLoadModel, StepLatency
from .conductor.routing import RoutingDecision, start_delay_s
from .prefix_index import PREFILL, PageKeys, PrefixIndex
from .sequence import Sequence
from .starts import DecodePlacement

INITIAL_PREFILL_LATENCY = PrefillLatency(0.0, 1e-4, 0.0)  # of prompts, until some were computed


class _Reservation(NamedTuple):
    choice: RoutingDecision
    at_s: float
    ttft_s: float  # that was expected
    uses_other_prompt: bool = False  # another completion of the request computes its prompt
    candidates: Several[RoutingDecision] = ()  # of all ways, where somebody wants to know


@dataclass
class SloCounts:
    """What became of promises: sums since the start, and the loads of both pools now, over their limits.
    ``predicted_ttft_s``, ``actual_ttft_s``: from the arrival of a prompt to its first token.
    ``rejected_after_prefill_tokens``: tokens of prompts that were computed and not decoded.
    """

    prompts: int = 0
    predicted_ttft_s: float = 0.0
    actual_ttft_s: float = 0.0
    rejected_after_prefill_tokens: int = 0
    prefill_load: float = 0.0
    decode_load: float = 0.0


class SloAdmission:
    """Of one engine. ``clock``: seconds; by one that stands still, a prompt costs as many seconds as it has tokens."""

    def __init__(
        self,
        num_workers: int = 0,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = float,
        staged: PrefillPipelineShape = SINGLE_STAGE,
        *,
        prefix_index: PrefixIndex | None = None,
        keys: PageKeys | None = None,
        transfer_latency: TransferLatencyEstimator | None = None,
        cached_tokens_of: Callable[[Sequence], int] = lambda sequence: 0,
        shared_tokens_of: Callable[[Sequence], int] = lambda sequence: 0,
        decision_log: DecisionLog | None = None,
    ) -> None:
        """``num_workers``: of prefill workers, or groups that are ``staged``; 0 = the compute workers do it.
        ``prefix_index``: of what they keep of prompts, by ``keys``. ``transfer_latency``: from one to another; None:
        nothing is sent.
        ``cached_tokens_of``: the first tokens of a sequence that need not be computed. ``shared_tokens_of``: tokens
        that the completions of its request compute once. ``decision_log``: of all choices; None: there is none.
        """
        self.cached_tokens_of, self.shared_tokens_of = cached_tokens_of, shared_tokens_of
        self.has_limits, self.decision_log = False, decision_log
        self.keeps_prompts = False  # whether prefill workers keep K and V of prompts
        self.prefix_index, self.keys = prefix_index or PrefixIndex(), keys or PageKeys(0)
        self.conductor = Conductor(
            config=ConductorConfig(policy="auto"),
            prefix_index=self.prefix_index,
            prefill_latency=PrefillLatencyEstimator(INITIAL_PREFILL_LATENCY, trusted=False),
            transfer_latency=transfer_latency,
            decode_load_model=DecodeLoadModel(1, StepLatency(0.0, 0.0, 0.0), 0.0, weight=0),
            num_workers=max(1, num_workers),
            staged=staged,
        )
        self._clock, self._max_num_seqs, self._on_prefill_workers = clock, max_num_seqs, num_workers > 0
        self._steps = StepLatencyEstimator()
        self._reservations = dict[Sequence, _Reservation]()
        self._first = dict[int, Sequence]()  # of a request's completions, the one that computes the prompt for all
        self._fetched = dict[Sequence, float]()  # of prompts that are computed: seconds until others had sent theirs
        self._decoding = set[Sequence]()
        self._inline = dict[Sequence, float]()  # whose rows compute workers have, since when
        self._since_s = 0.0  # the last of these was done
        self._counts = SloCounts()

    def set_config(self, rules: ConductorConfig) -> None:
        """Keep to these from now on. Nobody has come yet, and made-up prompts have taught nothing."""
        untaught = PrefillLatencyEstimator(INITIAL_PREFILL_LATENCY, trusted=False)
        self.conductor = replace(self.conductor, config=rules, prefill_latency=untaught)
        self.has_limits = rules.limits != NO_LIMITS

    @contextmanager
    def without_log(self) -> Iterator[None]:
        """Log no decision meanwhile, such as those on made-up prompts."""
        decision_log, self.decision_log = self.decision_log, None
        try:
            yield
        finally:
            self.decision_log = decision_log

    @property
    def routes_prompts(self) -> bool:
        """Whether it matters who computes a prompt, and when: else nobody asks."""
        return self._on_prefill_workers or self.has_limits

    def check_admission(
        self, sequences: Several[Sequence], places: Callable[[int], float], *, accepted: bool = False
    ) -> None:
        """Of a request that comes now, of so many completions. ``places``: how many completions of so many tokens have
        room for their KV at once. Raises OverloadedError where it would come too late and was not ``accepted`` before.
        """
        if accepted or not self.has_limits:
            return
        prompt, now, decoding = self._known_prompt(sequences[0]), self._clock(), self.conductor.decode_load_model
        own = (
            int(max(decoding.mean_tokens, len(sequences[0].tokens) + decoding.mean_answer_tokens))
            - prompt.num_cached_tokens
        )
        most, ahead = min(self._max_num_seqs, places(max(1, own))), self._estimate(prompt) + len(self._decoding)
        choice, room_s = self.conductor.choose(prompt, now), decoding.time_until_slot_s(most, ahead) if ahead else 0.0
        if (refusal := self.conductor.check_admission(prompt, choice, now, room_s)) is not None:
            if self.decision_log:
                self.decision_log.log_refused(
                    _asked(sequences[0]), refusal, self.conductor.rank_candidates(prompt, now)
                )
            raise OverloadedError(refusal)

    def _estimate(self, prompt: PromptInfo) -> int:
        """How many wait that come before ``prompt``."""
        return sum(waiting.priority <= prompt.priority for waiting in self._reservations)

    def reserve(self, sequence: Sequence) -> int:
        """Book a sequence whose prompt is to be computed, unless it is booked; its worker."""
        if sequence not in self._reservations:
            self._leave(sequence)
            prompt, now, first = self._known_prompt(sequence), self._clock(), self._first.get(sequence.request_id)
            shares = first is not None and (shared := self.shared_tokens_of(sequence)) > prompt.num_cached_tokens
            if first is not None and shares:
                choice = self._behind(first, prompt._replace(num_cached_tokens=shared), now)
            else:
                choice = self.conductor.choose(prompt, now)
                self._first.setdefault(sequence.request_id, sequence)
            prices = self.conductor.rank_candidates(prompt, now) if self.decision_log else ()
            self.conductor.reserve(sequence, prompt, choice, now)
            self._reservations[sequence] = _Reservation(choice, now, choice.ttft_s, shares, prices)
        return self._reservations[sequence].choice.worker

    def _behind(self, first: Sequence, prompt: PromptInfo, now: float) -> RoutingDecision:
        """For a completion that goes on behind what ``first`` computes: its own rows are those of a step of others, and
        where prefill workers are none of these has them.
        """
        at = self.conductor.choose(prompt, now, {self._reservations[first].choice.worker})
        own_s = 0.0 if self._on_prefill_workers else at.prefill_s - self.conductor.prefill_latency.model.a
        ttft_s, reason = start_delay_s(at.queue_s, at.transfer_s, 0.0) + own_s, "shared with another completion"
        return at._replace(prefill_s=own_s, fill_s=0.0, ttft_s=ttft_s, reason=reason)

    def on_placed(self, sequence: Sequence, seat: DecodePlacement, *, by_prefill_worker: bool) -> None:
        """It is chosen where a sequence decodes; ``by_prefill_worker``: its worker computes the prompt, else compute
        workers do."""
        if self.decision_log is None:
            return
        booked, cached = self._reservations.get(sequence), sequence.num_cached_tokens
        prices = booked.candidates if booked else ()
        if not booked and self._on_prefill_workers:
            prices = self.conductor.rank_candidates(self._known_prompt(sequence), self._clock())
        choice = booked.choice if booked and (by_prefill_worker or not self._on_prefill_workers) else None
        if choice is not None and by_prefill_worker:
            by, why = self.decision_log.worker_name(choice.worker), choice.reason
        elif self._on_prefill_workers:
            by, why = INLINE, "a short rest, where its beginning lies" if cached else "a row alone"
        else:
            by, why = INLINE, "no prefill workers"
        self.decision_log.log_routed(_asked(sequence), cached, by, why, choice, prices, seat)

    def has_reservation(self, sequence: Sequence) -> bool:
        """Whether a worker is to compute its prompt, for it alone or for others too."""
        return sequence in self._reservations and not self._reservations[sequence].uses_other_prompt

    def on_prefill_started(self, sequence: Sequence) -> float:
        """The worker of a booked sequence computes its prompt from now on, which is returned."""
        now = self._clock()
        self.conductor.on_prefill_started(sequence, now)
        return now

    def prefix_source(self, sequence: Sequence) -> int:
        """The prefill worker from which that of a booked sequence is to have its beginning; NOBODY: from none."""
        return self._reservations[sequence].choice.source

    def on_prefix_fetched(self, sequence: Sequence, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """The worker of a booked sequence has so many tokens from another one, and waited so long for them, since it
        was done with another prompt, ``ahead_s`` behind asking for them.
        """
        self._fetched[sequence] = seconds
        self.conductor.record_transfer(tokens, seconds, ahead_s)

    def now_s(self) -> float:
        """Seconds, by the clock that it keeps to."""
        return self._clock()

    def on_prefill_done(self, sequence: Sequence, since_s: float, part: float = 1.0) -> None:
        """The prompt of a booked sequence is computed, and it decodes. Its worker was at it since then, or at several,
        of which it is such a part.
        """
        booked, now, counts = self._reservations.pop(sequence), self._clock(), self._counts
        self._release_waiters(sequence)
        seconds = part * (now - since_s) - self._fetched.pop(sequence, 0.0)
        self.conductor.on_prefill_done(sequence, now, seconds, sequence.num_cached_tokens)
        if not booked.uses_other_prompt:
            counts.prompts, counts.predicted_ttft_s = counts.prompts + 1, counts.predicted_ttft_s + booked.ttft_s
            counts.actual_ttft_s += now - booked.at_s
        if not sequence.finished:
            self._join(sequence)

    def stage_seconds(self, sequence: Sequence) -> float:
        """Of the time of a prompt that no other was before: what each stage of its worker was at it."""
        return self.conductor.staged.stage_share(sequence.num_tokens_with_placeholders, sequence.num_cached_tokens)

    def on_decode_without_prefill(self, sequence: Sequence) -> None:
        """A sequence decodes whose prompt is for no prefill worker."""
        self._release_waiters(sequence)  # sequences that go on behind it still share
        self.remove(sequence)
        self._join(sequence)

    def keeps_slo(self, rows: int) -> bool:
        """Whether sequences that decode keep their promised time with ``rows`` more rows in a step."""
        pool = self.conductor.decode_load_model
        return (
            pool.latency.seconds(pool.num_running + rows, pool.mean_tokens * pool.num_running)
            <= self.conductor.config.limits.tbt_s
        )

    def check_decode_admission(self, sequence: Sequence) -> Refusal | None:
        """At the first token of a sequence: why it is not decoded; None where it is."""
        booked = self._reservations.get(sequence)
        if not self.has_limits or booked is None or sequence.finished:
            return None
        refusal = self.conductor.check_decode_admission(
            sequence.num_tokens_with_placeholders, self._clock() - booked.at_s
        )
        if refusal is not None:
            self._counts.rejected_after_prefill_tokens += len(sequence.prompt)
            if self.decision_log:
                self.decision_log.log_refused_late(_asked(sequence)._replace(tokens=len(sequence.prompt)), refusal)
        return refusal

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or whose KV is given up. What waits behind it is booked anew."""
        self._inline.pop(sequence, None)
        self._fetched.pop(sequence, None)
        if self._reservations.pop(sequence, None) is not None:
            self.conductor.on_cancelled(sequence, self._clock())
            if self._release_waiters(sequence):
                waiters = [
                    s
                    for s, b in self._reservations.items()
                    if b.uses_other_prompt and s.request_id == sequence.request_id
                ]
                self._reserve_again([s for s in waiters if s.prefill_worker is None and s not in self._inline])
        self._leave(sequence)

    def _release_waiters(self, sequence: Sequence) -> bool:
        """It computes nothing for others any more; whether it did."""
        does = self._first.get(sequence.request_id) is sequence
        if does:
            del self._first[sequence.request_id]
        return does

    def _reserve_again(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._reservations.pop(sequence)
            self.conductor.on_cancelled(sequence, self._clock())
        for sequence in sequences:
            if not sequence.finished:
                self.reserve(sequence)

    def reset_prefill(self) -> None:
        """No prompt is being computed any more: all that are not computed are booked anew."""
        booked = list(self._reservations)
        self.conductor.reset()
        self._reservations.clear()
        self._first.clear()
        self._fetched.clear()
        self._inline.clear()
        for sequence in booked:
            self.reserve(sequence)

    def on_round_done(self, rows: int, stored: float, seconds: float) -> None:
        """A round of rows that all decode took so long, from its predecessor's end. Without limits nobody asks."""
        if not self.has_limits:
            return
        self._steps.observe(rows, stored, seconds)
        self.conductor.decode_load_model.latency = self._steps.model

    def counts(self) -> SloCounts | None:
        """None where nothing is promised."""
        if not self.has_limits:
            return None
        now, one = self._clock(), self.conductor
        return replace(self._counts, prefill_load=one.prefill_load(now), decode_load=one.decode_load())

    @property
    def num_page_replicas(self) -> int | None:
        """Pages of prompts that prefill workers have beside the first one of each; None where they keep nothing."""
        return self.prefix_index.num_replicas(PREFILL) if self.keeps_prompts else None

    def _known_prompt(self, sequence: Sequence) -> PromptInfo:
        tokens, priority = sequence.num_tokens_with_placeholders, sequence.priority
        if not self._on_prefill_workers:
            return PromptInfo(tokens, num_cached_tokens=self.cached_tokens_of(sequence), priority=priority)
        if not self.keeps_prompts:
            return PromptInfo(tokens, priority=priority)
        keys = self.keys.whole(sequence, len(sequence.prompt))
        return PromptInfo(tokens, keys, self.keys.page_size, priority=priority)

    def _join(self, sequence: Sequence) -> None:
        if self.has_limits:
            instance, _ = self.conductor.decode_load_model.select(sequence.num_tokens_with_placeholders)
            self.conductor.decode_load_model.join(
                sequence, instance, sequence.num_tokens_with_placeholders, self._clock()
            )
            self._decoding.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._decoding:
            self._decoding.discard(sequence)
            ended = sequence.output.finish_reason in ("stop", "length")
            self.conductor.decode_load_model.leave(sequence, self._clock(), sequence.num_output_tokens if ended else 0)

    # Where compute workers do it, several at once:
    def on_inline_prefill_started(self, sequence: Sequence) -> None:
        """The first rows of a sequence are on their way to the compute workers."""
        if not self._on_prefill_workers and sequence in self._reservations and sequence not in self._inline:
            self._inline[sequence] = self._clock()
            if len(self._inline) == 1:
                self.on_prefill_started(sequence)

    def on_inline_sampled(self, sequences: Iterable[Sequence]) -> None:
        """Compute workers have drawn a token for each of these. Prompts that a step has ended share its time by their
        tokens.
        """
        done = (
            [s for s in sequences if s in self._reservations]
            if self._reservations and not self._on_prefill_workers
            else []
        )
        if not done:
            return
        computed, now = sum(s.num_tokens_with_placeholders - s.num_cached_tokens for s in done), self._clock()
        since_s = max(self._since_s, min(self._inline.pop(s, now) for s in done))
        for sequence in done:
            self.on_prefill_done(
                sequence,
                since_s,
                (sequence.num_tokens_with_placeholders - sequence.num_cached_tokens) / max(1, computed),
            )
        self._since_s = now
        if self._inline:
            self.on_prefill_started(next(iter(self._inline)))


def _asked(sequence: Sequence) -> LoggedPrompt:
    return LoggedPrompt(sequence.request_id, sequence.output.index, sequence.num_tokens_with_placeholders)
