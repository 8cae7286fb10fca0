"""The Conductor: where a prompt is computed, whether it is taken at all, and where it decodes (Mooncake, sections 5 and
6). The running engine and the simulator ask this one. Pure policy: no torch, no I/O, no clock; docs/prefill.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lamina.request import Refusal

from .choice import NOBODY, POLICIES, PromptChoice, Question, WorkerMatch, ways
from .directory import Directory
from .estimate import ONE_STAGE, PrefillFit, StagedPrefill, TransferFit
from .lines import BookedPrompt, PromptLine
from .others import OTHERS
from .overload import NO_LIMITS, DecodePool, Limits, overload_of


@dataclass(frozen=True, kw_only=True)
class ConductorRules:
    """Names by which the options call them. ``policy``: of POLICIES or OTHERS. ``threshold``:
    ``--kvcache-balancing-threshold``. ``check_again``: whether early and predictive look at decoding once more when a
    prompt is computed; without that, what they take is decoded, as in section 6.3. Raises ValueError.
    """

    policy: str = "auto"
    threshold: float = 1.5
    overload: str = "predictive"
    limits: Limits = NO_LIMITS
    check_again: bool = True

    def __post_init__(self) -> None:
        overload_of(self.overload)
        if not 1.0 <= self.threshold < math.inf:
            raise ValueError(
                f"--kvcache-balancing-threshold must be at least 1, not {self.threshold:g}: a transfer must bring more "
                f"than a worker has itself"
            )


class KnownPrompt(NamedTuple):
    """``keys`` of its pages from the first on, of ``page`` tokens each: an engine names whole pages alone, a trace also
    the rest behind them. A match never has the last token, which draws. ``everywhere``: first tokens that no worker
    need compute. ``priority``: of prompts with a higher number, only one under way makes it wait.
    """

    tokens: int
    keys: Sequence[bytes] = ()
    page: int = 1
    everywhere: int = 0
    priority: int = 0

    def length(self, pages: int) -> int:
        """Tokens of its first so many pages."""
        return min(pages * self.page, self.tokens - 1)


@dataclass
class Conductor:
    """Times are seconds of one clock, which the caller reads. ``transfers``: from one sender; None: nothing is sent."""

    rules: ConductorRules
    directory: Directory
    fit: PrefillFit
    transfers: TransferFit | None
    decoding: DecodePool
    num_workers: int
    seed: int = 0
    staged: StagedPrefill = ONE_STAGE  # of each worker
    _lines: list[PromptLine] = field(init=False)
    _sends_until: list[float] = field(init=False)
    _booked: dict[Hashable, tuple[PromptChoice, KnownPrompt]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._policy, self._random = {**POLICIES, **OTHERS}[self.rules.policy], random.Random(self.seed)
        self._lines = [PromptLine() for _ in range(self.num_workers)]
        self._sends_until = [0.0] * self.num_workers

    def choose(self, prompt: KnownPrompt, now_s: float, among: Collection[int] | None = None) -> PromptChoice:
        """The worker that should compute ``prompt``, of all workers or of ``among``. Changes nothing but the next draw
        of chance.
        """
        return self._policy(self._question(prompt, now_s, among))

    def prices(self, prompt: KnownPrompt, now_s: float) -> list[PromptChoice]:
        """All ways to compute ``prompt``, the cheapest first, whatever the policy."""
        return sorted(ways(self._question(prompt, now_s, None)), key=lambda choice: choice.ttft_s)

    def _question(self, prompt: KnownPrompt, now_s: float, among: Collection[int] | None) -> Question:
        held, ready = self.directory.held(prompt.keys), self.directory.ready(prompt.keys if self.transfers else ())
        lengths, everywhere = {pages: prompt.length(pages) for pages in {*held, *ready}}, prompt.everywhere
        workers = [
            WorkerMatch(
                w,
                line.queue_s(now_s, prompt.priority),
                max(everywhere, lengths[held[w]]) if everywhere else lengths[held[w]],
                lengths[ready[w]],
                len(line.prompts),
            )
            for w, line in enumerate(self._lines)
            if among is None or w in among
        ]
        return Question(
            prompt.tokens,
            workers,
            self.fit.law.seconds,
            lambda source, worker, tokens: self._transfer_s(source, tokens, now_s),
            self.rules.threshold,
            self._random.random,
            self.directory.num_pages,
            self.staged.fill_s if self.staged.stages > 1 else None,
        )

    def refuses(self, prompt: KnownPrompt, choice: PromptChoice, now_s: float, room_s: float = 0.0) -> Refusal | None:
        """At a prompt's arrival: a refusal where the larger of both pools' loads is above 1 (section 6.2). ``room_s``:
        until there is room for its KV and one more completion. A prompt that need not wait for anybody is taken in any
        case: so a law that is wrong cannot refuse for ever.
        """
        limits, waits_s, tbt_s = self.rules.limits, max(0.0, room_s - choice.queue_s), 0.0
        ttft_s = choice.ttft_s + waits_s
        if limits.tbt_s < math.inf:
            tbt_s = self.tbt_s(prompt, now_s, now_s + ttft_s)
        if ttft_s > limits.ttft_s and choice.queue_s + waits_s > 0:
            return Refusal("ttft", ttft_s, tbt_s, max(1.0, ttft_s - limits.ttft_s))
        if tbt_s > limits.tbt_s and (self.decoding.num_running or self._booked):
            return Refusal("tbt", ttft_s, tbt_s, self._relief_s(now_s, tbt_s))
        return None

    def book(self, request: Hashable, prompt: KnownPrompt, choice: PromptChoice, now_s: float) -> list[bytes]:
        """Take ``choice`` for the request. Returns the keys of the pages that the worker gives up. What moves stays
        where it is too, so that pages which many want are soon in many places (section 5.2).
        """
        line = self._lines[choice.worker]
        if choice.source != NOBODY:
            self._sends_until[choice.source] = now_s + choice.transfer_s
        if choice.passed and self.transfers:
            self.transfers.passed()
        ready_s = now_s + choice.transfer_s + choice.fill_s
        line.add(BookedPrompt(request, prompt.tokens, choice.prefill_s, ready_s, prompt.priority), now_s)
        self._booked[request] = choice, prompt
        return self.directory.take(choice.worker, prompt.keys)

    def received(self, request: Hashable) -> None:
        """The pages that had to move for ``request`` have come."""
        choice, prompt = self._booked[request]
        moved = [k for n, k in enumerate(prompt.keys, 1) if prompt.length(n) <= choice.prefix]
        self.directory.arrived(choice.worker, moved)

    def transferred(self, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """A transfer of so many tokens was waited for so long, behind ``ahead_s`` in which another was computed: the
        times that are expected of the next ones follow that.
        """
        if self.transfers:
            self.transfers.observe(tokens, seconds, ahead_s)

    def begun(self, request: Hashable, now_s: float) -> None:
        """The request's worker computes its prompt from now on."""
        self._lines[self._booked[request][0].worker].begun(request, now_s)

    def computed(self, request: Hashable, now_s: float, seconds: float, prefix: int) -> None:
        """The request's worker has computed its prompt behind ``prefix`` tokens, in so many seconds of work."""
        choice, prompt = self._booked.pop(request)
        self._lines[choice.worker].remove(request, now_s)
        self.fit.observe(prompt.tokens, prefix, seconds)
        self.directory.arrived(choice.worker, prompt.keys)

    def cancelled(self, request: Hashable, now_s: float) -> None:
        """The request's prompt will not be computed."""
        choice, prompt = self._booked.pop(request)
        self._lines[choice.worker].remove(request, now_s)
        self.directory.failed(choice.worker, prompt.keys)

    def forget(self) -> None:
        """Nobody has a prompt or a page any more. What was learned of times stays."""
        for worker in range(self.num_workers):
            self.directory.lost(worker)
        self._lines = [PromptLine() for _ in range(self.num_workers)]
        self._sends_until = [0.0] * self.num_workers
        self._booked.clear()

    def refuses_decoding(self, tokens: int, ttft_s: float) -> Refusal | None:
        """At the end of a prompt: a refusal where no instance can decode it within the limit (section 3, step 4)."""
        if not self.rules.check_again and self.rules.overload != "baseline":
            return None
        _, tbt_s = self.decoding.select(tokens)
        if tbt_s <= self.rules.limits.tbt_s or not self.decoding.num_running:
            return None
        return Refusal("tbt", ttft_s, tbt_s, 1.0)

    @property
    def num_waiting(self) -> int:
        """Prompts that are not computed yet."""
        return len(self._booked)

    def prefill_load(self, now_s: float) -> float:
        """The longest queue over the limit of a first token (section 6.1)."""
        return max(line.queue_s(now_s) for line in self._lines) / self.rules.limits.ttft_s

    def decode_load(self) -> float:
        """A step's time over the limit of a gap."""
        return self.decoding.tbt_s() / self.rules.limits.tbt_s

    def tbt_s(self, prompt: KnownPrompt, now_s: float, done_s: float) -> float:
        """A step of those that will decode with ``prompt`` at ``done_s``, when it is computed, by ``--overload``: as it
        is foreseen now.
        """
        if self.rules.overload == "baseline":
            return 0.0
        if self.rules.overload == "early":
            return self.decoding.select(prompt.tokens)[1]
        joining = chain(*(line.joining() for line in self._lines), [(done_s, prompt.tokens)])
        return self.decoding.tbt_at(done_s, now_s, joining)

    def _transfer_s(self, source: int, tokens: int, now_s: float) -> float:
        """Of so many tokens, behind what ``source`` has to send before: who is asked by many is slow."""
        own_s = self.transfers.seconds(tokens) if self.transfers else 0.0
        return max(0.0, self._sends_until[source] - now_s) + own_s

    def _relief_s(self, now_s: float, tbt_s: float) -> float:
        """Seconds until enough completions have ended, if they end evenly."""
        above = 1.0 - self.rules.limits.tbt_s / tbt_s
        return max(1.0, above * self.decoding.decode_s)
