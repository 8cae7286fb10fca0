"""Minimum vertex cut of a weighted graph with ordering rules. Plain hashables in, plain hashables out."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True)
class CutProblem(Generic[N]):
    """Which values to carry over a boundary in time, so that everything needed after it can be computed there.

    capacity: price of carrying a node's value, once for all of its consumers; None if it cannot be carried.
    edges: (producer, consumer) pairs between nodes of ``capacity``.
    before: have run when the boundary is reached.
    after: run after the boundary and cannot run before it, nor can what they lead to (which is in ``after`` too).
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
    """The cheapest cut; among equal ones the one that leaves the least to do after the boundary. None if there is none.

    A node v is the edge v_in -> v_out of its price, data flows over edges of no limit, so a value with many consumers
    is paid once. The side of v_in says when v runs, the side of v_out whether its value must still be there afterwards
    (Ford and Fulkerson's vertex-capacity construction). The sink's side of all minimum cuts is unique when smallest,
    hence the answer does not depend on the order of the input.
    """
    used = _leading_to(set(problem.needed) | problem.after, problem.edges)
    network = _Network()
    runs = {node: network.add_node() for node in used}  # v_in
    there = {node: network.add_node() for node in used}  # v_out
    for node in used:
        price = problem.capacity[node]
        network.add_edge(runs[node], there[node], math.inf if price is None else price)
    for producer, consumer in problem.edges:
        if consumer not in used:
            continue
        network.add_edge(there[producer], runs[consumer])
        if producer in problem.once:  # a consumer that runs before the boundary drags it there
            network.add_edge(runs[consumer], runs[producer])
    for node in problem.before & used:
        network.add_edge(_SOURCE, runs[node])
    for node in problem.after:
        network.add_edge(runs[node], _SINK)
    for node in problem.needed:
        network.add_edge(there[node], _SINK)
    value = network.fill()
    if math.isinf(value):
        return None
    late = network.leading_to_sink()
    return MinCut(frozenset(n for n in used if runs[n] not in late and there[n] in late), int(value))


class _Network:
    """Edges with room for a flow from _SOURCE to _SINK, beside each its way back (Edmonds and Karp's algorithm)."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # by node: the numbers of edges that leave it
        self._ends: list[int] = []  # by edge: the node that it leads to; its way back is edge ^ 1
        self._room: list[float] = []  # by edge

    def add_node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, start: int, end: int, room: float = math.inf) -> None:
        self._edges[start].append(len(self._ends))
        self._edges[end].append(len(self._ends) + 1)
        self._ends += end, start
        self._room += room, 0

    def fill(self) -> float:
        """The greatest flow, which it leaves in the network; infinity where nothing limits it."""
        value: float = 0
        while path := self._shortest():
            room = min(self._room[edge] for edge in path)
            if math.isinf(room):
                return room
            for edge in path:
                self._room[edge] -= room
                self._room[edge ^ 1] += room
            value += room
        return value

    def _shortest(self) -> list[int]:
        """The edges of a shortest way to the sink that all have room, the last one first; empty where there is none."""
        came = {_SOURCE: -1}  # by node: the edge on which it was reached
        for node in (queue := [_SOURCE]):
            for edge in self._edges[node]:
                if self._room[edge] and (end := self._ends[edge]) not in came:
                    came[end] = edge
                    queue.append(end)
            if _SINK in came:
                break
        path: list[int] = []
        node = _SINK
        while (edge := came.get(node, -1)) >= 0:
            path.append(edge)
            node = self._ends[edge ^ 1]
        return path

    def leading_to_sink(self) -> set[int]:
        """The nodes from which something more could flow to the sink."""
        reached = {_SINK}
        for node in (queue := [_SINK]):
            new = {self._ends[edge] for edge in self._edges[node] if self._room[edge ^ 1]} - reached
            reached |= new
            queue += new
        return reached


def _leading_to(goals: Set[N], edges: Collection[tuple[N, N]]) -> set[N]:
    """``goals`` and all that they are made from: nothing else has to run."""
    producers: dict[N, list[N]] = {}
    for producer, consumer in edges:
        producers.setdefault(consumer, []).append(producer)
    reached, stack = set(goals), list(goals)
    while stack:
        new = [p for p in producers.get(stack.pop(), ()) if p not in reached]
        reached.update(new)
        stack += new
    return reached
