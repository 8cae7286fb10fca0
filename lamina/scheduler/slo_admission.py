"""SLO admission: predicts the TTFT of each prompt, and refuses prompts whose TTFT or TBT would exceed the limits.

Pure policy: no torch, no I/O; the clock is a parameter. The Conductor reserves a worker for a prompt when it arrives,
so later prompts see it in the queue. Without prefill workers, the compute workers are the Conductor's only worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lamina.protocol.control import ComputeReady
from lamina.request import Refusal

from .conductor import Conductor, ConductorConfig, PromptInfo, StoredLatency
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


@dataclass(frozen=True)
class KnownKv:
    """The KV with which prompts can begin, as the driver knows it.

    ``prefix_index``, ``keys``: the pages of prompts that prefill workers keep. ``cached_tokens_of``: the first tokens
    of a sequence that are cached, or will be. ``shared_tokens_of``: tokens that the completions of a request compute
    once. ``stored_tokens_of``: the first tokens that memory workers can give a prefill worker, and how many of them are
    loaded first.
    """

    prefix_index: PrefixIndex = field(default_factory=PrefixIndex)
    keys: PageKeys = field(default_factory=lambda: PageKeys(0))
    cached_tokens_of: Callable[[Sequence], int] = lambda sequence: 0
    shared_tokens_of: Callable[[Sequence], int] = lambda sequence: 0
    stored_tokens_of: Callable[[Sequence], tuple[int, int]] = lambda sequence: (0, 0)


class KvTransferLatency(NamedTuple):
    """The time to bring KV to a prefill worker. ``peers``: from another one; None: they send none. ``stored``: what
    memory workers have stored; None: prefill workers get none of it.
    """

    peers: TransferLatencyEstimator | None = None
    stored: StoredLatency | None = None


NO_TRANSFERS = KvTransferLatency()


class _Reservation(NamedTuple):
    choice: RoutingDecision
    at_s: float
    ttft_s: float  # as predicted
    uses_other_prompt: bool = False  # another completion of the request computes its prompt
    candidates: Several[RoutingDecision] = ()  # all that were compared, if decisions are logged


@dataclass
class SloCounts:
    """Counts predictions and rejections since the start; the loads are current, as shares of their limits.

    ``predicted_ttft_s``, ``actual_ttft_s``: sums, from the arrival of a prompt to its first token.
    ``rejected_after_prefill_tokens``: tokens of prompts that were computed and then rejected.
    """

    prompts: int = 0
    predicted_ttft_s: float = 0.0
    actual_ttft_s: float = 0.0
    rejected_after_prefill_tokens: int = 0
    prefill_load: float = 0.0
    decode_load: float = 0.0


class SloAdmission:
    """The SLO admission of one engine. ``clock`` returns seconds; the default stands still."""

    def __init__(
        self,
        num_workers: int = 0,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = float,
        staged: PrefillPipelineShape = SINGLE_STAGE,
        *,
        known: KnownKv | None = None,
        transfers: KvTransferLatency = NO_TRANSFERS,
        decision_log: DecisionLog | None = None,
    ) -> None:
        """``num_workers``: prefill workers, or pipelines of them (``staged``); 0: compute workers run prompts.
        ``known``: None: no KV. ``transfers``: the first predictions. ``decision_log`` gets each decision, unless None.
        """
        self.known = known or KnownKv()
        self.has_limits, self.decision_log = False, decision_log
        self.keeps_prompts = False  # prefill workers keep K and V of prompts
        self.conductor = Conductor(
            config=ConductorConfig(policy="auto"),
            prefix_index=self.known.prefix_index,
            prefill_latency=PrefillLatencyEstimator(INITIAL_PREFILL_LATENCY, trusted=False),
            transfer_latency=transfers.peers,
            decode_load_model=DecodeLoadModel(1, StepLatency(0.0, 0.0, 0.0), 0.0, weight=0),
            num_workers=max(1, num_workers),
            staged=staged,
            stored_latency=transfers.stored,
        )
        self._clock, self._max_num_seqs, self._on_prefill_workers = clock, max_num_seqs, num_workers > 0
        self._steps = StepLatencyEstimator()
        self._reservations = dict[Sequence, _Reservation]()
        self._first = dict[int, Sequence]()  # by request: the completion that computes the prompt for all of them
        self._fetched = dict[Sequence, float]()  # seconds that a prompt waited for pages of another prefill worker
        self._decoding = set[Sequence]()
        self._inline = dict[Sequence, float]()  # prompts that compute workers run, and when each began
        self._since_s = 0.0  # when the last of these ended
        self._counts = SloCounts()

    def set_config(self, rules: ConductorConfig) -> None:
        """Replace the configuration before the first request. Forgets what profiling's prompts have taught."""
        untaught = PrefillLatencyEstimator(INITIAL_PREFILL_LATENCY, trusted=False)
        self.conductor = replace(self.conductor, config=rules, prefill_latency=untaught)
        self.has_limits = rules.limits != NO_LIMITS

    @contextmanager
    def without_log(self) -> Iterator[None]:
        """Log no decision within the block, such as those on profiling's prompts."""
        decision_log, self.decision_log = self.decision_log, None
        try:
            yield
        finally:
            self.decision_log = decision_log

    @property
    def routes_prompts(self) -> bool:
        """True if prompts need a reservation: there are prefill workers to choose from, or limits to keep."""
        return self._on_prefill_workers or self.has_limits

    def check_admission(self, sequences: Several[Sequence], places: Callable[[int], float]) -> Refusal | None:
        """The reason why a new request with these completions is rejected; None if it keeps its limits.

        ``places(tokens)``: how many completions of that length fit the KV cache at once.
        """
        if not self.has_limits:
            return None
        prompt, now, decoding = self._known_prompt(sequences[0]), self._clock(), self.conductor.decode_load_model
        mean = int(max(decoding.mean_tokens, len(sequences[0].tokens) + decoding.mean_answer_tokens))
        most = min(self._max_num_seqs, places(max(1, mean - prompt.num_cached_tokens)))
        ahead = self._num_prompts_before(prompt) + len(self._decoding)
        choice, room_s = self.conductor.choose(prompt, now), decoding.time_until_slot_s(most, ahead) if ahead else 0.0
        refusal = self.conductor.check_admission(prompt, choice, now, room_s)
        if refusal is not None and self.decision_log:
            self.decision_log.log_refused(_asked(sequences[0]), refusal, self.conductor.rank_candidates(prompt, now))
        return refusal

    def _num_prompts_before(self, prompt: PromptInfo) -> int:
        """The number of reserved prompts that run before ``prompt``."""
        return sum(waiting.priority <= prompt.priority for waiting in self._reservations)

    def reserve(self, sequence: Sequence) -> int:
        """Reserve a worker for the sequence's prompt, unless it has one. Returns the worker."""
        if sequence not in self._reservations:
            self._leave(sequence)
            prompt, now, first = self._known_prompt(sequence), self._clock(), self._first.get(sequence.request_id)
            shares = first is not None and (shared := self.known.shared_tokens_of(sequence)) > prompt.num_cached_tokens
            if first is not None and shares:
                choice = self._after(first, prompt._replace(num_cached_tokens=shared), now)
            else:
                choice = self.conductor.choose(prompt, now)
                self._first.setdefault(sequence.request_id, sequence)
            prices = self.conductor.rank_candidates(prompt, now) if self.decision_log else ()
            self.conductor.reserve(sequence, prompt, choice, now)
            self._reservations[sequence] = _Reservation(choice, now, choice.ttft_s, shares, prices)
        return self._reservations[sequence].choice.worker

    def _after(self, first: Sequence, prompt: PromptInfo, now: float) -> RoutingDecision:
        """The decision for a completion that continues after the prompt that ``first`` computes.

        Its own last rows run within a decoding step, so no prefill worker spends time on them.
        """
        at = self.conductor.choose(prompt, now, {self._reservations[first].choice.worker})
        own_s = 0.0 if self._on_prefill_workers else at.prefill_s - self.conductor.prefill_latency.model.a
        ttft_s, reason = start_delay_s(at.queue_s, at.transfer_s, 0.0) + own_s, "shared with another completion"
        return at._replace(prefill_s=own_s, fill_s=0.0, ttft_s=ttft_s, reason=reason)

    def on_placed(self, sequence: Sequence, seat: DecodePlacement, *, by_prefill_worker: bool) -> None:
        """Log where a sequence decodes. ``by_prefill_worker``: one runs its prompt, else compute workers do."""
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
        """True if a worker is reserved to compute the prompt of this sequence itself."""
        return sequence in self._reservations and not self._reservations[sequence].uses_other_prompt

    def on_prefill_started(self, sequence: Sequence) -> float:
        """Record that the reserved worker starts the prompt now. Returns the time."""
        now = self._clock()
        self.conductor.on_prefill_started(sequence, now)
        return now

    def prefix_source(self, sequence: Sequence) -> int:
        """The prefill worker that sends the beginning of a sequence's prompt to the reserved one; NO_WORKER: none."""
        return self._reservations[sequence].choice.source

    def on_prefix_fetched(
        self, sequence: Sequence, tokens: int, seconds: float, ahead_s: float = 0.0, loading_s: float | None = None
    ) -> None:
        """Record that the reserved worker has received ``tokens`` from another one, and waited ``seconds`` for them.

        ``ahead_s``: seconds from the request for them to the end of the worker's previous prompt. ``loading_s``: how
        many of ``seconds`` memory workers still loaded them; None: another prefill worker has sent them.
        """
        self._fetched[sequence] = seconds
        if loading_s is None:
            self.conductor.record_transfer(tokens, seconds, ahead_s)
        elif self.conductor.stored_latency:  # while they were loaded, it may have waited for that alone
            self.conductor.stored_latency.fetch.observe(tokens, seconds - loading_s, ahead_s + loading_s)

    def on_stored_loaded(self, tokens: int, seconds: float) -> None:
        """Record that memory workers have loaded ``tokens`` for a prefill worker in ``seconds``."""
        if self.conductor.stored_latency:
            self.conductor.stored_latency.load.observe(tokens, seconds)

    def stored_start_s(self, stored: int, tokens: int) -> float:
        """Return the seconds in which a prefill worker fetches ``stored`` tokens and computes the next ``tokens``."""
        fetch = self.conductor.stored_latency.fetch.seconds(stored) if self.conductor.stored_latency else 0.0
        return fetch + self.conductor.prefill_latency.model.seconds(stored + tokens, stored)

    def stored_pays(self, sequence: Sequence, otherwise: int, stored: int, loaded: int, fetched: int) -> bool:
        """Return whether a prompt is computed earlier after ``stored`` tokens; see Conductor."""
        return self.conductor.stored_pays(sequence.num_tokens_with_placeholders, otherwise, stored, loaded, fetched)

    def now_s(self) -> float:
        """The time of the clock, in seconds."""
        return self._clock()

    def on_prefill_done(self, sequence: Sequence, since_s: float, part: float = 1.0) -> None:
        """Record that the prompt is computed and the sequence decodes. Its worker began at ``since_s``.

        ``part``: the prompt's share of the work since then, if several ran together.
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

    def stage_share(self, sequence: Sequence) -> float:
        """The share of a prompt's time that each pipeline stage of its worker computes, if no prompt is before it."""
        return self.conductor.staged.stage_share(sequence.num_tokens_with_placeholders, sequence.num_cached_tokens)

    def on_decode_without_prefill(self, sequence: Sequence) -> None:
        """Record that a sequence decodes whose prompt no prefill worker has computed."""
        self._release_waiters(sequence)  # completions that continue after its prompt still share it
        self.remove(sequence)
        self._join(sequence)

    def keeps_slo(self, rows: int) -> bool:
        """True if a step with ``rows`` more rows is still within the TBT limit."""
        pool = self.conductor.decode_load_model
        return (
            pool.latency.seconds(pool.num_running + rows, pool.mean_tokens * pool.num_running)
            <= self.conductor.config.limits.tbt_s
        )

    def check_decode_admission(self, sequence: Sequence) -> Refusal | None:
        """The reason why a sequence is rejected after its first token; None if it decodes."""
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
        """Forget a sequence that has ended or lost its KV. Completions that wait for its prompt are reserved anew."""
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
                self._reserve_again([s for s in waiters if not s.transfer.on_side_worker and s not in self._inline])
        self._leave(sequence)

    def _release_waiters(self, sequence: Sequence) -> bool:
        """Stop computing the prompt for other completions. Returns False if the sequence did not."""
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

    def begin_epoch(self, info: ComputeReady) -> None:
        """Log later decisions by what the workers of a new epoch reported."""
        if self.decision_log:
            self.decision_log.info = info

    def reset_prefill(self) -> None:
        """Reserve all prompts anew, since no worker computes one any more."""
        booked = list(self._reservations)
        self.conductor.reset()
        self._reservations.clear()
        self._first.clear()
        self._fetched.clear()
        self._inline.clear()
        for sequence in booked:
            self.reserve(sequence)

    def rename_pages(self) -> None:
        """Name the pages of reserved prompts by their new keys, since a new era has begun."""
        self.conductor.rename_pages({s: [] if s.do_not_cache else self._keys_of(s) for s in self._reservations})

    def on_round_done(self, rows: int, stored: float, seconds: float) -> None:
        """Record the time of a round that only decodes, from the end of the previous round. Needs limits."""
        if not self.has_limits:
            return
        self._steps.observe(rows, stored, seconds)
        self.conductor.decode_load_model.latency = self._steps.model

    def counts(self) -> SloCounts | None:
        """The counts; None without limits."""
        if not self.has_limits:
            return None
        now, one = self._clock(), self.conductor
        return replace(self._counts, prefill_load=one.prefill_load(now), decode_load=one.decode_load())

    @property
    def num_page_replicas(self) -> int | None:
        """Second and further copies of pages on prefill workers; None if they keep no pages."""
        return self.known.prefix_index.num_replicas(PREFILL) if self.keeps_prompts else None

    def _known_prompt(self, sequence: Sequence) -> PromptInfo:
        tokens, priority, known = sequence.num_tokens_with_placeholders, sequence.priority, self.known
        if not self._on_prefill_workers:
            return PromptInfo(tokens, num_cached_tokens=known.cached_tokens_of(sequence), priority=priority)
        stored, loaded = known.stored_tokens_of(sequence) if self.conductor.stored_latency else (0, 0)
        keys, page = self._keys_of(sequence), known.keys.page_size if self.keeps_prompts else 1
        return PromptInfo(tokens, keys, page, priority=priority, num_stored_tokens=stored, num_loaded_tokens=loaded)

    def _keys_of(self, sequence: Sequence) -> Several[bytes]:
        """The keys of the pages that prefill workers keep of a prompt."""
        if not self.keeps_prompts or sequence.turn.discarded_ranges:
            return ()
        return self.known.keys.whole(sequence, min(len(sequence.prompt), sequence.num_prefill_tokens))

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

    # Prompts on compute workers, several at once:
    def on_inline_prefill_started(self, sequence: Sequence) -> None:
        """Record that the first rows of a prompt are planned for the compute workers."""
        if not self._on_prefill_workers and sequence in self._reservations and sequence not in self._inline:
            self._inline[sequence] = self._clock()
            if len(self._inline) == 1:
                self.on_prefill_started(sequence)

    def on_inline_sampled(self, sequences: Iterable[Sequence]) -> None:
        """Record that compute workers have sampled a token for each sequence.

        Prompts that end in the same step share its time in proportion to their tokens.
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
