"""Debts that cancel out: cycles, thresholds, and that no instance has more or less after a settlement."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lamina.lending.debt_graph import Settlement, settled_debts, settlements

HAND = {("A", "B"): 5, ("B", "C"): 3, ("C", "A"): 4}


def test_the_example_by_hand() -> None:
    """A owes B 5 blocks, B owes C 3, C owes A 4, and no instance moves fewer than 2."""
    (settlement,) = settlements(HAND, dict.fromkeys("ABC", 2), random.Random(0))
    assert sorted(settlement.pairs) == sorted(HAND)
    assert settlement.blocks == 3
    assert settled_debts(HAND, settlement) == {("A", "B"): 2, ("B", "C"): 0, ("C", "A"): 1}
    home = 10
    for node in "ABC":  # of each: what it has at home and on loan
        lent = {end: sum(n for (_, c), n in debts.items() if c == node) for end, debts in _both(settlement).items()}
        owed = {end: sum(n for (d, _), n in debts.items() if d == node) for end, debts in _both(settlement).items()}
        data = home - lent["before"] + owed["before"]
        assert home - lent["after"] + owed["after"] == data, f"{node}: what it gives back fits into what comes back"


def _both(settlement: Settlement) -> dict[str, dict[tuple[str, str], int]]:
    return {"before": HAND, "after": settled_debts(HAND, settlement)}


def test_nothing_is_settled_below_a_threshold() -> None:
    assert settlements(HAND, {"B": 4}, random.Random(0)) == []
    assert settlements(HAND, {"B": 3}, random.Random(0))[0].blocks == 3
    assert settlements({("A", "B"): 5, ("B", "C"): 5}, {}, random.Random(0)) == [], "no cycle"


def test_a_node_that_wants_more_stops_no_other_cycle() -> None:
    debts = {**HAND, ("A", "D"): 9, ("D", "A"): 8}
    assert {(s.blocks, len(s.members)) for s in settlements(debts, {"D": 9}, random.Random(0))} == {(3, 3)}
    assert {(s.blocks, len(s.members)) for s in settlements(debts, {"D": 8}, random.Random(0))} == {(3, 3), (8, 2)}


GRAPHS = st.dictionaries(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda p: p[0] != p[1]), st.integers(1, 20), max_size=20
)


@given(GRAPHS, st.lists(st.integers(1, 8), min_size=7, max_size=7), st.integers())
def test_each_settlement_is_a_cycle_that_all_want_and_none_is_left(
    numbered: dict[tuple[int, int], int], least: list[int], seed: int
) -> None:
    debts, thresholds = (
        {(str(d), str(c)): n for (d, c), n in numbered.items()},
        {str(i): n for i, n in enumerate(least)},
    )
    left = dict(debts)
    for settlement in settlements(debts, thresholds, random.Random(seed)):
        assert len(set(settlement.members)) == len(settlement.members) >= 2
        assert settlement.blocks >= max(thresholds[n] for n in settlement.members)
        left = settled_debts(left, settlement)
        assert min(left.values()) >= 0
    for node in thresholds:
        net = [sum(n for (d, c), n in g.items() if c == node) - sum(n for (d, c), n in g.items() if d == node)
               for g in (debts, left)]  # fmt: skip
        assert net[0] == net[1]
    assert not _any_cycle(left, thresholds)


def _any_cycle(debts: dict[tuple[str, str], int], thresholds: dict[str, int]) -> bool:
    """Finds cycles in another way: nodes without a creditor go, again and again; each node that is left lies on a cycle
    or before one.
    """
    for level in set(thresholds.values()):
        nodes = {n for n, least in thresholds.items() if least <= level}
        edges = {(d, c) for (d, c), n in debts.items() if n >= level and {d, c} <= nodes}
        while ends := {n for n in nodes if not any(d == n for d, _ in edges)}:
            nodes -= ends
            edges = {(d, c) for d, c in edges if c in nodes}
        if nodes:
            return True
    return False
