"""Requests with a lower number come first: in the queue, after a preemption, in the Conductor's forecast.

Covers: lamina/scheduler/batch.py.
"""

from __future__ import annotations

from collections import deque

import pytest
from engine_api import make_engine, run
from scheduled import make

from lamina.request import SamplingParams
from lamina.scheduler.batch import enqueue, requeue
from lamina.scheduler.conductor import ConductorConfig, PromptInfo
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.conductor.queues import PrefillQueue, QueuedPrompt
from lamina.scheduler.conductor.routing import POLICIES, WorkerMatch
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.slo_admission import SloAdmission


def waiting(number: int, priority: int) -> Sequence:
    sequence = make(number, 4, 4)
    sequence.priority = priority
    return sequence


def test_the_queue_is_in_the_order_of_priorities_and_then_of_arrival() -> None:
    line = deque[Sequence]()
    for number, priority in enumerate((1, 0, 1, -3, 0)):
        enqueue(line, waiting(number, priority))
    assert [s.request_id for s in line] == [3, 1, 4, 0, 2]
    requeue(line, waiting(5, 0))
    requeue(line, waiting(6, 1))
    requeue(line, waiting(7, 9))
    assert [s.request_id for s in line] == [3, 5, 1, 4, 6, 0, 2, 7]


def test_the_engine_serves_in_that_order() -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    numbers = [engine.add([n], SamplingParams(max_tokens=3), terms=CacheOptions(priority=-n)) for n in range(1, 5)]
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == numbers[::-1]


def test_who_came_first_by_priority_keeps_its_kv() -> None:
    """Blocks for two of three: the one with the highest number gives way, though it is the oldest."""
    engine = make_engine(max_num_seqs=8, scheduling_policy="priority")
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    numbers = [engine.add([5, n], params, terms=CacheOptions(priority=p)) for n, p in enumerate((7, 0, 0))]
    done = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert done[numbers[0]].num_preemptions == engine.scheduler.num_preemptions


def test_a_forecast_knows_whom_a_prompt_overtakes() -> None:
    line = PrefillQueue()
    for number, priority in enumerate((1, 1, 0)):
        line.add(QueuedPrompt(number, 100, 2.0, 0.0, priority), 0.0)
    assert [line.queue_s(0.0, p) for p in (-1, 0, 1)] == [0.0, 2.0, 6.0]
    assert [p.request for p in line.prompts] == [2, 0, 1]
    assert [p.due_s for p in line.prompts] == [2.0, 4.0, 6.0]
    line.on_started(0, 0.0)
    assert [line.queue_s(0.0, p) for p in (-1, 0, 1)] == [2.0, 4.0, 6.0], "who is computed is not overtaken"


@pytest.mark.parametrize(("priority", "queue_s"), [(0, 50.0), (-1, 0.0)])
def test_the_conductor_asks_for_the_line_before_a_prompt(
    priority: int, queue_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, policy = list[WorkerMatch](), ConductorConfig().policy
    choose = POLICIES[policy]
    monkeypatch.setitem(POLICIES, policy, lambda asked: seen.extend(asked.workers) or choose(asked))
    promises = SloAdmission(1)
    promises.conductor.prefill_latency.model = promises.conductor.prefill_latency.model._replace(b=1.0)
    promises.reserve(make(0, 50, 5))
    seen.clear()
    promises.conductor.choose(PromptInfo(10, priority=priority), 0.0)
    assert [at.queue_s for at in seen] == [queue_s]


def test_who_may_not_come_first_is_told_so() -> None:
    """Else any client could have all others wait."""
    engine = make_engine()
    with pytest.raises(ValueError, match="^priority needs --scheduling-policy priority, because .*: add it"):
        engine.add([1], SamplingParams(max_tokens=3), terms=CacheOptions(priority=-1))
    engine.add([1], SamplingParams(max_tokens=3), terms=CacheOptions(priority=0))


@pytest.mark.parametrize(("priority", "ahead"), [(-1, 1), (0, 2), (5, 3)])
def test_who_waits_behind_a_prompt_takes_no_room_from_it(
    priority: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    promises, seen = SloAdmission(1, 100), list[int]()
    promises.set_config(ConductorConfig(limits=SloLimits(ttft_s=1000.0)))
    for number, other in enumerate((-1, 0, 1)):
        promises.reserve(waiting(number, other))
    monkeypatch.setattr(
        promises.conductor.decode_load_model, "time_until_slot_s", lambda most, ahead: seen.append(ahead) or 0.0
    )
    promises.check_admission([waiting(9, priority)], lambda length: 100.0)
    assert seen == [ahead]
