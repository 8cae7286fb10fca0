"""The rotational staggered pipeline (arXiv 2405.01814 section 4.3): which replica runs which slice, in which order.

n batches share max(1, n - 1) replicas of the weights and one pool of memory workers. A *turn* of a batch is one slice
on a replica and the attention after it. The last slice of a token, sampling and the first slice of the next token have
no attention between them, so they are one turn. With L attention operators a token is L turns; turns are counted over
all tokens. Turn k of batch j runs on replica (j + k) mod (n - 1) + 1. All turns are served in the order of j + k n.
With equal slices and t_m = (n - 1) t_a, a turn also starts at time j + k n, in units of t_a. Then both pools are always
busy. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence


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


def lower_bound(
    n: int, slice_s: Sequence[float], attention_s: Sequence[float], network_s: float = 0.0, replicas: int = 0
) -> float:
    """The lower bound of a token's time for n batches: memory pool, slices over the replicas, or one batch's chain."""
    slices, attention = sum(slice_s), sum(attention_s)
    chain = slices + attention + network_s * len(slice_s)
    return max(n * attention, n * slices / min(n, replicas or num_replicas(n)), chain)
