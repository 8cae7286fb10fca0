"""Routing policies: one function for each policy chooses the prefill worker of a prompt.

A policy gets the queue and the cached prefix of each worker, and predicts TTFT from two latency models: prefill and
transfer. It changes nothing. Of equal workers it takes the first. Pure policy: no torch, no I/O, no clock.

- ``mooncake``: Algorithm 1 of Mooncake (section 5.1), to the letter
- ``auto``: the lower TTFT, with or without a transfer. A transfer overlaps the worker's queue.
- ``cache-aware``: the least queue plus prefill, without transfers
- ``load-balance``: the shortest queue
- ``random``: any worker
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

NO_WORKER = -1
MEMORY = -2  # in place of a worker that sends a prefix: the memory workers


class WorkerMatch(NamedTuple):
    """A prefill worker's queue, and its cached prefix of a prompt. Tokens count from the prompt's first one."""

    worker: int
    queue_s: float  # from now until its queue is computed
    prefix: int  # tokens whose K and V it will have then
    sendable: int  # how many of these it can send now
    waiting: int = 0  # prompts in its queue

    @staticmethod
    def idle(worker: int, prefix: int = 0) -> WorkerMatch:
        """A worker with an empty queue."""
        return WorkerMatch(worker, 0.0, prefix, prefix)


class RoutingDecision(NamedTuple):
    """A worker for a prompt, with the predicted times that led to it.

    ``worker`` has the first ``prefix`` tokens, of which ``source`` sends ``transferred_tokens``: a worker, or MEMORY.
    ``fill_s``: seconds from the start of its first pipeline stage to the start of the last one.
    ``transfer_would_pay``: a transfer that took no time would have lowered the TTFT.
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
    """The input of a policy.

    ``threshold``: a transfer must bring more than this many times the worker's own prefix. ``random``: draws a number
    in [0, 1).
    """

    tokens: int
    workers: Sequence[WorkerMatch]
    prefill_s: Callable[[int, int], float]  # parameters: tokens, prefix
    transfer_s: Callable[[int, int, int], float]  # parameters: source, worker, tokens
    threshold: float = 1.0
    random: Callable[[], float] = lambda: 0.0
    num_pages: Callable[[int], int] = lambda worker: 0  # pages that a worker holds
    # Seconds until a worker's last stage can begin. Parameters: tokens, prefix, prefill_s. None: one stage.
    fill_s: Callable[[int, int, float], float] | None = None
    # First tokens that memory workers have or load, and the seconds until a worker has so many of them more.
    num_stored_tokens: int = 0
    stored_s: Callable[[int], float] = lambda tokens: 0.0


Policy = Callable[[RoutingQuery], RoutingDecision]


def mooncake(query: RoutingQuery) -> RoutingDecision:
    """The lowest TTFT. It is queue + prefill, plus a transfer where the best prefix exceeds the worker's own by
    ``threshold``.
    """
    prices, most, threshold = _Estimates(query), best_cached_worker(query), query.threshold
    best, best_s = query.workers[0], math.inf
    for at in query.workers:
        if at.queue_s >= best_s:  # its TTFT is at least its queue
            continue
        fetches = max(most.sendable, query.num_stored_tokens) > at.prefix * threshold
        ttft_s = prices.received_s(at, most) if fetches else prices.alone_s(at)
        if ttft_s < best_s:
            best, best_s = at, ttft_s
    if max(most.sendable, query.num_stored_tokens) <= best.prefix * threshold:
        return prices.alone(best)
    if query.num_stored_tokens > most.sendable:
        return prices.stored(best, hides=False)
    return prices.fetched(best, most, hides=False)


def auto(query: RoutingQuery) -> RoutingDecision:
    """The lowest TTFT of all candidates. A transfer overlaps the queue, so the longer of both counts."""
    prices, most = _Estimates(query), best_cached_worker(query)
    best, best_s, fetches, loads = query.workers[0], math.inf, False, False
    for at in query.workers:
        if at.queue_s >= best_s:  # its TTFT is at least its queue
            continue
        if (ttft_s := prices.alone_s(at)) < best_s:
            best, best_s, fetches, loads = at, ttft_s, False, False
        if most.sendable > at.prefix and (ttft_s := prices.fetched_s(at, most)) < best_s:
            best, best_s, fetches, loads = at, ttft_s, True, False
        if query.num_stored_tokens > at.prefix and (ttft_s := prices.stored_s(at)) < best_s:
            best, best_s, fetches, loads = at, ttft_s, False, True
    if loads:
        return prices.stored(best)
    if fetches:
        return prices.fetched(best, most)
    passed = any(at.queue_s < best_s and prices.for_nothing_s(at, most) < best_s for at in query.workers)
    return prices.alone(best)._replace(transfer_would_pay=passed) if passed else prices.alone(best)


def candidates(query: RoutingQuery) -> Iterator[RoutingDecision]:
    """Yields up to three candidates for each worker: without a transfer, from another worker, from memory workers."""
    prices, most = _Estimates(query), best_cached_worker(query)
    for at in query.workers:
        yield prices.alone(at)
        if most.sendable > at.prefix:
            yield prices.fetched(at, most)
        if query.num_stored_tokens > at.prefix:
            yield prices.stored(at)


def cache_aware(query: RoutingQuery) -> RoutingDecision:
    """The least queue plus prefill; never a transfer from another prefill worker."""
    prices = _Estimates(query)
    return without_transfer(query, min(query.workers, key=lambda at: min(prices.alone_s(at), prices.stored_s(at))))


def load_balance(query: RoutingQuery) -> RoutingDecision:
    """The shortest queue, whatever the workers have cached."""
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
    """The worker that can send the longest prefix."""
    return max(query.workers, key=lambda at: at.sendable)


def start_delay_s(queue_s: float, transfer_s: float, fill_s: float) -> float:
    """Seconds until the last stage of a worker can begin with a prompt.

    It waits for the queue. The transfer overlaps the queue; the first stage begins when all has arrived.
    """
    return max(queue_s, transfer_s + fill_s)


def without_transfer(query: RoutingQuery, match: WorkerMatch) -> RoutingDecision:
    """The decision that a worker computes all tokens that neither it nor, if they load faster, memory workers have."""
    prices = _Estimates(query)
    loads = query.num_stored_tokens > match.prefix and prices.stored_s(match) < prices.alone_s(match)
    return prices.stored(match) if loads else prices.alone(match)


class _Estimates:
    """Predicts the TTFT of candidates of one query, and makes decisions of them."""

    def __init__(self, query: RoutingQuery) -> None:
        self._asked = query
        self._known: dict[int, tuple[float, float]] = {}  # by prefix: prefill_s and fill_s

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
        """The TTFT with a transfer. ``hides``: it overlaps the queue; Algorithm 1 adds both."""
        prefill_s, fill_s = self._computing(most.sendable)
        transfer_s = self._asked.transfer_s(most.worker, match.worker, most.sendable - match.prefix)
        if hides:
            return start_delay_s(match.queue_s, transfer_s, fill_s) + prefill_s
        return transfer_s + start_delay_s(match.queue_s, 0.0, fill_s) + prefill_s

    def stored_s(self, match: WorkerMatch, *, hides: bool = True) -> float:
        """The TTFT with what memory workers have. ``hides``: as of ``fetched_s``."""
        prefill_s, fill_s = self._computing(max(match.prefix, self._asked.num_stored_tokens))
        transfer_s = self._asked.stored_s(max(0, self._asked.num_stored_tokens - match.prefix))
        if hides:
            return start_delay_s(match.queue_s, transfer_s, fill_s) + prefill_s
        return transfer_s + start_delay_s(match.queue_s, 0.0, fill_s) + prefill_s

    def received_s(self, match: WorkerMatch, most: WorkerMatch) -> float:
        """The TTFT of Algorithm 1 with the longest prefix, wherever it is."""
        if self._asked.num_stored_tokens > most.sendable:
            return self.stored_s(match, hides=False)
        return self.fetched_s(match, most, hides=False)

    def for_nothing_s(self, match: WorkerMatch, most: WorkerMatch) -> float:
        """The TTFT with a transfer that takes no time."""
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

    def stored(self, match: WorkerMatch, *, hides: bool = True) -> RoutingDecision:
        length = self._asked.num_stored_tokens
        prefill_s, fill_s = self._computing(length)
        moved, ttft_s = length - match.prefix, self.stored_s(match, hides=hides)
        transfer_s = self._asked.stored_s(moved)
        return RoutingDecision(
            match.worker, length, match.queue_s, transfer_s, prefill_s, ttft_s, "stored match", MEMORY, moved, fill_s
        )
