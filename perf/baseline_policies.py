"""Routing policies of other projects, for comparison in simulations. None of them transfers pages.

- ``sglang``: ``cache_aware`` of its router, with the documented defaults. If the loads differ by more than 64 requests
  and by 1.5 times, it takes the worker with the fewest requests. Else it takes the longest prefix, if that is above 0.3
  of the prompt. Else it takes the worker with the fewest pages.
- ``production-stack``: ``kvaware`` of its router. It takes the longest prefix, if that lacks at most 2,000 tokens. Else
  it takes the least busy worker, there by requests per second, here by waiting requests.
"""

from __future__ import annotations

from lamina.scheduler.conductor.routing import Policy, RoutingDecision, RoutingQuery, WorkerMatch, without_transfer

IMBALANCE, IMBALANCE_RATIO, MATCH = 64, 1.5, 0.3
MAX_MISSING_TOKENS = 2000


def sglang(query: RoutingQuery) -> RoutingDecision:
    """The longest prefix if loads are balanced, else the lowest load."""
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
    """The worker with nearly the whole prompt, however long its queue is."""
    best = max(query.workers, key=lambda at: at.prefix)
    if best.prefix and best.prefix >= query.tokens - MAX_MISSING_TOKENS:
        return without_transfer(query, best)
    return without_transfer(query, _idlest(query))._replace(reason="fewest prompts")


BASELINE_POLICIES: dict[str, Policy] = {"sglang": sglang, "production-stack": production_stack}


def _idlest(query: RoutingQuery) -> WorkerMatch:
    return min(query.workers, key=lambda at: at.waiting)
