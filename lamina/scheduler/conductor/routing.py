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

NO_WORKER = -1


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


class RoutingDecision(NamedTuple):
    """``worker`` computes the prompt behind its first ``prefix`` tokens; ``transferred_tokens`` of these come from
    ``source``. ``fill_s``: from when its first stage begins, until the last one can. ``transfer_would_pay``: a transfer
    would have been cheaper, were it for nothing.
    """

    worker: int
    prefix: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    reason: str
    source: int = NO_WORKER
    transferred_tokens: int = 0
    fill_s: float = 0.0
    transfer_would_pay: bool = False


class RoutingQuery(NamedTuple):
    """The question that a policy answers. ``threshold``: a transfer must bring more than so many times the worker's own
    match. ``random``: a number in [0, 1), for who needs chance.
    """

    tokens: int
    workers: Sequence[WorkerMatch]
    prefill_s: Callable[[int, int], float]  # of (tokens, prefix)
    transfer_s: Callable[[int, int, int], float]  # of (source, worker, tokens)
    threshold: float = 1.0
    random: Callable[[], float] = lambda: 0.0
    num_pages: Callable[[int], int] = lambda worker: 0  # that a worker holds
    # Of (tokens, prefix, prefill_s), until a worker's last stage can begin; None: it has one stage, and asks nobody.
    fill_s: Callable[[int, int, float], float] | None = None


Policy = Callable[[RoutingQuery], RoutingDecision]


def mooncake(query: RoutingQuery) -> RoutingDecision:
    """TTFT = queue + transfer + prefill, where the best match of all exceeds the worker's own times ``threshold``; else
    queue + prefill. The least TTFT.
    """
    prices, most, threshold = _Estimates(query), best_cached_worker(query), query.threshold
    best, best_s = query.workers[0], math.inf
    for at in query.workers:
        if at.queue_s >= best_s:  # no way is shorter than its queue
            continue
        fetches = most.sendable > at.prefix * threshold
        ttft_s = prices.fetched_s(at, most, hides=False) if fetches else prices.alone_s(at)
        if ttft_s < best_s:
            best, best_s = at, ttft_s
    if most.sendable > best.prefix * threshold:
        return prices.fetched(best, most, hides=False)
    return prices.alone(best)


def auto(query: RoutingQuery) -> RoutingDecision:
    """The cheapest of all ways; a transfer ends while the queue is computed, so the longer of both counts."""
    prices, most = _Estimates(query), best_cached_worker(query)
    best, best_s, fetches = query.workers[0], math.inf, False
    for at in query.workers:
        if at.queue_s >= best_s:  # no way is shorter than its queue
            continue
        if (ttft_s := prices.alone_s(at)) < best_s:
            best, best_s, fetches = at, ttft_s, False
        if most.sendable > at.prefix and (ttft_s := prices.fetched_s(at, most)) < best_s:
            best, best_s, fetches = at, ttft_s, True
    if fetches:
        return prices.fetched(best, most)
    passed = any(at.queue_s < best_s and prices.for_nothing_s(at, most) < best_s for at in query.workers)
    return prices.alone(best)._replace(transfer_would_pay=passed) if passed else prices.alone(best)


def candidates(query: RoutingQuery) -> Iterator[RoutingDecision]:
    """Both ways on each worker, with and without a transfer, by what the Conductor foresees of each."""
    prices, most = _Estimates(query), best_cached_worker(query)
    for at in query.workers:
        yield prices.alone(at)
        if most.sendable > at.prefix:
            yield prices.fetched(at, most)


def cache_aware(query: RoutingQuery) -> RoutingDecision:
    """The least queue and prefill, nothing moves."""
    prices = _Estimates(query)
    return prices.alone(min(query.workers, key=prices.alone_s))


def load_balance(query: RoutingQuery) -> RoutingDecision:
    """The shortest queue, whichever worker has a beginning of the prompt."""
    return without_transfer(query, min(query.workers, key=lambda at: at.queue_s))._replace(reason="shortest queue")


def random(query: RoutingQuery) -> RoutingDecision:
    """Any worker."""
    return without_transfer(query, query.workers[int(query.random() * len(query.workers))])._replace(reason="by chance")


POLICIES: dict[str, Policy] = {
    "auto": auto,
    "mooncake": mooncake,
    "cache-aware": cache_aware,
    "load-balance": load_balance,
    "random": random,
}


def best_cached_worker(query: RoutingQuery) -> WorkerMatch:
    """Who could send the most."""
    return max(query.workers, key=lambda at: at.sendable)


def start_delay_s(queue_s: float, transfer_s: float, fill_s: float) -> float:
    """Until the last stage of a worker can begin with a prompt: behind its queue, while which the transfer comes, and
    so long after the first stage, which begins once all has come.
    """
    return max(queue_s, transfer_s + fill_s)


def without_transfer(query: RoutingQuery, match: WorkerMatch) -> RoutingDecision:
    """A worker computes all that it has not."""
    return _Estimates(query).alone(match)


class _Estimates:
    """Of one question: seconds until the first token by a way, many of which are looked at, and the way as a choice."""

    def __init__(self, query: RoutingQuery) -> None:
        self._asked = query
        self._known: dict[int, tuple[float, float]] = {}  # by prefix: seconds, and until the last stage can begin

    def _computing(self, prefix: int) -> tuple[float, float]:
        known, asked = self._known.get(prefix), self._asked
        if known is None:
            prefill_s = asked.prefill_s(asked.tokens, prefix)
            known = prefill_s, asked.fill_s(asked.tokens, prefix, prefill_s) if asked.fill_s else 0.0
            self._known[prefix] = known
        return known

    def alone_s(self, match: WorkerMatch) -> float:
        prefill_s, fill_s = self._computing(match.prefix)
        return start_delay_s(match.queue_s, 0.0, fill_s) + prefill_s

    def fetched_s(self, match: WorkerMatch, most: WorkerMatch, *, hides: bool = True) -> float:
        """``hides``: a transfer comes while the queue is computed; Algorithm 1 adds both."""
        prefill_s, fill_s = self._computing(most.sendable)
        transfer_s = self._asked.transfer_s(most.worker, match.worker, most.sendable - match.prefix)
        if hides:
            return start_delay_s(match.queue_s, transfer_s, fill_s) + prefill_s
        return transfer_s + start_delay_s(match.queue_s, 0.0, fill_s) + prefill_s

    def for_nothing_s(self, match: WorkerMatch, most: WorkerMatch) -> float:
        """As fetched, if a transfer took no time."""
        prefill_s, fill_s = self._computing(max(match.prefix, most.sendable))
        return start_delay_s(match.queue_s, 0.0, fill_s) + prefill_s

    def alone(self, match: WorkerMatch) -> RoutingDecision:
        prefill_s, fill_s = self._computing(match.prefix)
        reason = "local match" if match.prefix else "new"
        ttft_s = self.alone_s(match)
        return RoutingDecision(match.worker, match.prefix, match.queue_s, 0.0, prefill_s, ttft_s, reason, fill_s=fill_s)

    def fetched(self, match: WorkerMatch, most: WorkerMatch, *, hides: bool = True) -> RoutingDecision:
        prefill_s, fill_s = self._computing(most.sendable)
        moved, ttft_s = most.sendable - match.prefix, self.fetched_s(match, most, hides=hides)
        return RoutingDecision(
            match.worker,
            most.sendable,
            match.queue_s,
            self._asked.transfer_s(most.worker, match.worker, moved),
            prefill_s,
            ttft_s,
            "remote match",
            most.worker,
            moved,
            fill_s,
        )
