"""The wire of a world in which nothing is lost: rounds one after the other, each in its time."""

from __future__ import annotations

import pytest
from engine_api import simulated_engine

from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.tools.plan.simulator.lossless import RoundLoad, SimulatedExecutor, simulated_ready


def world(batches: int = 1, prefills: int = 0) -> tuple[Engine, SimulatedExecutor, list[RoundLoad]]:
    """A round takes a second and a tenth for each row."""
    seen = list[RoundLoad]()

    def seconds(load: RoundLoad) -> float:
        seen.append(load)
        return 1.0 + 0.1 * load.rows

    ready = simulated_ready(num_layers=2, num_blocks=64, block_size=4, max_len=64)
    options = {"pipeline": batches, "prefill_workers": prefills, "prefill_chunk": 8}
    engine = simulated_engine(options, ready, seconds)
    assert isinstance(engine.executor, SimulatedExecutor)
    return engine, engine.executor, seen


def add(engine: Engine, prompt: int, answer: int) -> int:
    return engine.add([0] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0))


@pytest.mark.no_retry
def test_rounds_take_their_time_one_after_the_other() -> None:
    engine, wire, seen = world()
    add(engine, 5, 3)
    times = []
    while engine.has_work:
        if engine.step():
            times.append(wire.clock.now)
    assert times == pytest.approx([1.5, 2.6, 3.7])
    assert [[(s.batch, s.rows, s.prompt, s.stored) for s in load.steps] for load in seen[:3]] == [
        [(0, 5, 5, 5)], [(0, 1, 0, 6)], [(0, 1, 0, 7)],
    ]  # fmt: skip


@pytest.mark.no_retry
def test_all_steps_of_a_round_are_done_at_once() -> None:
    engine, wire, seen = world(batches=2)
    add(engine, 3, 4)
    add(engine, 3, 4)
    while engine.has_work:
        engine.step()
    assert [len(load.steps) for load in seen][:4] == [2, 2, 2, 2]
    assert wire.clock.now == pytest.approx(1.6 + 3 * 1.2)


@pytest.mark.no_retry
def test_prefill_workers_take_no_time() -> None:
    engine, wire, seen = world(prefills=2)
    add(engine, 20, 3)
    while engine.has_work:
        engine.step()
    assert [s.prompt for load in seen for s in load.steps] == [0] * len(seen), "no prompts in rounds"
    assert wire.clock.now == pytest.approx(1.1 * 2), "nor does a round without rows, which grants the prompt"
