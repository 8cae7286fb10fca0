"""Cycles of debts: each is one, and none is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.lending.debt_graph import debt_cycles


def test_the_example_by_hand() -> None:
    """A owes B 5 blocks, B owes C 3, C owes A 4; what D owes and is owed is in no cycle."""
    (cycle,) = debt_cycles({("A", "B"): 5, ("B", "C"): 3, ("C", "A"): 4, ("D", "A"): 9, ("B", "E"): 9})
    first = cycle.members.index("A")
    assert cycle.members[first:] + cycle.members[:first] == ("A", "B", "C")
    assert cycle.blocks == 3
    assert debt_cycles({("A", "B"): 5, ("B", "C"): 5}) == []
    assert debt_cycles({}) == []


GRAPHS = st.dictionaries(
    st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda p: p[0] != p[1]), st.integers(1, 20), max_size=20
)


@given(GRAPHS)
def test_each_cycle_is_one_of_debts_and_none_is_left(numbered: dict[tuple[int, int], int]) -> None:
    left = {(str(d), str(c)): n for (d, c), n in numbered.items()}
    for cycle in debt_cycles(left):
        assert len(set(cycle.members)) == len(cycle.members) >= 2
        assert cycle.blocks >= 1
        for pair in zip(cycle.members, cycle.members[1:] + cycle.members[:1], strict=True):
            left[pair] -= cycle.blocks
            assert left[pair] >= 0
    assert not _any_cycle({pair for pair, blocks in left.items() if blocks})


def _any_cycle(edges: set[tuple[str, str]]) -> bool:
    """Finds cycles in another way: debts to nodes that owe nothing go, again and again."""
    while ends := {(d, c) for d, c in edges if not any(c == debtor for debtor, _ in edges)}:
        edges = edges - ends
    return bool(edges)
