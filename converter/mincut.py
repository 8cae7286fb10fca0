"""Minimum vertex cut of a graph with weights and ordering rules, on plain hashables. ``plan`` sets the weights."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

import networkx as nx
from networkx.algorithms.flow import dinitz

N = TypeVar("N", bound=Hashable)

_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class CutProblem(Generic[N]):
    """The choice of values to carry over a boundary in time, so that everything needed after it can be computed there.

    capacity: price of carrying a node's value, once for all of its consumers; None if it cannot be carried.
    edges: (producer, consumer) pairs between nodes of ``capacity``.
    before: have run when the boundary is reached.
    after: run after the boundary and cannot run before it, like the nodes that depend on them (also in ``after``).
    needed: their values are read after the boundary.
    once: run on one side only; any other node may run on both.
    """

    capacity: Mapping[N, int | None]
    edges: Collection[tuple[N, N]]
    before: Set[N]
    after: Set[N]
    needed: Set[N]
    once: Set[N]


@dataclass(frozen=True)
class MinCut(Generic[N]):
    """The cheapest set of values to carry and its total price."""

    nodes: frozenset[N]
    value: int


def min_cut(problem: CutProblem[N]) -> MinCut[N] | None:
    """Return the cheapest cut; among equal ones the one with the least work after the boundary. None if there is none.

    A node v is the edge v_in -> v_out of its price. Data flows over edges without limit, so a value with many consumers
    is paid once. The side of v_in shows when v runs, the side of v_out whether its value must still exist afterwards
    (Ford and Fulkerson's vertex-capacity construction). Among all minimum cuts the smallest sink side is unique, so the
    result does not depend on the order of the input.
    """
    used = _leading_to(set(problem.needed) | problem.after, problem.edges)
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for node in used:
        price = problem.capacity[node]
        limit = {} if price is None else {"capacity": price}
        network.add_edge((node, "in"), (node, "out"), **limit)
    for producer, consumer in problem.edges:
        if consumer not in used:
            continue
        network.add_edge((producer, "out"), (consumer, "in"))
        if producer in problem.once:  # a consumer that runs before the boundary drags it there
            network.add_edge((consumer, "in"), (producer, "in"))
    network.add_edges_from((_SOURCE, (node, "in")) for node in problem.before & used)
    network.add_edges_from(((node, "in"), _SINK) for node in problem.after)
    network.add_edges_from(((node, "out"), _SINK) for node in problem.needed)
    try:
        value, (early, _) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=dinitz)
    except nx.NetworkXUnbounded:
        return None
    carried = frozenset(n for n in used if (n, "in") in early and (n, "out") not in early)
    return MinCut(carried, int(value))


def _leading_to(goals: Set[N], edges: Collection[tuple[N, N]]) -> set[N]:
    """Return ``goals`` and the nodes from which they are made: no other node has to run."""
    producers: dict[N, list[N]] = {}
    for producer, consumer in edges:
        producers.setdefault(consumer, []).append(producer)
    reached, stack = set(goals), list(goals)
    while stack:
        new = [p for p in producers.get(stack.pop(), ()) if p not in reached]
        reached.update(new)
        stack += new
    return reached
