"""The engine's own scheduler on a virtual clock, in the time of the cost model."""

from __future__ import annotations

import random

import pytest
from planned import even, planner

from lamina.facts.hardware import DEVICES
from lamina.planner.deployment import Deployment
from lamina.planner.rank import StoredTokens
from lamina.planner.replay import replay
from lamina.planner.traces import RequestTrace, TracedRequest

ALONE, SPLIT = Deployment(DEVICES["h100"], 4), Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, 2)


def uneven(count: int) -> RequestTrace:
    rng = random.Random(7)
    return RequestTrace(
        "uneven", tuple(TracedRequest(0.0, rng.randint(500, 9000), rng.randint(5, 40)) for _ in range(count))
    )


def test_it_is_close_to_the_closed_form_where_requests_are_alike() -> None:
    mine, trace = planner(), even(240, 14_000, 60)
    found = replay(mine.costs, mine.memory, ALONE, trace)
    point = mine.operate(ALONE, StoredTokens(trace, mine.costs.model))
    assert found.batch == pytest.approx(point.batch, rel=0.15)  # type: ignore[union-attr]
    assert found.tbt_p50_s == pytest.approx(point.tbt_s, rel=0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize("where", [ALONE, SPLIT], ids=["alone", "split"])
def test_the_same_trace_gives_the_same_numbers(where: Deployment) -> None:
    mine, trace = planner("llama-65b"), uneven(120)
    first, second = (replay(mine.costs, mine.memory, where, trace, most=24) for _ in range(2))
    assert first == second
    assert first.tokens > 0
    assert first.batch <= 24


def test_more_memory_runs_more_sequences() -> None:
    mine, trace = planner("llama-65b"), uneven(200)
    alone, split = (replay(mine.costs, mine.memory, d, trace) for d in (ALONE, SPLIT))
    assert 1.7 < split.batch / alone.batch < 2.5
    assert split.tbt_p50_s > alone.tbt_p50_s, "Lamina's time of a token is the longer one"


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="too few for a replay"):
        replay(planner().costs, planner().memory, ALONE, even(1, 100, 2))
