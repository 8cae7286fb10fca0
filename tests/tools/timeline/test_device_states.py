"""The time by cause, from spans made by hand whose answer is known.

Covers: lamina/tools/timeline/analysis.py, lamina/tools/timeline/intervals.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.observe.trace import ENGINE, ClockOffset, Event, Recording, Span
from lamina.tools.timeline.analysis import analyse, hidden, recording_share, steps_of, stragglers
from lamina.tools.timeline.device_states import (
    BUSY,
    HOST,
    IDLE,
    IMBALANCE,
    NETWORK,
    SAMPLING,
    SCHEDULER,
    STATES,
    WAIT_KV,
    WAIT_O,
    WAIT_Q,
    SpanIndex,
    states,
    window,
)  # fmt: skip
from lamina.tools.timeline.intervals import Intervals, intersect, subtract, total, union

E = Event


def span(device: str, event: Event, start: float, end: float, layer: int = -1, peer: int = -1, step: int = 0) -> Span:
    return Span(device, event, 0, step, layer, peer, 0, start, end)


def lasts(spans: Sequence[Span], start: float, end: float) -> dict[str, dict[str, float]]:
    """Device -> state -> seconds, without the empty ones."""
    found = states(spans, start, end)
    return {d: {k: round(total(v), 9) for k, v in of.items() if v} for d, of in found.items()}


def one_layer() -> list[Span]:
    """A model of one attention on one memory worker, one step: 0 to 40. Sends take 1, messages fly for 0.5."""
    return [
        span("compute-0", E.WAIT_STEP, -5, 0),
        span("compute-0", E.SEND_PLAN, 0, 1, peer=0),
        span("compute-0", E.SLICE, 1, 11, 0),
        span("compute-0", E.SEND_Q, 4, 5, 0, 0),
        span("compute-0", E.SEND_KV, 10, 11, 0, 0),
        span("compute-0", E.WAIT_O, 11, 20, 0, 0),
        span("compute-0", E.RECEIVE_O, 20, 21, 0, 0),
        span("compute-0", E.SLICE, 21, 30, 1),
        span("compute-0", E.SAMPLE, 30, 34),
        span("compute-0", E.WAIT_STEP, 36, 40, step=1),
        span("memory-0", E.WAIT_PLAN, -5, 1.5),
        span("memory-0", E.PLAN, 1.5, 2),
        span("memory-0", E.WAIT_Q, 2, 5.5, 0, 0),
        span("memory-0", E.STORED, 5.5, 12.5, 0),
        span("memory-0", E.WAIT_KV, 12.5, 13, 0, 0),
        span("memory-0", E.WRITE, 13, 14, 0),
        span("memory-0", E.NEW, 14, 18, 0),
        span("memory-0", E.SEND_O, 18, 19, 0, 0),
        span("memory-0", E.WAIT_PLAN, 19, 40, step=1),
    ]


def test_a_memory_worker_waits_for_the_rank_that_sends_to_it() -> None:
    """Two ranks of one replica: the second one samples while memory worker 1 waits, the first one does nothing."""
    spans = [
        span("compute-0", E.SEND_Q, 0, 1, 0, 0),
        span("compute-1", E.SAMPLE, 0, 4),
        span("compute-1", E.SEND_Q, 4, 5, 0, 1),
        span("memory-0", E.WAIT_Q, 0, 1, 0, 0),
        span("memory-1", E.WAIT_Q, 0, 5, 0, 0),
    ]
    assert lasts(spans, 0, 5)["memory-1"] == {SAMPLING: 4, NETWORK: 1}


def test_one_layer_adds_up_by_hand() -> None:
    found = lasts(one_layer(), 0, 40)
    assert found["compute-0"] == {
        BUSY: 8 + 9,  # two slices without their sends
        NETWORK: 1 + 1 + 1 + 1 + 0.5 + 1 + 1,  # three sends and receive O, then KV in flight, send O, and O in flight
        WAIT_O: 11 + 7 - 11 - 0.5,  # 11 to 18, but for the flight of KV
        SAMPLING: 4,
        SCHEDULER: 4,
        HOST: 2,
    }
    assert found["memory-0"] == {
        BUSY: 7 + 1 + 4,
        SCHEDULER: 0.5 + 4,  # its plan; the compute worker waits for a step
        # The plan is sent, then flies. Q: sent 4 to 5, flies. KV flies, for what is left. O: sent, flies, is received.
        NETWORK: 1 + 0.5 + 1 + 0.5 + 0.5 + 1 + 1 + 1,
        WAIT_Q: 2 + 9 + 2,  # from 2 to 4, the last slice, and what was not recorded
        SAMPLING: 4,
    }


def test_late_kv_is_waited_for_as_kv() -> None:
    spans = [s for s in one_layer() if s.event not in (E.STORED, E.WAIT_KV)]
    spans += [span("memory-0", E.STORED, 5.5, 7, 0), span("memory-0", E.WAIT_KV, 7, 13, 0, 0)]
    assert lasts(spans, 0, 40)["memory-0"][WAIT_KV] == 3, "7 to 10: then it is being sent"


def two_workers() -> list[Span]:
    """memory-0 has sent its O at 6, memory-1 at 10; the compute worker waits from 2 to 11."""
    return [
        span("compute-0", E.SLICE, 0, 2, 0),
        span("compute-0", E.WAIT_O, 2, 6, 0, 0),
        span("compute-0", E.WAIT_O, 6, 11, 0, 1),
        span("memory-0", E.STORED, 2, 5, 0),
        span("memory-0", E.SEND_O, 5, 6, 0, 0),
        span("memory-0", E.WAIT_Q, 6, 13, 1, 0),
        span("memory-1", E.STORED, 2, 9, 0),
        span("memory-1", E.SEND_O, 9, 10, 0, 0),
        span("memory-1", E.WAIT_Q, 10, 13, 1, 0),
        span("compute-0", E.SLICE, 11, 13, 1),
    ]


def test_imbalance_is_the_time_between_the_first_and_the_last() -> None:
    found = lasts(two_workers(), 0, 13)
    assert found["compute-0"] == {BUSY: 4, WAIT_O: 4, IMBALANCE: 3, NETWORK: 2}
    assert found["memory-0"] == {BUSY: 3, NETWORK: 1 + 2, IMBALANCE: 3, WAIT_Q: 2, HOST: 2}
    assert found["memory-1"][NETWORK] == 2
    (first, second) = stragglers(SpanIndex(two_workers()))
    assert (first.last, second.last, second.layers, second.late_s) == (0, 1, 1, 4)


def test_idle_is_when_nobody_asks_the_engine() -> None:
    spans = [
        span("compute-0", E.SLICE, 0, 1, 0),
        span("compute-0", E.WAIT_STEP, 1, 10, step=1),
        span(ENGINE, E.WAIT_DONE, 0, 2),
        span(ENGINE, E.POSTPROCESS, 2, 3),
        span(ENGINE, E.SCHEDULE, 8, 9, step=1),
        span("compute-0", E.SLICE, 10, 11, 0, step=1),
    ]
    assert lasts(spans, 0, 11)["compute-0"] == {BUSY: 2, SCHEDULER: 2 + 2, IDLE: 5}


def test_hidden_attention_ran_before_kv_began_to_be_sent() -> None:
    (layer,) = hidden(SpanIndex(one_layer()))
    assert (layer.layer, layer.stored_s, layer.hidden_s) == (0, 7, 4.5)
    late = [s._replace(start=11, end=12) if s.event == E.STORED else s for s in one_layer()]
    assert hidden(SpanIndex(late))[0].hidden_s == 0
    early = [s._replace(start=6, end=8) if s.event == E.STORED else s for s in one_layer()]
    assert hidden(SpanIndex(early))[0].share == 1


def test_report_of_several_steps() -> None:
    spans = []
    for step, scale in enumerate([1, 1, 1, 4]):
        base = sum([1, 1, 1, 4][:step]) * 50.0
        for s in one_layer():
            moved = s._replace(step=step, start=base + max(0, s.start) * scale, end=base + s.end * scale)
            spans += [moved] if s.start >= 0 else []
    report = analyse(Recording(spans, {"memory-0": 0}, {"memory-0": ClockOffset(0.0, 2e-5)}, 1e-6))
    assert report.steps == 4
    assert math.isclose(report.step_median_s, 33)
    assert [(s.step, s.cause) for s in report.slow_steps] == [(3, BUSY)]
    for shares in (*report.devices.values(), *report.pools.values()):
        assert math.isclose(sum(shares.values()), 1.0)
    assert report.clock_uncertainty_s == 2e-5
    assert math.isclose(report.recording_share, sum(1 for _ in spans) * 1e-6 / report.window_s)
    assert steps_of(spans)[0].duration_s == 33


def test_recording_counts_the_busiest_of_each_role() -> None:
    spans = two_workers()
    assert math.isclose(recording_share(spans, 0.01, 10.0), (4 + 3) * 0.01 / 10.0)


def test_what_a_device_has_lost_is_not_judged() -> None:
    spans = one_layer()
    assert window(spans, {}) == (0, 34)
    kept = [s for s in spans if s.device != "memory-0" or s.start >= 13]
    assert window(kept, {"memory-0": 5}) == (13, 34)
    with pytest.raises(ValueError, match="no step"):
        window([s for s in spans if s.event == E.WAIT_STEP], {})


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def covered(pairs: Intervals | list[tuple[int, int]]) -> set[int]:
    return {t for start, end in pairs for t in range(int(start), int(end))}


@settings(max_examples=150, deadline=None)
@given(PAIRS, PAIRS)
def test_sets_of_time_are_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = union(a), union(b)
    assert covered(x) == covered(a)
    assert covered(intersect(x, y)) == covered(a) & covered(b)
    assert covered(subtract(x, y)) == covered(a) - covered(b)
    assert total(x) == len(covered(a))
    assert x == sorted(x)
    assert all(p[1] < q[0] for p, q in pairwise(x))


@st.composite
def traces(draw: st.DrawFn) -> list[Span]:
    found = []
    for device in ("compute-0", "compute-1", "memory-0", "memory-1", ENGINE):
        now = 0.0
        for _ in range(draw(st.integers(0, 12))):
            start = now + draw(st.integers(0, 3))
            now = start + draw(st.integers(0, 5))
            layer, peer, step = draw(st.tuples(st.integers(-1, 2), st.integers(-1, 1), st.integers(0, 2)))
            found.append(span(device, draw(st.sampled_from(list(Event))), start, now, layer, peer, step))
    return found


@settings(max_examples=50, deadline=None)
@given(traces())
def test_states_cover_the_run_once_whatever_was_recorded(spans: list[Span]) -> None:
    for of in states(spans, 2.0, 21.0).values():
        assert set(of) == set(STATES)
        assert math.isclose(sum(total(v) for v in of.values()), 19.0)
        assert union(p for v in of.values() for p in v) == [(2.0, 21.0)]
