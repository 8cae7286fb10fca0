"""The times that a running engine promises its prompts, and the refusals of prompts that it cannot promise. Pure
policy: no torch, no I/O; the clock comes in.

A prompt is booked with the Conductor at its arrival, so that the next prompt sees it wait; from then on the Conductor
hears of each change of it. Without prefill workers, the compute workers are the Conductor's only worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import NamedTuple

from lamina.request import OverloadedError, Refusal

from .blocks.prompt_store import PromptKeys
from .conductor import Conductor, ConductorRules, KnownPrompt
from .conductor.choice import PromptChoice, begins_s
from .conductor.directory import Directory
from .conductor.estimate import ONE_STAGE, PrefillFit, PrefillTime, StagedPrefill, StepFit, TransferFit
from .conductor.overload import NO_LIMITS, DecodePool, TokenTime
from .conductor.reasons import INLINE, AskedPrompt, Reasons, Seat
from .sequence import Sequence

NO_BOUND = 1 << 62  # pages of a worker: its store tells which ones it gives up
FIRST_LAW = PrefillTime(0.0, 1e-4, 0.0)  # of prompts, until some were computed


class _Booking(NamedTuple):
    choice: PromptChoice
    at_s: float
    ttft_s: float  # that was expected
    shares: bool = False  # another completion of the request computes its prompt
    prices: Several[PromptChoice] = ()  # of all ways, where somebody wants to know


@dataclass
class PromiseCounts:
    """What became of promises: sums since the start, and the loads of both pools now, over their limits.
    ``expected_s``, ``real_s``: from the arrival of a prompt to its first token. ``wasted``: tokens of prompts that were
    computed and not decoded.
    """

    prompts: int = 0
    expected_s: float = 0.0
    real_s: float = 0.0
    wasted: int = 0
    prefill_load: float = 0.0
    decode_load: float = 0.0


class Promises:
    """Of one engine. ``clock``: seconds; by one that stands still, a prompt costs as many seconds as it has tokens."""

    def __init__(
        self,
        num_workers: int = 0,
        max_num_seqs: int = 1,
        clock: Callable[[], float] = float,
        staged: StagedPrefill = ONE_STAGE,
    ) -> None:
        """``num_workers``: of prefill workers, or groups that are ``staged``; 0 = the compute workers do it."""
        self.pooled: Callable[[Sequence], int] = lambda sequence: 0  # its first tokens that need not be computed
        self.keys: PromptKeys | None = None  # of what prefill workers keep of prompts; None: nothing
        self.shared: Callable[[Sequence], int] = lambda sequence: (
            0
        )  # tokens that the completions of a request compute once
        self.limited = False
        self.reasons: Reasons | None = None  # of all choices; None: nobody wants to know
        directory = Directory(max(1, num_workers), NO_BOUND)
        self.conductor = _conductor(directory, ConductorRules(policy="auto"), staged)
        self._clock, self._max_num_seqs, self._apart = clock, max_num_seqs, num_workers > 0
        self._steps = StepFit()
        self._booked = dict[Sequence, _Booking]()
        self._first = dict[int, Sequence]()  # of a request's completions, the one that computes the prompt for all
        self._fetched = dict[Sequence, float]()  # of prompts that are computed: seconds until others had sent theirs
        self._decoding = set[Sequence]()
        self._inline = dict[Sequence, float]()  # whose rows compute workers have, since when
        self._since_s = 0.0  # the last of these was done
        self._counts = PromiseCounts()

    def promise(self, rules: ConductorRules) -> None:
        """Keep to these from now on. Nobody has come yet."""
        before = self.conductor
        self.conductor = _conductor(before.directory, rules, before.staged, before.transfers)
        self.limited = rules.limits != NO_LIMITS

    @property
    def watches(self) -> bool:
        """Whether it matters who computes a prompt, and when: else nobody asks."""
        return self._apart or self.limited

    def check(self, sequences: Several[Sequence], places: Callable[[int], float], *, accepted: bool = False) -> None:
        """Of a request that comes now, of so many completions. ``places``: how many completions of so many tokens have
        room for their KV at once. Raises OverloadedError where it would come too late and was not ``accepted`` before.
        """
        if accepted or not self.limited:
            return
        prompt, now, decoding = self._known(sequences[0]), self._clock(), self.conductor.decoding
        own = int(max(decoding.mean_tokens, len(sequences[0].tokens) + decoding.answer)) - prompt.everywhere
        most, ahead = min(self._max_num_seqs, places(max(1, own))), self._ahead(prompt) + len(self._decoding)
        choice, room_s = self.conductor.choose(prompt, now), decoding.room_s(most, ahead) if ahead else 0.0
        if (refusal := self.conductor.refuses(prompt, choice, now, room_s)) is not None:
            if self.reasons:
                self.reasons.refused(_asked(sequences[0]), refusal, self.conductor.prices(prompt, now))
            raise OverloadedError(refusal)

    def _ahead(self, prompt: KnownPrompt) -> int:
        """How many wait that come before ``prompt``."""
        return sum(waiting.priority <= prompt.priority for waiting in self._booked)

    def expect(self, sequence: Sequence) -> int:
        """Book a sequence whose prompt is to be computed, unless it is booked; its worker."""
        if sequence not in self._booked:
            self._leave(sequence)
            prompt, now, first = self._known(sequence), self._clock(), self._first.get(sequence.request_id)
            shares = first is not None and (shared := self.shared(sequence)) > prompt.everywhere
            if first is not None and shares:
                choice = self._behind(first, prompt._replace(everywhere=shared), now)
            else:
                choice = self.conductor.choose(prompt, now)
                self._first.setdefault(sequence.request_id, sequence)
            prices = self.conductor.prices(prompt, now) if self.reasons else ()
            self.conductor.book(sequence, prompt, choice, now)
            self._booked[sequence] = _Booking(choice, now, choice.ttft_s, shares, prices)
        return self._booked[sequence].choice.worker

    def _behind(self, first: Sequence, prompt: KnownPrompt, now: float) -> PromptChoice:
        """For a completion that goes on behind what ``first`` computes: its own rows are those of a step of others, and
        where prefill workers are none of these has them.
        """
        at = self.conductor.choose(prompt, now, {self._booked[first].choice.worker})
        own_s = 0.0 if self._apart else at.prefill_s - self.conductor.fit.law.a
        ttft_s, reason = begins_s(at.queue_s, at.transfer_s, 0.0) + own_s, "shared with another completion"
        return at._replace(prefill_s=own_s, fill_s=0.0, ttft_s=ttft_s, reason=reason)

    def seated(self, sequence: Sequence, seat: Seat, *, apart: bool) -> None:
        """It is chosen where a sequence decodes; ``apart``: its worker computes the prompt, else compute workers do."""
        if self.reasons is None:
            return
        booked, cached = self._booked.get(sequence), sequence.num_cached
        prices = booked.prices if booked else ()
        if not booked and self._apart:
            prices = self.conductor.prices(self._known(sequence), self._clock())
        choice = booked.choice if booked and (apart or not self._apart) else None
        if choice is not None and apart:
            by, why = self.reasons.name(choice.worker), choice.reason
        elif self._apart:
            by, why = INLINE, "a short rest, where its beginning lies" if cached else "a row alone"
        else:
            by, why = INLINE, "no prefill workers"
        self.reasons.taken(_asked(sequence), cached, by, why, choice, prices, seat)

    def is_booked(self, sequence: Sequence) -> bool:
        """Whether a worker is to compute its prompt, for it alone or for others too."""
        return sequence in self._booked and not self._booked[sequence].shares

    def begun(self, sequence: Sequence) -> float:
        """The worker of a booked sequence computes its prompt from now on, which is returned."""
        now = self._clock()
        self.conductor.begun(sequence, now)
        return now

    def source(self, sequence: Sequence) -> int:
        """The prefill worker from which that of a booked sequence is to have its beginning; NOBODY: from none."""
        return self._booked[sequence].choice.source

    def fetched(self, sequence: Sequence, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """The worker of a booked sequence has so many tokens from another one, and waited so long for them, since it
        was done with another prompt, ``ahead_s`` behind asking for them.
        """
        self._fetched[sequence] = seconds
        self.conductor.transferred(tokens, seconds, ahead_s)

    def now(self) -> float:
        """Seconds, by the clock that it keeps to."""
        return self._clock()

    def computed(self, sequence: Sequence, since_s: float, part: float = 1.0) -> None:
        """The prompt of a booked sequence is computed, and it decodes. Its worker was at it since then, or at several,
        of which it is such a part.
        """
        booked, now, counts = self._booked.pop(sequence), self._clock(), self._counts
        self._end_sharing(sequence)
        seconds = part * (now - since_s) - self._fetched.pop(sequence, 0.0)
        self.conductor.computed(sequence, now, seconds, sequence.num_cached)
        if not booked.shares:
            counts.prompts, counts.expected_s = counts.prompts + 1, counts.expected_s + booked.ttft_s
            counts.real_s += now - booked.at_s
        if not sequence.finished:
            self._join(sequence)

    def own_part(self, sequence: Sequence) -> float:
        """Of the time of a prompt that no other was before: what each stage of its worker was at it."""
        return self.conductor.staged.own_part(sequence.num_promised, sequence.num_cached)

    def decodes(self, sequence: Sequence) -> None:
        """A sequence decodes whose prompt is for no prefill worker."""
        self._end_sharing(sequence)  # sequences that go on behind it still share
        self.drop(sequence)
        self._join(sequence)

    def leaves_time(self, rows: int) -> bool:
        """Whether sequences that decode keep their promised time with ``rows`` more rows in a step."""
        pool = self.conductor.decoding
        return (
            pool.law.seconds(pool.num_running + rows, pool.mean_tokens * pool.num_running)
            <= self.conductor.rules.limits.tbt_s
        )

    def refuses_decoding(self, sequence: Sequence) -> Refusal | None:
        """At the first token of a sequence: why it is not decoded; None where it is."""
        booked = self._booked.get(sequence)
        if not self.limited or booked is None or sequence.finished:
            return None
        refusal = self.conductor.refuses_decoding(sequence.num_promised, self._clock() - booked.at_s)
        if refusal is not None:
            self._counts.wasted += len(sequence.prompt)
            if self.reasons:
                self.reasons.refused_late(_asked(sequence)._replace(tokens=len(sequence.prompt)), refusal)
        return refusal

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or whose KV is given up. What waits behind it is booked anew."""
        self._inline.pop(sequence, None)
        self._fetched.pop(sequence, None)
        if self._booked.pop(sequence, None) is not None:
            self.conductor.cancelled(sequence, self._clock())
            if self._end_sharing(sequence):
                behind = [s for s, b in self._booked.items() if b.shares and s.request_id == sequence.request_id]
                self._book_anew([s for s in behind if s.prefill_worker is None and s not in self._inline])
        self._leave(sequence)

    def _end_sharing(self, sequence: Sequence) -> bool:
        """It computes nothing for others any more; whether it did."""
        does = self._first.get(sequence.request_id) is sequence
        if does:
            del self._first[sequence.request_id]
        return does

    def _book_anew(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._booked.pop(sequence)
            self.conductor.cancelled(sequence, self._clock())
        for sequence in sequences:
            if not sequence.finished:
                self.expect(sequence)

    def forget(self) -> None:
        """No prompt is being computed any more: all that are not computed are booked anew."""
        booked = list(self._booked)
        self.conductor.forget()
        self._booked.clear()
        self._first.clear()
        self._fetched.clear()
        self._inline.clear()
        for sequence in booked:
            self.expect(sequence)

    def stepped(self, rows: int, stored: float, seconds: float) -> None:
        """A round of rows that all decode took so long, from its predecessor's end. Without limits nobody asks."""
        if not self.limited:
            return
        self._steps.observe(rows, stored, seconds)
        self.conductor.decoding.law = self._steps.law

    def counts(self) -> PromiseCounts | None:
        """None where nothing is promised."""
        if not self.limited:
            return None
        now, one = self._clock(), self.conductor
        return replace(self._counts, prefill_load=one.prefill_load(now), decode_load=one.decode_load())

    @property
    def replicas(self) -> int | None:
        """Pages of prompts that prefill workers have beside the first one of each; None where they keep nothing."""
        return None if self.keys is None else self.conductor.directory.num_replicas

    def _known(self, sequence: Sequence) -> KnownPrompt:
        tokens, priority = sequence.num_promised, sequence.priority
        if not self._apart:
            return KnownPrompt(tokens, everywhere=self.pooled(sequence), priority=priority)
        if self.keys is None:
            return KnownPrompt(tokens, priority=priority)
        return KnownPrompt(tokens, self.keys.of(sequence), self.keys.page, priority=priority)

    def _join(self, sequence: Sequence) -> None:
        if self.limited:
            instance, _ = self.conductor.decoding.select(sequence.num_promised)
            self.conductor.decoding.join(sequence, instance, sequence.num_promised, self._clock())
            self._decoding.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._decoding:
            self._decoding.discard(sequence)
            ended = sequence.output.finish_reason in ("stop", "length")
            self.conductor.decoding.leave(sequence, self._clock(), sequence.num_outputs if ended else 0)

    # Where compute workers do it, several at once:
    def began_inline(self, sequence: Sequence) -> None:
        """The first rows of a sequence are on their way to the compute workers."""
        if not self._apart and sequence in self._booked and sequence not in self._inline:
            self._inline[sequence] = self._clock()
            if len(self._inline) == 1:
                self.begun(sequence)

    def drawn_inline(self, sequences: Iterable[Sequence]) -> None:
        """Compute workers have drawn a token for each of these. Prompts that a step has ended share its time by their
        tokens.
        """
        done = [s for s in sequences if s in self._booked] if self._booked and not self._apart else []
        if not done:
            return
        computed, now = sum(s.num_promised - s.num_cached for s in done), self._clock()
        since_s = max(self._since_s, min(self._inline.pop(s, now) for s in done))
        for sequence in done:
            self.computed(sequence, since_s, (sequence.num_promised - sequence.num_cached) / max(1, computed))
        self._since_s = now
        if self._inline:
            self.begun(next(iter(self._inline)))


def _asked(sequence: Sequence) -> AskedPrompt:
    return AskedPrompt(sequence.request_id, sequence.output.index, sequence.num_promised)


def _conductor(
    directory: Directory, rules: ConductorRules, staged: StagedPrefill, transfers: TransferFit | None = None
) -> Conductor:
    """Of workers that know nothing of their times yet. ``transfers``: from one to another."""
    return Conductor(
        rules=rules,
        directory=directory,
        fit=PrefillFit(FIRST_LAW, trusted=False),
        transfers=transfers,
        decoding=DecodePool(1, TokenTime(0.0, 0.0, 0.0), 0.0, trusted=0),
        num_workers=directory.num_workers,
        staged=staged,
    )
