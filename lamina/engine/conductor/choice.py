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

from collections.abc import Callable, Sequence
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
    """``worker`` computes the prompt behind its first ``prefix`` tokens; ``moved`` of these come from ``source``."""

    worker: int
    prefix: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    ttft_s: float
    reason: str
    source: int = NOBODY
    moved: int = 0


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
    holder = _holder(asked)
    best: PromptChoice | None = None
    for at in asked.workers:
        if holder.sendable > at.prefix * asked.threshold:
            choice = _fetching(asked, at, holder)
        else:
            choice = alone(asked, at)
        if best is None or choice.ttft_s < best.ttft_s:
            best = choice
    assert best is not None
    return best


def auto(asked: Question) -> PromptChoice:
    """Both ways on each worker; a transfer ends while the queue is computed, so the longer of both counts."""
    holder = _holder(asked)
    best: PromptChoice | None = None
    for at in asked.workers:
        choice = alone(asked, at)
        if best is None or choice.ttft_s < best.ttft_s:
            best = choice
        if holder.sendable > at.prefix:
            choice = _fetching(asked, at, holder)
            hidden = min(choice.queue_s, choice.transfer_s)
            if choice.ttft_s - hidden < best.ttft_s:
                best = choice._replace(ttft_s=choice.ttft_s - hidden)
    assert best is not None
    return best


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


def _holder(asked: Question) -> WorkerMatch:
    return max(asked.workers, key=lambda at: at.sendable)


def alone(asked: Question, at: WorkerMatch) -> PromptChoice:
    """A worker computes all that it has not."""
    prefill_s = asked.prefill_s(asked.tokens, at.prefix)
    fill_s = asked.fill_s(asked.tokens, at.prefix, prefill_s) if asked.fill_s else 0.0
    ttft_s = max(at.queue_s, fill_s) + prefill_s
    reason = "local match" if at.prefix else "new"
    return PromptChoice(at.worker, at.prefix, at.queue_s, 0.0, prefill_s, ttft_s, reason)


def _fetching(asked: Question, at: WorkerMatch, holder: WorkerMatch) -> PromptChoice:
    moved = holder.sendable - at.prefix
    transfer_s = asked.transfer_s(holder.worker, at.worker, moved)
    prefill_s = asked.prefill_s(asked.tokens, holder.sendable)
    fill_s = asked.fill_s(asked.tokens, holder.sendable, prefill_s) if asked.fill_s else 0.0
    return PromptChoice(
        at.worker,
        holder.sendable,
        at.queue_s,
        transfer_s,
        prefill_s,
        transfer_s + max(at.queue_s, fill_s) + prefill_s,
        "remote match",
        holder.worker,
        moved,
    )
