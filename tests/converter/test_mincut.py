"""The minimum cut against an independent solver and against all possible cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.converter.mincut import CutProblem, min_cut

_UNLIMITED = 10**6


@st.composite
def problems(draw: st.DrawFn, most: int = 8) -> CutProblem[int]:
    """Random DAGs with rules that do not contradict each other."""
    size = draw(st.integers(2, most))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = [p for p in pairs if draw(st.booleans())]
    after = set(draw(st.sets(st.integers(0, size - 1), max_size=2)))
    for a, b in edges:
        if a in after:
            after.add(b)
    roots = {n for n in range(size) if all(b != n for _, b in edges)}
    before = (draw(st.sets(st.integers(0, size - 1))) | roots) - after
    price = st.one_of(st.none(), st.integers(1, 9))
    return CutProblem(
        capacity={n: draw(price) for n in range(size)},
        edges=[(a, b) for a, b in edges if b not in before],
        before=before,
        after=after,
        needed=draw(st.sets(st.integers(0, size - 1), min_size=1)),
        once=draw(st.sets(st.integers(0, size - 1))),
    )


def _closure(problem: CutProblem[int], roots: set[int], stop: set[int]) -> set[int]:
    done: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in done:
            done.add(node)
            stack += [a for a, b in problem.edges if b == node and node not in stop and a not in done]
    return done


def _late(problem: CutProblem[int], carried: set[int]) -> set[int]:
    """Returns what has to run after the boundary if ``carried`` is all that crosses it."""
    return _closure(problem, set(problem.needed) | set(problem.after), carried) - carried


def _is_valid(problem: CutProblem[int], carried: set[int]) -> bool:
    early = _closure(problem, set(problem.before) | carried, set(problem.before))
    late = _late(problem, carried)
    return not (early & problem.after or late & problem.before or early & late & problem.once)


def _price(problem: CutProblem[int], carried: set[int]) -> int:
    return sum(problem.capacity[n] or 0 for n in carried)


def _all_valid(problem: CutProblem[int]) -> list[set[int]]:
    payable = [n for n, price in problem.capacity.items() if price is not None]
    subsets = (set(c) for k in range(len(payable) + 1) for c in combinations(payable, k))
    return [s for s in subsets if _is_valid(problem, s)]


@given(problems())
@settings(max_examples=100, deadline=None)
def test_cut_is_the_cheapest_of_all_and_leaves_least_to_do(problem: CutProblem[int]) -> None:
    cut, valid = min_cut(problem), _all_valid(problem)
    if not valid:
        assert cut is None
        return
    assert cut is not None
    cheapest = min(_price(problem, s) for s in valid)
    assert _is_valid(problem, set(cut.nodes))
    assert cut.value == _price(problem, set(cut.nodes)) == cheapest
    equal = [s for s in valid if _price(problem, s) == cheapest]
    assert len(_late(problem, set(cut.nodes))) == min(len(_late(problem, s)) for s in equal)


def _flow(problem: CutProblem[int]) -> int:
    from scipy.sparse import csgraph, csr_array

    size = len(problem.capacity)
    source, sink = 2 * size, 2 * size + 1
    limits = np.zeros((2 * size + 2, 2 * size + 2), dtype=np.int32)
    used = _closure(problem, set(problem.needed) | set(problem.after), set())  # nothing else has to run
    for node, price in problem.capacity.items():
        limits[2 * node, 2 * node + 1] = _UNLIMITED if price is None else price
    for a, b in problem.edges:
        if b not in used:
            continue
        limits[2 * a + 1, 2 * b] = _UNLIMITED
        if a in problem.once:
            limits[2 * b, 2 * a] = _UNLIMITED
    for node in problem.before:
        limits[source, 2 * node] = _UNLIMITED
    for node in problem.after:
        limits[2 * node, sink] = _UNLIMITED
    for node in problem.needed:
        limits[2 * node + 1, sink] = _UNLIMITED
    return int(csgraph.maximum_flow(csr_array(limits), source, sink).flow_value)


@given(problems(most=25))
@settings(max_examples=60, deadline=None)
def test_value_is_the_maximum_flow_and_the_cut_separates(problem: CutProblem[int]) -> None:
    cut, flow = min_cut(problem), _flow(problem)
    if cut is None:
        assert flow >= _UNLIMITED
        return
    assert cut.value == flow == _price(problem, set(cut.nodes))
    assert _is_valid(problem, set(cut.nodes))


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_answer_does_not_depend_on_the_order_of_the_input(problem: CutProblem[int], random: object) -> None:
    nodes, edges = list(problem.capacity), list(problem.edges)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    random.shuffle(edges)  # type: ignore[attr-defined]
    assert min_cut(replace(problem, capacity={n: problem.capacity[n] for n in nodes}, edges=edges)) == min_cut(problem)


def test_a_value_with_many_consumers_is_paid_once() -> None:
    problem = CutProblem(
        capacity={"x": 5, "a": 3, "b": 3},
        edges=[("x", "a"), ("x", "b")],
        before={"x"},
        after=set(),
        needed={"a", "b"},
        once=set(),
    )
    cut = min_cut(problem)
    assert cut is not None
    assert (cut.nodes, cut.value) == ({"x"}, 5)


def test_work_marked_once_is_not_repeated() -> None:
    """y = gemm(x) is wanted early (it feeds z, which has run) and late: carrying cheap x would run the GEMM twice."""
    problem = CutProblem(
        capacity={"x": 1, "y": 7, "z": 9},
        edges=[("x", "y"), ("y", "z")],
        before={"x"},
        after=set(),
        needed={"y", "z"},
        once={"y"},
    )
    cut = min_cut(problem)
    assert cut is not None
    assert cut.nodes == {"x"}
    forced = min_cut(replace(problem, before={"x", "z"}, edges=[("x", "y"), ("y", "z")]))
    assert forced is not None
    assert forced.nodes == {"y", "z"}
