"""Debts among instances as a directed graph, and their settlement by cycles (DGFM, arXiv 2401.02669 section 4.4).

If A owes B, B owes C, and C owes A, each can give back as much as the smallest of these debts. Each instance moves its
data into its own blocks, which it gets back, so no instance has more or less space than before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

DebtGraph = Mapping[tuple[str, str], int]  # (debtor, creditor) -> blocks


class Settlement(NamedTuple):
    """A cycle in which each of ``members`` gives ``blocks`` blocks back to the next one, the last one to the first."""

    members: tuple[str, ...]
    blocks: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of debtor and creditor."""
        return list(zip(self.members, self.members[1:] + self.members[:1], strict=True))


def settlements(debts: DebtGraph, thresholds: Mapping[str, int], rng: random.Random) -> list[Settlement]:
    """Return cycles that can be settled one after the other, each found by a random walk, until no cycle is worth it
    for all its nodes. ``thresholds``: the fewest blocks that a node gives back at a time; 1 if it is not listed.
    """
    left, agreed = dict(debts), list[Settlement]()
    for level in sorted({1, *thresholds.values()}):
        while cycle := _cycle(_worth(left, thresholds, level), rng):
            settlement = Settlement(cycle, 0)
            blocks = min(left[pair] for pair in settlement.pairs)
            agreed.append(settlement._replace(blocks=blocks))
            left = settled_debts(left, agreed[-1])
    return agreed


def settled_debts(debts: DebtGraph, settlement: Settlement) -> dict[tuple[str, str], int]:
    """Return the debts after the settlement; debts of 0 stay listed."""
    left = dict(debts)
    for pair in settlement.pairs:
        left[pair] -= settlement.blocks
    return left


def _worth(debts: DebtGraph, thresholds: Mapping[str, int], level: int) -> dict[str, list[str]]:
    """Return debtor -> creditors, for debts of at least ``level`` among nodes whose thresholds are not above it.

    Every cycle in this graph is acceptable to all its nodes. Every cycle acceptable to all its nodes is found at some
    level.
    """
    graph: dict[str, list[str]] = {}
    for (debtor, creditor), blocks in sorted(debts.items()):
        if blocks >= level and all(thresholds.get(n, 1) <= level for n in (debtor, creditor)):
            graph.setdefault(debtor, []).append(creditor)
    return graph


def _cycle(graph: Mapping[str, list[str]], rng: random.Random) -> tuple[str, ...]:
    """Return some directed cycle, by depth-first walks from nodes in random order; empty if there is none."""
    starts = sorted(graph)
    rng.shuffle(starts)
    done: set[str] = set()
    for start in starts:
        if cycle := _walk(graph, start, done, rng):
            return cycle
    return ()


def _walk(graph: Mapping[str, list[str]], start: str, done: set[str], rng: random.Random) -> tuple[str, ...]:
    """Walk from ``start``. ``done``: nodes from which no cycle is reached; grows."""
    path, ways = [start], [_ways(graph, start, rng)]
    while path:
        nxt = next(ways[-1], None)
        if nxt is None:
            done.add(path.pop())
            ways.pop()
        elif nxt in path:
            return tuple(path[path.index(nxt) :])
        elif nxt not in done:
            path.append(nxt)
            ways.append(_ways(graph, nxt, rng))
    return ()


def _ways(graph: Mapping[str, list[str]], node: str, rng: random.Random) -> Iterator[str]:
    ways = list(graph.get(node, ()))
    rng.shuffle(ways)
    return iter(ways)
