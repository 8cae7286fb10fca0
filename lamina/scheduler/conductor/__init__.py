"""The Conductor chooses the worker of each prompt, rejects prompts, and places decoding (Mooncake, sections 5 and 6).

The running engine and the simulator use it. Pure policy: no torch, no I/O, no clock. docs/prefill.md explains it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lamina.request import Refusal
from lamina.scheduler.prefix_index import PREFILL, Place, PrefixIndex

from .latency_model import SINGLE_STAGE, PrefillLatencyEstimator, PrefillPipelineShape, TransferLatencyEstimator
from .overload import NO_LIMITS, DecodeLoadModel, SloLimits, check_overload_policy
from .queues import PrefillQueue, QueuedPrompt
from .routing import POLICIES, RoutingDecision, RoutingQuery, WorkerMatch, candidates


@dataclass(frozen=True, kw_only=True)
class ConductorConfig:
    """Values by the names of the options. Raises ValueError.

    ``policy``: a key of POLICIES. ``threshold``: ``--prefill-policy mooncake:threshold=``.
    ``check_before_decode``: early and predictive check the decoding load again once a prompt is computed. Without it,
    every admitted prompt decodes, as in section 6.3.
    """

    policy: str = "auto"
    threshold: float = 1.5
    overload: str = "early"
    limits: SloLimits = NO_LIMITS
    check_before_decode: bool = True

    def __post_init__(self) -> None:
        check_overload_policy(self.overload)
        if not 1.0 <= self.threshold < math.inf:
            raise ValueError(
                f"--prefill-policy mooncake:threshold= must be at least 1, not {self.threshold:g}: a transfer must "
                "bring more than a worker has itself"
            )


class PromptInfo(NamedTuple):
    """A prompt as the Conductor sees it.

    ``keys``: those of its first pages, of ``page`` tokens each. An engine names whole pages; a trace may add a last,
    partial one. The last token is never matched, since its logits are needed. ``num_cached_tokens``: first tokens that
    every worker has. ``priority``: lower numbers run first, but interrupt no prompt.

    ``num_stored_tokens``: first tokens that memory workers can give each worker. They load ``num_loaded_tokens`` first.
    """

    tokens: int
    keys: Sequence[bytes] = ()
    page: int = 1
    num_cached_tokens: int = 0
    priority: int = 0
    num_stored_tokens: int = 0
    num_loaded_tokens: int = 0

    def tokens_of_pages(self, pages: int) -> int:
        """The number of tokens in the first ``pages`` pages."""
        return min(pages * self.page, self.tokens - 1)


@dataclass
class StoredLatency:
    """The time until a prefill worker has stored KV: to ``load`` it into the pool, and to ``fetch`` it from there."""

    load: TransferLatencyEstimator
    fetch: TransferLatencyEstimator

    def seconds(self, loaded: int, fetched: int) -> float:
        """The predicted seconds of loading and fetching so many tokens: layers are fetched while others are loaded."""
        return max(self.load.seconds(loaded) if loaded else 0.0, self.fetch.seconds(fetched) if fetched else 0.0)


@dataclass
class Conductor:
    """The queues, loads and predictions of all workers. Times are seconds of one clock, which the caller reads.

    ``transfer_latency``: the time to send pages from one prefill worker to another; None: they send none.
    """

    config: ConductorConfig
    prefix_index: PrefixIndex
    prefill_latency: PrefillLatencyEstimator
    transfer_latency: TransferLatencyEstimator | None
    decode_load_model: DecodeLoadModel
    num_workers: int
    seed: int = 0
    staged: PrefillPipelineShape = SINGLE_STAGE  # of each worker
    stored_latency: StoredLatency | None = None  # of what memory workers have; None: no prefill worker gets it
    places: list[Place] = field(init=False)  # of the workers in the index
    queues: list[PrefillQueue] = field(init=False)
    _sends_until: list[float] = field(init=False)
    _reservations: dict[Hashable, tuple[RoutingDecision, PromptInfo]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._policy, self._random = POLICIES[self.config.policy], random.Random(self.seed)
        self.places = [self.prefix_index.place(PREFILL, worker) for worker in range(self.num_workers)]
        self.queues = [PrefillQueue() for _ in range(self.num_workers)]
        self._sends_until = [0.0] * self.num_workers

    def choose(self, prompt: PromptInfo, now_s: float, among: Collection[int] | None = None) -> RoutingDecision:
        """The worker that should compute ``prompt``, of all or of ``among``. Only advances the random numbers."""
        return self._policy(self._routing_query(prompt, now_s, among))

    def rank_candidates(self, prompt: PromptInfo, now_s: float) -> list[RoutingDecision]:
        """All candidates for ``prompt``, the lowest predicted TTFT first, whatever the policy."""
        return sorted(candidates(self._routing_query(prompt, now_s, None)), key=lambda choice: choice.ttft_s)

    def _routing_query(self, prompt: PromptInfo, now_s: float, among: Collection[int] | None) -> RoutingQuery:
        held = self.prefix_index.match(self.places, prompt.keys)
        ready = self.prefix_index.match(self.places, prompt.keys if self.transfer_latency else (), ready=True)
        lengths, everywhere = {n: prompt.tokens_of_pages(n) for n in {*held, *ready}}, prompt.num_cached_tokens
        workers = [
            WorkerMatch(
                w,
                line.queue_s(now_s, prompt.priority),
                max(everywhere, lengths[held[w]]) if everywhere else lengths[held[w]],
                lengths[ready[w]],
                len(line.prompts),
            )
            for w, line in enumerate(self.queues)
            if among is None or w in among
        ]
        return RoutingQuery(
            prompt.tokens,
            workers,
            self.prefill_latency.model.seconds,
            lambda source, worker, tokens: self._transfer_s(source, tokens, now_s),
            self.config.threshold,
            self._random.random,
            lambda worker: self.prefix_index.num_pages(self.places[worker]),
            self.staged.fill_s if self.staged.stages > 1 else None,
            prompt.num_stored_tokens if self.stored_latency else 0,
            lambda fetched: self._stored_s(prompt.num_loaded_tokens, fetched),
        )

    def _stored_s(self, loaded: int, fetched: int) -> float:
        return self.stored_latency.seconds(loaded, fetched) if self.stored_latency else 0.0

    def stored_pays(self, tokens: int, otherwise: int, stored: int, loaded: int, fetched: int) -> bool:
        """Return whether a prompt is computed earlier after ``stored`` tokens than after ``otherwise`` ones.

        First ``loaded`` of them come into the pool, and ``fetched`` of them to the prefill worker. The constant part of
        the prefill latency counts in proportion: prompts of one length do not tell it from the part of each token.
        """
        if self.stored_latency is None or stored <= otherwise:
            return False
        seconds = self.prefill_latency.model.seconds
        whole_s = seconds(tokens, otherwise)
        computed_s = max(whole_s - seconds(tokens, stored), whole_s * (stored - otherwise) / (tokens - otherwise))
        pays = self._stored_s(loaded, fetched) < computed_s
        if not pays and computed_s > 0:
            self.stored_latency.load.on_not_taken()
            self.stored_latency.fetch.on_not_taken()
        return pays

    def check_admission(
        self, prompt: PromptInfo, choice: RoutingDecision, now_s: float, room_s: float = 0.0
    ) -> Refusal | None:
        """A refusal when a prompt arrives and the load of a pool is above 1 (section 6.2), else None.

        ``room_s``: seconds until its KV and one more completion have room. A prompt that waits for no other one is
        always admitted, so a wrong prediction cannot refuse for ever.
        """
        limits, waits_s, tbt_s = self.config.limits, max(0.0, room_s - choice.queue_s), 0.0
        ttft_s = choice.ttft_s + waits_s
        if limits.tbt_s < math.inf:
            tbt_s = self.tbt_s(prompt, now_s, now_s + ttft_s)
        if ttft_s > limits.ttft_s and choice.queue_s + waits_s > 0:
            return Refusal("ttft", ttft_s, tbt_s, max(1.0, ttft_s - limits.ttft_s))
        if tbt_s > limits.tbt_s and (self.decode_load_model.num_running or self._reservations):
            return Refusal("tbt", ttft_s, tbt_s, self._time_until_slo_s(now_s, tbt_s))
        return None

    def reserve(self, request: Hashable, prompt: PromptInfo, choice: RoutingDecision, now_s: float) -> None:
        """Reserve ``choice`` for the request. Pages are copied, so hot pages soon have many replicas (section 5.2)."""
        line = self.queues[choice.worker]
        if choice.source >= 0:
            self._sends_until[choice.source] = now_s + choice.transfer_s
        if choice.transfer_would_pay and self.transfer_latency:
            self.transfer_latency.on_not_taken()
        ready_s = now_s + choice.transfer_s + choice.fill_s
        line.add(QueuedPrompt(request, prompt.tokens, choice.prefill_s, ready_s, prompt.priority), now_s)
        self._reservations[request] = choice, prompt
        self.prefix_index.promise(self.places[choice.worker], prompt.keys)

    def on_pages_received(self, request: Hashable) -> None:
        """Record that the transferred pages of ``request`` have arrived."""
        choice, prompt = self._reservations[request]
        moved = [k for n, k in enumerate(prompt.keys, 1) if prompt.tokens_of_pages(n) <= choice.prefix]
        self.prefix_index.confirm(self.places[choice.worker], moved)

    def rename_pages(self, keys: Mapping[Hashable, Sequence[bytes]]) -> None:
        """Drop all pages, and promise those of reserved requests under their new ``keys``."""
        self.prefix_index.clear(sum(self.places))
        for request, new in keys.items():
            choice, prompt = self._reservations[request]
            self._reservations[request] = choice, prompt._replace(keys=new)
            self.prefix_index.promise(self.places[choice.worker], new)

    def record_transfer(self, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """Learn from a transfer of ``tokens``, for which a worker waited ``seconds``.

        ``ahead_s``: seconds of the transfer that the worker's previous prompt hid.
        """
        if self.transfer_latency:
            self.transfer_latency.observe(tokens, seconds, ahead_s)

    def on_prefill_started(self, request: Hashable, now_s: float) -> None:
        """Record that the request's worker starts its prompt."""
        self.queues[self._reservations[request][0].worker].on_started(request, now_s)

    def on_prefill_done(self, request: Hashable, now_s: float, seconds: float, prefix: int) -> None:
        """Record that the prompt is computed, in ``seconds`` of work. Its first ``prefix`` tokens were cached."""
        choice, prompt = self._reservations.pop(request)
        self.queues[choice.worker].remove(request, now_s)
        self.prefill_latency.observe(prompt.tokens, prefix, seconds)
        self.prefix_index.confirm(self.places[choice.worker], prompt.keys)

    def on_cancelled(self, request: Hashable, now_s: float) -> None:
        """Cancel the reservation of a request."""
        choice, prompt = self._reservations.pop(request)
        self.queues[choice.worker].remove(request, now_s)
        self.prefix_index.drop(self.places[choice.worker], prompt.keys, ready=False)

    def reset(self) -> None:
        """Drop all reservations and pages. Learned latencies stay."""
        self.prefix_index.clear(sum(self.places))
        self.queues = [PrefillQueue() for _ in range(self.num_workers)]
        self._sends_until = [0.0] * self.num_workers
        self._reservations.clear()

    def check_decode_admission(self, tokens: int, ttft_s: float) -> Refusal | None:
        """A refusal once the prompt is computed, if no instance can decode within the TBT limit (section 3, step 4)."""
        if not self.config.check_before_decode and self.config.overload != "baseline":
            return None
        _, tbt_s = self.decode_load_model.select(tokens)
        if tbt_s <= self.config.limits.tbt_s or not self.decode_load_model.num_running:
            return None
        return Refusal("tbt", ttft_s, tbt_s, 1.0)

    @property
    def num_waiting(self) -> int:
        """The number of prompts that are not computed yet."""
        return len(self._reservations)

    def prefill_load(self, now_s: float) -> float:
        """The longest queue, as a share of the TTFT limit (section 6.1)."""
        return max(line.queue_s(now_s) for line in self.queues) / self.config.limits.ttft_s

    def decode_load(self) -> float:
        """The time of a decoding step, as a share of the TBT limit."""
        return self.decode_load_model.tbt_s() / self.config.limits.tbt_s

    def tbt_s(self, prompt: PromptInfo, now_s: float, done_s: float) -> float:
        """The predicted TBT, in seconds, when ``prompt`` starts to decode at ``done_s``, by ``--slo overload=``."""
        if self.config.overload == "baseline":
            return 0.0
        if self.config.overload == "early":
            return self.decode_load_model.select(prompt.tokens)[1]
        joining = chain(*(line.completions() for line in self.queues), [(done_s, prompt.tokens)])
        return self.decode_load_model.tbt_at(done_s, now_s, joining)

    def _transfer_s(self, source: int, tokens: int, now_s: float) -> float:
        """Seconds until ``tokens`` have come from ``source``, after what it has to send first."""
        own_s = self.transfer_latency.seconds(tokens) if self.transfer_latency else 0.0
        return max(0.0, self._sends_until[source] - now_s) + own_s

    def _time_until_slo_s(self, now_s: float, tbt_s: float) -> float:
        """Seconds until enough completions have ended, if they end evenly."""
        above = 1.0 - self.config.limits.tbt_s / tbt_s
        return max(1.0, above * self.decode_load_model.decode_s)
