"""The latency of a request alone, compared with the promised one: measured on a started engine, of which
nothing stays.
"""

from __future__ import annotations

import pytest

from lamina.engine.engine import Engine
from lamina.engine.tuning.unloaded_latency import NUM_TRIES, check_slo, measure
from lamina.request import SamplingParams
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.decision_log import DecisionLog
from lamina.scheduler.conductor.overload import NO_LIMITS, SloLimits
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import SimulatedExecutor, SimulatedPool


class Host:
    """An engine whose first ``slow`` steps take a second, and the others 12 ms."""

    def __init__(self, slow: int = 0, longest: int = 64) -> None:
        self.clock, self.left, self.tries = VirtualClock(), slow, list[int]()
        made: tuple[Engine, SimulatedExecutor] = SimulatedPool(1, 64, 16, longest, 4, chunk=16).engine(
            self.clock, lambda load: self._step_s()
        )
        self.engine, self.wire = made

    def _step_s(self) -> float:
        self.left -= 1
        return 1.0 if self.left >= 0 else 0.012

    def check(self, limits: SloLimits) -> None:
        check_slo(self.engine, limits, lambda stage, done, total: self.tries.append(done), self.clock)


@pytest.mark.parametrize(
    "limits", [SloLimits(0.0121, 0.0121), SloLimits(ttft_s=0.0121), SloLimits(tbt_s=0.0121), SloLimits(9, 9)]
)
def test_what_is_kept_is_promised_after_one_try(limits: SloLimits) -> None:
    host = Host()
    host.check(limits)
    assert host.tries == [0]


def test_where_nothing_is_promised_nothing_is_tried() -> None:
    host = Host()
    host.check(NO_LIMITS)
    assert (host.tries, host.wire.decoding) == ([], [])


def test_a_slow_beginning_refuses_nobody() -> None:
    host = Host()
    for _ in range(NUM_TRIES - 1):
        measure(host.engine, host.clock)
    host = Host(slow=-host.left)
    host.check(SloLimits(0.02, 0.02))
    assert host.tries == list(range(NUM_TRIES))
    host = Host(slow=1000)
    with pytest.raises(ValueError, match="--slo ttft=20ms is below .* takes alone, 1s, the best of"):
        host.check(SloLimits(0.02, 0.02))


def test_an_end_that_is_near_leaves_no_gap_to_measure() -> None:
    host = Host(longest=1)
    assert host.engine.worker_info.max_model_len == 2
    host.check(SloLimits(tbt_s=0.001))
    assert host.tries == [0]


def test_nothing_of_it_stays() -> None:
    """No block, no seed that is drawn, no event, nothing that is learned."""
    host, told = Host(), list[str]()
    engine = host.engine
    engine.slo_admission.decision_log = reasons = DecisionLog(lambda name, said: told.append(name))
    free, law = engine.free_blocks, engine.slo_admission.conductor.prefill_latency.model
    host.check(SloLimits(1.0, 1.0))
    assert (engine.free_blocks, engine.has_work) == (free, False)
    assert engine.slo_admission.conductor.prefill_latency.model == law
    assert (
        engine.slo_admission.conductor.num_waiting == engine.slo_admission.conductor.decode_load_model.num_running == 0
    )
    assert engine.slo_admission.decision_log is reasons
    engine.slo_admission.set_config(ConductorConfig(limits=SloLimits(1.0, 1.0)))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    drawn, fresh = (e.request(e.add([1, 2], params)).sequences[0].seed for e in (engine, Host().engine))
    assert drawn == fresh
    while engine.has_work:
        engine.step()
    assert told == ["choice"]
