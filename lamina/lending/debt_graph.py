"""The cycles of debts among instances. No engine makes one: it lends nothing while it borrows."""

from __future__ import annotations

from collections.abc import Mapping

import networkx

from .lending_messages import DebtCycle


def debt_cycles(debts: Mapping[tuple[str, str], int]) -> list[DebtCycle]:
    """Return cycles of debts, each without the debts that earlier ones have taken. ``debts``: (debtor, creditor) ->
    blocks.
    """
    graph, cycles = networkx.DiGraph(), list[DebtCycle]()
    graph.add_weighted_edges_from((*pair, blocks) for pair, blocks in sorted(debts.items()))
    while True:
        try:
            pairs = networkx.find_cycle(graph)
        except networkx.NetworkXNoCycle:
            return cycles
        blocks = min(graph.edges[pair]["weight"] for pair in pairs)
        cycles.append(DebtCycle(tuple(debtor for debtor, _ in pairs), blocks))
        for pair in pairs:
            graph.edges[pair]["weight"] -= blocks
        graph.remove_edges_from([pair for pair in pairs if not graph.edges[pair]["weight"]])
