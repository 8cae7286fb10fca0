"""The rotational staggered pipeline (arXiv 2405.01814 section 4.3): which replica runs which slice, in which order.

n batches share max(1, n - 1) replicas of the weights and one pool of memory workers. A *turn* of a batch is one slice
on a replica and the attention after it. The last slice of a token, sampling and the first slice of the next token have
no attention between them, so they are one turn. With L attention operators a token is L turns; turns are counted over
all tokens. Turn k of batch j runs on replica (j + k) mod (n - 1) + 1. All turns are served in the order of j + k n.
With equal slices and t_m = (n - 1) t_a, a turn also starts at time j + k n, in units of t_a. Then both pools are always
busy. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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


def num_replicas(n: int) -> int:
    """Replicas that n batches rotate over."""
    return max(1, n - 1)


def replica_of(batch: int, turn: int, n: int, replicas: int = 0) -> int:
    """The replica, from 1, of turn ``turn`` of ``batch``; turns are counted over all tokens.

    ``replicas``: their number, if there are more than n batches need; all of them are used.
    """
    return (batch + turn) % (replicas or num_replicas(n)) + 1


def route(batch: int, step: int, layers: int, n: int, replicas: int = 0) -> tuple[list[int], list[int]]:
    """Returns, for a StepPlan, the replicas (from 0) that run each slice of a step, and those that receive each O.

    Both lists are empty with one replica. ``step`` counts rounds, so a batch that skipped rounds stays in phase.
    """
    if (replicas or num_replicas(n)) == 1:
        return [], []
    places = [replica_of(batch, step * layers + k, n, replicas) - 1 for k in range(layers + 1)]
    return places[:-1], places[1:]


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
    directions, without what overlaps; half of it comes before its attention. ``replicas``: see ``replica_of``. Raises
    ValueError for invalid numbers.
    """
    _check(n, slice_s, attention_s, tokens, network_s)
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


def lower_bound(
    n: int, slice_s: Sequence[float], attention_s: Sequence[float], network_s: float = 0.0, replicas: int = 0
) -> float:
    """The lower bound of a token's time for n batches: memory pool, slices over the replicas, or one batch's chain."""
    slices, attention = sum(slice_s), sum(attention_s)
    chain = slices + attention + network_s * len(slice_s)
    return max(n * attention, n * slices / min(n, replicas or num_replicas(n)), chain)


def _busy(events: list[PlannedSlice], span: Callable[[PlannedSlice], tuple[float, float]], n: int, units: int) -> float:
    """Busy share of ``units`` from the first attention of the last batch to the last slice of the first batch."""
    first = next(e for e in events if e.batch == n - 1).attention_start
    last = next(e for e in reversed(events) if e.batch == 0).start
    if n == 1 or last <= first:  # a single batch is always under way; or too few tokens for a steady state
        first, last = 0.0, max(e.attention_end for e in events)
    busy = sum(max(0.0, min(stop, last) - max(start, first)) for start, stop in map(span, events))
    return busy / (units * (last - first)) if last > first else 0.0


def _check(n: int, slice_s: Sequence[float], attention_s: Sequence[float], tokens: int, network_s: float) -> None:
    if n < 1:
        raise ValueError(f"--n must be at least 1, not {n}")
    if tokens < 1:
        raise ValueError(f"--tokens must be at least 1, not {tokens}")
    if not slice_s or len(slice_s) != len(attention_s):
        raise ValueError(f"{len(slice_s)} times of slices (--tm) for {len(attention_s)} of attention (--ta)")
    for name, values in (("--tm", slice_s), ("--ta", attention_s), ("--network", [network_s])):
        bad = next((v for v in values if not 0.0 <= v < float("inf")), None)
        if bad is not None:
            raise ValueError(f"{name} must be a time of at least 0, not {bad}")
    if not sum(slice_s) + sum(attention_s) > 0.0:
        raise ValueError("--tm and --ta must not both be 0")
