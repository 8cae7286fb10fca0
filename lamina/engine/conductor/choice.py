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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

NOBODY = -1


class WorkerMatch(NamedTuple):
    """A prefill worker, as a prompt finds it. Tokens are the prompt's first ones, seconds from now."""

    worker: int
    queue_s: float  # until it has computed all that it was given
    prefix: int  # tokens whose K and V it will have then
    sendable: int  # of these, the ones that the worker could send now
    waiting: int = 0  # prompts that were given to it

    @staticmethod
    def idle(worker: int, prefix: int = 0) -> WorkerMatch:
        """One that has nothing to do."""
        return WorkerMatch(worker, 0.0, prefix, prefix)


class PromptChoice(NamedTuple):
    """``worker`` computes the prompt behind its first ``prefix`` tokens; ``moved`` of these come from ``source``.
    ``fill_s``: from when its first stage begins, until the last one can.
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
    most = _most(asked)
    best: PromptChoice | None = None
    for at in asked.workers:
        if most.prefix > at.prefix * asked.threshold:
            choice = _fetching(asked, at, most, hides=False)
        else:
            choice = alone(asked, at)
        if best is None or choice.ttft_s < best.ttft_s:
            best = choice
    assert best is not None
    return best


def auto(asked: Question) -> PromptChoice:
    """The cheapest of all ways; a transfer ends while the queue is computed, so the longer of both counts."""
    return min(ways(asked), key=lambda choice: choice.ttft_s)


def ways(asked: Question) -> Iterator[PromptChoice]:
    """Both ways on each worker, with and without a transfer, by what the Conductor foresees of each."""
    most = _most(asked)
    for at in asked.workers:
        yield alone(asked, at)
        if most.prefix > at.prefix:
            yield _fetching(asked, at, most)


def cache_aware(asked: Question) -> PromptChoice:
    """The least queue and prefill, nothing moves."""
    return min((alone(asked, at) for at in asked.workers), key=lambda choice: choice.ttft_s)


def load_balance(asked: Question) -> PromptChoice:
    """The shortest queue, whoever has what."""
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


class _MostKept(NamedTuple):
    """Who could send the most, and what is left to compute behind that, wherever it goes."""

    holder: int
    prefix: int
    prefill_s: float
    fill_s: float


def _most(asked: Question) -> _MostKept:
    holder = max(asked.workers, key=lambda at: at.sendable)
    return _MostKept(holder.worker, holder.sendable, *_computing(asked, holder.sendable))


def _computing(asked: Question, prefix: int) -> tuple[float, float]:
    """Seconds of a prompt behind so many tokens, and until the last stage can begin with it."""
    prefill_s = asked.prefill_s(asked.tokens, prefix)
    return prefill_s, asked.fill_s(asked.tokens, prefix, prefill_s) if asked.fill_s else 0.0


def begins_s(queue_s: float, transfer_s: float, fill_s: float) -> float:
    """Until the last stage of a worker can begin with a prompt: behind its queue, while which the transfer comes, and
    so long after the first stage, which begins once all has come.
    """
    return max(queue_s, transfer_s + fill_s)


def alone(asked: Question, at: WorkerMatch) -> PromptChoice:
    """A worker computes all that it has not."""
    prefill_s, fill_s = _computing(asked, at.prefix)
    ttft_s = begins_s(at.queue_s, 0.0, fill_s) + prefill_s
    reason = "local match" if at.prefix else "new"
    return PromptChoice(at.worker, at.prefix, at.queue_s, 0.0, prefill_s, ttft_s, reason, fill_s=fill_s)


def _fetching(asked: Question, at: WorkerMatch, most: _MostKept, *, hides: bool = True) -> PromptChoice:
    """``hides``: a transfer comes while the queue is computed; Algorithm 1 adds both."""
    moved, (holder, prefix, prefill_s, fill_s) = most.prefix - at.prefix, most
    transfer_s = asked.transfer_s(holder, at.worker, moved)
    if hides:
        ttft_s = begins_s(at.queue_s, transfer_s, fill_s) + prefill_s
    else:
        ttft_s = transfer_s + begins_s(at.queue_s, 0.0, fill_s) + prefill_s
    return PromptChoice(
        at.worker, prefix, at.queue_s, transfer_s, prefill_s, ttft_s, "remote match", holder, moved, fill_s
    )
