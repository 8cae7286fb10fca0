"""The work of a replay: counted where the machine may be busy, in CPU seconds where a whole trace is played."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import FrameType

import pytest
from planned import even, planner

from lamina.facts.hardware import DEVICES
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.replay import replay
from lamina.tools.request_traces import RequestTrace, read_trace

TRACE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
WHERE = Deployment(DEVICES["h100"], 2, DEVICES["h20"], 4, 2)


def calls(trace: RequestTrace, most: int) -> int:
    """Counts the calls of functions in Python: the same whatever else the host does."""
    plan, count = planner(), 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        replay(plan.costs, plan.memory, WHERE, trace, most)
    finally:
        sys.setprofile(before)
    return count


def test_beginning_many_prompts_at_once_looks_at_each_row_a_few_times() -> None:
    """A round begins 64 of 128 sequences: work by grants times rows would be ten times as much. Prices of 64 prefill
    workers are 320 of the calls.
    """
    trace = even(400, 100, 60)
    assert calls(trace, 128) / len(trace.requests) < 4000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TRACE.exists(), reason="the public trace is not here")
def test_twelve_thousand_requests_take_a_minute() -> None:
    """Needs a quiet core."""
    plan = planner()
    room = plan.memory.kv_bytes(plan.costs.model, WHERE) / plan.costs.model.kv_bytes_per_token - 64
    trace = read_trace(str(TRACE)).first(12_000).within(room)
    begun = time.process_time()
    replayed = replay(plan.costs, plan.memory, WHERE, trace)
    took = time.process_time() - begun
    print(f"{len(trace.requests)} requests, {replayed.rounds} rounds: {took:.1f} s of CPU")
    assert took < 60
