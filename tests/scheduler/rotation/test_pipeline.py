"""The rotational pipeline as a plan: conflicts, order, steady state, distance from the lower bound."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation_plan import PipelinePlan, rotation

from lamina.scheduler.rotation.pipeline import num_replicas, replica_of, route

FACTOR = 3.0  # no input was found beyond 2.5
EPS = 1e-9

times = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@st.composite
def inputs(draw: st.DrawFn) -> tuple[int, list[float], list[float], int, float]:
    layers = draw(st.integers(1, 6))
    slices = draw(st.lists(st.floats(0.01, 10.0), min_size=layers, max_size=layers))
    attention = draw(st.lists(times, min_size=layers, max_size=layers))
    return draw(st.integers(1, 8)), slices, attention, draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.3]))


def spans(plan: PipelinePlan) -> dict[str, list[tuple[float, float]]]:
    """Device -> when it is busy."""
    found = defaultdict(list)
    for e in plan.events:
        found[f"replica {e.replica}"].append((e.start, e.end))
        found["memory"].append((e.attention_start, e.attention_end))
    return found


@given(inputs())
@settings(max_examples=150, deadline=None)
def test_nothing_is_double_booked_and_order_is_kept(
    case: tuple[int, list[float], list[float], int, float],
) -> None:
    n, slices, attention, tokens, network = case
    plan = rotation(n, slices, attention, tokens, network)
    assert len(plan.events) == n * tokens * len(slices)
    assert len(spans(plan)) <= num_replicas(n) + 1
    for device, busy in spans(plan).items():
        for (_, end), (start, _) in pairwise(sorted(busy)):
            assert start >= end - EPS, f"{device} does two things at {start}"
    for batch in range(n):
        mine = [e for e in plan.events if e.batch == batch]
        assert [(e.token, e.slice) for e in mine] == [(t, k) for t in range(tokens) for k in range(len(slices))]
        for turn, e in enumerate(mine):
            assert e.replica == (batch + turn) % max(1, n - 1) + 1
            assert e.end - e.start == pytest.approx(slices[e.slice])
            assert e.attention_end - e.attention_start == pytest.approx(attention[e.slice])
            assert e.attention_start >= e.end + network / 2 - EPS
        for before, after in pairwise(mine):
            assert after.start >= before.attention_end + network / 2 - EPS
    assert plan.lower_bound <= plan.makespan + network / 2 * len(slices) + EPS
    assert plan.makespan <= FACTOR * plan.lower_bound + EPS
    assert all(0.0 <= u <= 1.0 + EPS for u in plan.utilisation.values())


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("layers", [1, 3, 8])
def test_equal_slices_in_balance_keep_both_pools_busy(n: int, layers: int) -> None:
    plan = rotation(n, [float(n - 1)] * layers, [1.0] * layers, tokens=6)
    for e in plan.events:
        turn = e.token * layers + e.slice
        assert e.start == e.batch + turn * n
        assert e.attention_start == e.batch + turn * n + n - 1
    assert plan.utilisation == {"compute": pytest.approx(1.0), "memory": pytest.approx(1.0)}


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4), st.floats(0.01, 10.0), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_a_single_batch_keeps_one_pool_busy_at_a_time(slices: list[float], ta: float, tokens: int) -> None:
    plan = rotation(1, slices, [ta] * len(slices), tokens)
    share = sum(slices) / (sum(slices) + ta * len(slices))
    assert plan.utilisation == {"compute": pytest.approx(share), "memory": pytest.approx(1.0 - share)}


def test_out_of_balance_the_busier_pool_is_the_limit() -> None:
    slow_memory = rotation(3, [2.0] * 4, [2.0] * 4, tokens=20)
    assert slow_memory.utilisation["memory"] == pytest.approx(1.0)
    assert slow_memory.utilisation["compute"] < 0.6
    alone = rotation(1, [2.0] * 4, [1.0] * 4, tokens=5)
    assert alone.makespan == pytest.approx(5 * 4 * 3.0)


def test_two_batches_stay_on_one_replica() -> None:
    assert {replica_of(j, k, 2) for j in range(2) for k in range(50)} == {1}
    assert {replica_of(j, k, 1) for j in range(1) for k in range(50)} == {1}


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_more_replicas_than_the_batches_need_all_take_turns(layers: int) -> None:
    for step in range(4):
        ways = [route(batch, step, layers, 2, replicas=3) for batch in range(2)]
        for (source, reply_to), (other, _) in (ways, ways[::-1]):
            assert source[1:] == reply_to[:-1]
            assert not any(a == b for a, b in zip(source, other, strict=True)), "side by side"
            assert reply_to[-1] == (source[-1] + 1) % 3
    assert route(0, 0, layers, 2, replicas=1) == ([], []) == route(0, 0, layers, 2)
