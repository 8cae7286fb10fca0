"""An engine with real workers and one in the simulator of `plan` schedule alike: there is no second scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.protocol.control import RunRound
from lamina.protocol.executor import Executor
from lamina.protocol.step_plan import StepPlan
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor

pytestmark = pytest.mark.usefixtures("no_child_left")
OPTIONS: dict[str, Any] = {
    "transport": "loopback", "block_size": 16, "prefill_chunk": 32, "max_model_len": 128, "max_num_seqs": 6,
    "enable_prefix_caching": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "one batch": {},
    "two batches that are preempted": {
        "pipeline": 2,
        "kv_memory": "240KiB",
        "memory_workers": 2,
        "partition": "request",
    },
}


def arrivals(seed: int) -> list[tuple[int, list[int], int]]:
    """Returns, for each request, the round by which it has come, its prompt, and the length of its answer."""
    rng = random.Random(seed)
    asks = ((rng.randint(0, 40), rng.randint(1, 90), rng.randint(2, 38)) for _ in range(14))
    return sorted((due, [rng.randrange(2, 300) for _ in range(prompt)], answer) for due, prompt, answer in asks)


def plans_of(engine: Engine, wire: Executor, seed: int) -> list[list[StepPlan]]:
    """Returns the plans of every round, until all requests have come and ended.

    Host time has no part in it: requests come by rounds.
    """
    rounds, submit = list[list[StepPlan]](), wire.submit

    def tell(new: RunRound) -> None:
        rounds.append([step.plan for step in new.steps])
        submit(new)

    wire.submit = tell  # type: ignore[method-assign]
    left = arrivals(seed)
    while left or engine.has_work:
        while left and (left[0][0] <= len(rounds) or not engine.has_work):
            _, prompt, answer = left.pop(0)
            engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0))
        engine.step()
    engine.release_idle_blocks()
    return rounds


def simulated(real: Engine) -> tuple[Engine, SimulatedExecutor]:
    """An engine with the same options, whose workers say of themselves what the real ones do."""
    clock = VirtualClock()
    wire = SimulatedExecutor(clock, real.worker_info, lambda load: 0.001 * load.rows)
    return Engine(wire, real.config, clock), wire


@pytest.mark.no_retry
@pytest.mark.long(but=["two batches that are preempted"])
@pytest.mark.parametrize("name", CASES)
def test_plans_of_a_real_run_are_those_of_the_simulator(name: str, llama_path: Path) -> None:
    with LLM(str(llama_path), **OPTIONS, **CASES[name]) as llm:
        other, wire = simulated(llm.engine)
        real = plans_of(llm.engine, llm.pools, seed=3)
        assert plans_of(other, wire, seed=3) == real
        assert other.scheduler.num_preemptions == llm.engine.scheduler.num_preemptions
        assert bool(other.scheduler.num_preemptions) == ("kv_memory" in CASES[name])
        assert len(real) > 60
        again, wire = simulated(llm.engine)
        assert plans_of(again, wire, seed=4) != real, "other arrivals have other plans"
