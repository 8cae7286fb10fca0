"""Which prefill worker computes a prompt: one function for each policy, by its name. Pure policy: no torch, no I/O, no
clock.

A policy is told of each worker its queue and its match, and prices by two laws: seconds of prefill, seconds of a
transfer. It changes nothing, and of equal workers it takes the first.

mooncake      Algorithm 1 of Mooncake (section 5.1), to the letter
auto          the cheaper of both ways on each worker, where a transfer comes while others are computed
cache-aware   the least queue and prefill, with what the worker has itself
load-balance  the least queue
random        any
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

NOBODY = -1


class WorkerMatch(NamedTuple):
    """A prefill worker, as a prompt finds it. Tokens are the prompt's first ones, seconds from now."""

    worker: int
    queue_s: float  # until it has computed all that it was given
    prefix: int  # tokens whose K and V it will have then
    sendable: int  # how many of these the worker could send now
    waiting: int = 0  # prompts that were given to it

    @staticmethod
    def idle(worker: int, prefix: int = 0) -> WorkerMatch:
        """One that has nothing to do."""
        return WorkerMatch(worker, 0.0, prefix, prefix)


class PromptChoice(NamedTuple):
    """``worker`` computes the prompt behind its first ``prefix`` tokens; ``moved`` of these come from ``source``.
    ``fill_s``: from when its first stage begins, until the last one can. ``passed``: a transfer would have been
    cheaper, were it for nothing.
    """

    worker: int
    prefix: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    reason: str
    source: int = NOBODY
    moved: int = 0
    fill_s: float = 0.0
    passed: bool = False


class Question(NamedTuple):
    """The question that a policy answers. ``threshold``: a transfer must bring more than so many times the worker's own
    match. ``draw``: a number in [0, 1), for who needs chance.
    """

    tokens: int
    workers: Sequence[WorkerMatch]
    prefill_s: Callable[[int, int], float]  # of (tokens, prefix)
    transfer_s: Callable[[int, int, int], float]  # of (source, worker, tokens)
    threshold: float = 1.0
    draw: Callable[[], float] = lambda: 0.0
    num_pages: Callable[[int], int] = lambda worker: 0  # that a worker holds
    # Of (tokens, prefix, prefill_s), until a worker's last stage can begin; None: it has one stage, and asks nobody.
    fill_s: Callable[[int, int, float], float] | None = None


Policy = Callable[[Question], PromptChoice]


def mooncake(asked: Question) -> PromptChoice:
    """TTFT = queue + transfer + prefill, where the best match of all exceeds the worker's own times ``threshold``; else
    queue + prefill. The least TTFT.
    """
    prices, most, threshold = _Prices(asked), most_kept(asked), asked.threshold
    best, best_s = asked.workers[0], math.inf
    for at in asked.workers:
        if at.queue_s >= best_s:  # no way is shorter than its queue
            continue
        fetches = most.sendable > at.prefix * threshold
        ttft_s = prices.fetched_s(at, most, hides=False) if fetches else prices.alone_s(at)
        if ttft_s < best_s:
            best, best_s = at, ttft_s
    if most.sendable > best.prefix * threshold:
        return prices.fetched(best, most, hides=False)
    return prices.alone(best)


def auto(asked: Question) -> PromptChoice:
    """The cheapest of all ways; a transfer ends while the queue is computed, so the longer of both counts."""
    prices, most = _Prices(asked), most_kept(asked)
    best, best_s, fetches = asked.workers[0], math.inf, False
    for at in asked.workers:
        if at.queue_s >= best_s:  # no way is shorter than its queue
            continue
        if (ttft_s := prices.alone_s(at)) < best_s:
            best, best_s, fetches = at, ttft_s, False
        if most.sendable > at.prefix and (ttft_s := prices.fetched_s(at, most)) < best_s:
            best, best_s, fetches = at, ttft_s, True
    if fetches:
        return prices.fetched(best, most)
    passed = any(at.queue_s < best_s and prices.for_nothing_s(at, most) < best_s for at in asked.workers)
    return prices.alone(best)._replace(passed=passed) if passed else prices.alone(best)


def ways(asked: Question) -> Iterator[PromptChoice]:
    """Both ways on each worker, with and without a transfer, by what the Conductor foresees of each."""
    prices, most = _Prices(asked), most_kept(asked)
    for at in asked.workers:
        yield prices.alone(at)
        if most.sendable > at.prefix:
            yield prices.fetched(at, most)


def cache_aware(asked: Question) -> PromptChoice:
    """The least queue and prefill, nothing moves."""
    prices = _Prices(asked)
    return prices.alone(min(asked.workers, key=prices.alone_s))


def load_balance(asked: Question) -> PromptChoice:
    """The shortest queue, whichever worker has a beginning of the prompt."""
    return alone(asked, min(asked.workers, key=lambda at: at.queue_s))._replace(reason="shortest queue")


def random(asked: Question) -> PromptChoice:
    """Any worker."""
    return alone(asked, asked.workers[int(asked.draw() * len(asked.workers))])._replace(reason="by chance")


POLICIES: dict[str, Policy] = {
    "auto": auto,
    "mooncake": mooncake,
    "cache-aware": cache_aware,
    "load-balance": load_balance,
    "random": random,
}


def most_kept(asked: Question) -> WorkerMatch:
    """Who could send the most."""
    return max(asked.workers, key=lambda at: at.sendable)


def begins_s(queue_s: float, transfer_s: float, fill_s: float) -> float:
    """Until the last stage of a worker can begin with a prompt: behind its queue, while which the transfer comes, and
    so long after the first stage, which begins once all has come.
    """
    return max(queue_s, transfer_s + fill_s)


def alone(asked: Question, at: WorkerMatch) -> PromptChoice:
    """A worker computes all that it has not."""
    return _Prices(asked).alone(at)


class _Prices:
    """Of one question: seconds until the first token by a way, many of which are looked at, and the way as a choice."""

    def __init__(self, asked: Question) -> None:
        self._asked = asked
        self._known: dict[int, tuple[float, float]] = {}  # by prefix: seconds, and until the last stage can begin

    def _computing(self, prefix: int) -> tuple[float, float]:
        known, asked = self._known.get(prefix), self._asked
        if known is None:
            prefill_s = asked.prefill_s(asked.tokens, prefix)
            known = prefill_s, asked.fill_s(asked.tokens, prefix, prefill_s) if asked.fill_s else 0.0
            self._known[prefix] = known
        return known

    def alone_s(self, at: WorkerMatch) -> float:
        prefill_s, fill_s = self._computing(at.prefix)
        return begins_s(at.queue_s, 0.0, fill_s) + prefill_s

    def fetched_s(self, at: WorkerMatch, most: WorkerMatch, *, hides: bool = True) -> float:
        """``hides``: a transfer comes while the queue is computed; Algorithm 1 adds both."""
        prefill_s, fill_s = self._computing(most.sendable)
        transfer_s = self._asked.transfer_s(most.worker, at.worker, most.sendable - at.prefix)
        if hides:
            return begins_s(at.queue_s, transfer_s, fill_s) + prefill_s
        return transfer_s + begins_s(at.queue_s, 0.0, fill_s) + prefill_s

    def for_nothing_s(self, at: WorkerMatch, most: WorkerMatch) -> float:
        """As fetched, if a transfer took no time."""
        prefill_s, fill_s = self._computing(max(at.prefix, most.sendable))
        return begins_s(at.queue_s, 0.0, fill_s) + prefill_s

    def alone(self, at: WorkerMatch) -> PromptChoice:
        prefill_s, fill_s = self._computing(at.prefix)
        reason = "local match" if at.prefix else "new"
        ttft_s = self.alone_s(at)
        return PromptChoice(at.worker, at.prefix, at.queue_s, 0.0, prefill_s, ttft_s, reason, fill_s=fill_s)

    def fetched(self, at: WorkerMatch, most: WorkerMatch, *, hides: bool = True) -> PromptChoice:
        prefill_s, fill_s = self._computing(most.sendable)
        moved, ttft_s = most.sendable - at.prefix, self.fetched_s(at, most, hides=hides)
        return PromptChoice(
            at.worker,
            most.sendable,
            at.queue_s,
            self._asked.transfer_s(most.worker, at.worker, moved),
            prefill_s,
            ttft_s,
            "remote match",
            most.worker,
            moved,
            fill_s,
        )
