"""The rotation of n batches over n - 1 replicas as a plan, for given times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina.scheduler.rotation.pipeline import lower_bound, num_replicas, replica_of


@dataclass(frozen=True)
class PlannedSlice:
    """One turn. ``slice`` counts within its token, ``replica`` from 1. Times have the unit of the plan's input."""

    batch: int
    token: int
    slice: int
    replica: int
    start: float
    end: float
    attention_start: float
    attention_end: float


@dataclass(frozen=True)
class PipelinePlan:
    """``events``: in the order of service. ``utilisation``: the busy share of each pool while all batches run."""

    n: int
    events: list[PlannedSlice]
    makespan: float
    lower_bound: float
    utilisation: dict[str, float]


def rotation(
    n: int,
    slice_s: Sequence[float],
    attention_s: Sequence[float],
    tokens: int,
    network_s: float = 0.0,
    replicas: int = 0,
) -> PipelinePlan:
    """Plan ``tokens`` tokens of n batches.

    ``slice_s[k]``, ``attention_s[k]``: the time of slice k, and of its attention. The first slice of a token includes
    the last one of the previous token, and sampling. ``network_s``: the time that a turn waits for the network, in both
    directions, without what overlaps; half of it comes before its attention. ``replicas``: see ``replica_of``.
    """
    layers = len(slice_s)
    replicas = replicas or num_replicas(n)
    replica_free = [0.0] * replicas
    ready = [0.0] * n  # when a batch's O is back
    pool_free = 0.0
    events = []
    for turn in range(tokens * layers):
        for batch in range(n):
            replica, k = replica_of(batch, turn, n, replicas), turn % layers
            start = max(ready[batch], replica_free[replica - 1])
            if turn == 0:  # the stagger: no sooner than the memory workers can take its Q
                start = max(start, pool_free - network_s / 2 - slice_s[0])
            end = replica_free[replica - 1] = start + slice_s[k]
            begins = max(end + network_s / 2, pool_free)
            pool_free = begins + attention_s[k]
            ready[batch] = pool_free + network_s / 2
            events.append(PlannedSlice(batch, turn // layers, k, replica, start, end, begins, pool_free))
    return PipelinePlan(
        n,
        events,
        max(e.attention_end for e in events),
        tokens * lower_bound(n, slice_s, attention_s, network_s, replicas),
        {
            "compute": _busy(events, lambda e: (e.start, e.end), n, replicas),
            "memory": _busy(events, lambda e: (e.attention_start, e.attention_end), n, 1),
        },
    )


def _busy(events: list[PlannedSlice], span: Callable[[PlannedSlice], tuple[float, float]], n: int, units: int) -> float:
    """Busy share of ``units`` from the first attention of the last batch to the last slice of the first batch."""
    first = next(e for e in events if e.batch == n - 1).attention_start
    last = next(e for e in reversed(events) if e.batch == 0).start
    if n == 1 or last <= first:  # a single batch is always under way; or too few tokens for a steady state
        first, last = 0.0, max(e.attention_end for e in events)
    busy = sum(max(0.0, min(stop, last) - max(start, first)) for start, stop in map(span, events))
    return busy / (units * (last - first)) if last > first else 0.0
