"""Rules by which others choose a worker, for rows of a simulation beside ours. None of them moves anything. Pure
policy: no torch, no I/O, no clock.

sglang            its router's cache_aware, by the defaults that it documents: where one worker has more than 64
                  requests more than another and 1.5 times as many, the one with the fewest; else who has more than 0.3
                  of the prompt, the most; else who has the most room
production-stack  its router's kvaware: who has all of the prompt but 2,000 tokens, the most; else the least busy one.
                  It goes by requests per second, here by those that wait
"""

from __future__ import annotations

from .routing import Policy, RoutingDecision, RoutingQuery, WorkerMatch, without_transfer

IMBALANCE, IMBALANCE_RATIO, MATCH = 64, 1.5, 0.3
MAX_MISSING_TOKENS = 2000


def sglang(query: RoutingQuery) -> RoutingDecision:
    """By matches where loads are alike, else by loads."""
    loads = [at.waiting for at in query.workers]
    if max(loads) - min(loads) > IMBALANCE and max(loads) > IMBALANCE_RATIO * min(loads):
        return without_transfer(query, _idlest(query))._replace(reason="fewest prompts")
    best = max(query.workers, key=lambda at: at.prefix)
    if best.prefix > MATCH * query.tokens:
        return without_transfer(query, best)
    return without_transfer(query, min(query.workers, key=lambda at: query.num_pages(at.worker)))._replace(
        reason="most room"
    )


def production_stack(query: RoutingQuery) -> RoutingDecision:
    """Whoever has nearly all of it, however many wait there."""
    best = max(query.workers, key=lambda at: at.prefix)
    if best.prefix and best.prefix >= query.tokens - MAX_MISSING_TOKENS:
        return without_transfer(query, best)
    return without_transfer(query, _idlest(query))._replace(reason="fewest prompts")


BASELINE_POLICIES: dict[str, Policy] = {"sglang": sglang, "production-stack": production_stack}


def _idlest(query: RoutingQuery) -> WorkerMatch:
    return min(query.workers, key=lambda at: at.waiting)
