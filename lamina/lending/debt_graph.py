"""Debts among instances as a directed graph, and what of them cancels out (DGFM, arXiv 2401.02669 section 4.4).

Where A owes B, B owes C, and C owes A, each can give back as much as the least of these debts: everybody's blocks go
home into the space that comes back, and nobody has more or less than before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

DebtGraph = Mapping[tuple[str, str], int]  # (debtor, creditor) -> blocks


class Settlement(NamedTuple):
    """Each of ``members`` gives so many blocks back to the next one, the last one to the first."""

    members: tuple[str, ...]
    blocks: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Debtor and creditor."""
        return list(zip(self.members, self.members[1:] + self.members[:1], strict=True))


def settlements(debts: DebtGraph, thresholds: Mapping[str, int], rng: random.Random) -> list[Settlement]:
    """Cycles one after the other, each met on a walk from a node by chance, until there is none of which each node
    thinks the blocks worth it. ``thresholds``: the least that a node gives back at a time; 1 where it is not named.
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
    """What is left behind it; a debt of 0 stays named."""
    left = dict(debts)
    for pair in settlement.pairs:
        left[pair] -= settlement.blocks
    return left


def _worth(debts: DebtGraph, thresholds: Mapping[str, int], level: int) -> dict[str, list[str]]:
    """Debtor -> creditors, by debts of at least ``level``, among nodes that ask for no more than that: a cycle in it is
    one that all its nodes want, and one that all want is a cycle of some level's.
    """
    graph: dict[str, list[str]] = {}
    for (debtor, creditor), blocks in sorted(debts.items()):
        if blocks >= level and all(thresholds.get(n, 1) <= level for n in (debtor, creditor)):
            graph.setdefault(debtor, []).append(creditor)
    return graph


def _cycle(graph: Mapping[str, list[str]], rng: random.Random) -> tuple[str, ...]:
    """Some directed cycle, by a walk in depth from nodes in an order by chance; empty where there is none."""
    starts = sorted(graph)
    rng.shuffle(starts)
    done: set[str] = set()
    for start in starts:
        if cycle := _walk(graph, start, done, rng):
            return cycle
    return ()


def _walk(graph: Mapping[str, list[str]], start: str, done: set[str], rng: random.Random) -> tuple[str, ...]:
    """``done``: nodes from which no cycle is reached; grows."""
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
