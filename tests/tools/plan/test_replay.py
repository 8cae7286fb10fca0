"""The engine's own scheduler on a virtual clock, in the time of the cost model.

Covers: lamina/tools/request_traces.py.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from planned import even, planner

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.ranking import MeanStoredTokens
from lamina.tools.plan.replay import replay
from lamina.tools.request_traces import RequestTrace, TracedRequest, spread_arrivals

ALONE, SPLIT = Deployment(DEVICES["h100"], 4), Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, 2)


def uneven(count: int) -> RequestTrace:
    rng = random.Random(7)
    return RequestTrace(
        "uneven", tuple(TracedRequest(0.0, rng.randint(500, 9000), rng.randint(5, 40)) for _ in range(count))
    )


def test_it_is_close_to_the_closed_form_where_requests_are_alike() -> None:
    mine, trace = planner(), even(240, 14_000, 60)
    found = replay(mine.costs, mine.memory, ALONE, trace)
    point = mine.operating_point(ALONE, MeanStoredTokens(trace, mine.costs.model))
    assert found.batch == pytest.approx(point.batch, rel=0.15)  # type: ignore[union-attr]
    assert found.tbt_p50_s == pytest.approx(point.tbt_s, rel=0.1)  # type: ignore[union-attr]


@pytest.mark.long(but=["split"])
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


def bursts(count: int) -> RequestTrace:
    """So many requests a minute, all in its first tick of 3 s."""
    return RequestTrace("bursts", tuple(TracedRequest(60.0 * (i // 40), 2000, 150) for i in range(count)))


def test_a_burst_shows_in_the_99th_percentile() -> None:
    """A few requests at a time, and then many at once: their rounds are longer than the mean."""
    mine = planner()
    calm = tuple(TracedRequest(0.9 * i, 2000, 100) for i in range(200))
    crowd = tuple(TracedRequest(181.0, 2000, 40) for _ in range(250))
    found = replay(mine.costs, mine.memory, ALONE, RequestTrace("burst", calm + crowd), paced=True)
    assert found.tbt_p99_s > 1.3 * found.tbt_p50_s


def test_requests_come_when_they_came() -> None:
    mine, trace = planner(), bursts(120)
    paced, waiting = (replay(mine.costs, mine.memory, SPLIT, trace, most=24, paced=p) for p in (True, False))
    assert paced.seconds > 60
    assert waiting.seconds < 60


def test_ticks_are_spread() -> None:
    """Files that know the time to 3 s only: who came in a tick came somewhere in it. Others stay where they are."""
    ticks = RequestTrace("ticks", tuple(TracedRequest(3.0 * (i // 50), 10, 10) for i in range(500)))
    spread = spread_arrivals(ticks, seed=1)
    assert spread == spread_arrivals(ticks, seed=1) != spread_arrivals(ticks, seed=2)
    times = [r.at_s for r in spread.requests]
    assert times == sorted(times)
    assert len(set(times)) == 500
    assert all(0 <= new - 3.0 * (i // 50) < 3.0 for i, new in enumerate(times))
    exact = RequestTrace("exact", tuple(TracedRequest(i**1.5, 10, 10) for i in range(50)))
    assert spread_arrivals(exact, seed=1) == exact


def test_a_load_on_the_host_changes_no_bit() -> None:
    mine, trace = planner(), bursts(80)
    alone = replay(mine.costs, mine.memory, SPLIT, trace, paced=True)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert repr(replay(mine.costs, mine.memory, SPLIT, trace, paced=True)) == repr(alone)
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.long
def test_a_thousand_workers() -> None:
    mine, trace = planner(), bursts(80)
    found = replay(mine.costs, mine.memory, Deployment(DEVICES["h100"], 8, DEVICES["h20"], 1000), trace, paced=True)
    assert found.tokens > 0


def test_decoding_alone_has_no_rows_of_prompts() -> None:
    """The rows of a round are its running sequences, and all its tokens are drawn; prompts that are computed show."""
    mine, trace = planner("llama-65b"), uneven(120)
    alone, beside = (replay(mine.costs, mine.memory, SPLIT, trace, most=24, chunk=chunk) for chunk in (0, 512))
    assert alone.batch <= 24
    assert beside.batch <= 24
    assert beside.seconds > 2 * alone.seconds
    assert beside.rounds > 120 * 4000 / (2 * 512)


def test_a_token_waits_for_room() -> None:
    """No request waits for the first token where there is room; all but some do in a burst."""
    mine = planner("llama-65b")
    rare, crowd = (
        RequestTrace("x", tuple(TracedRequest(step * i, 8000, 30) for i in range(80))) for step in (5.0, 0.001)
    )
    calm, busy = (replay(mine.costs, mine.memory, ALONE, t, paced=True) for t in (rare, crowd))
    assert calm.first_p99_s < 0.1 < busy.first_p50_s < busy.first_p99_s


def test_progress_is_told() -> None:
    seen = list[tuple[int, int]]()
    mine, trace = planner("llama-65b"), uneven(120)
    replay(mine.costs, mine.memory, SPLIT, trace, most=24, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert 0 <= seen[0][0] < seen[-1][0] <= seen[-1][1] == sum(r.answer for r in trace.requests)
