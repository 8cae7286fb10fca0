"""What a request takes alone, beside what is promised: measured on a started engine, of which nothing stays."""

from __future__ import annotations

import pytest

from lamina.engine.conductor import ConductorRules
from lamina.engine.conductor.overload import NO_LIMITS, Limits
from lamina.engine.conductor.reasons import Reasons
from lamina.engine.engine import Engine
from lamina.engine.tuning.alone import TRIES, _alone, check_limits
from lamina.planner.simulator.clock import VirtualClock
from lamina.planner.simulator.lossless import LosslessWire, SimulatedPool
from lamina.request import SamplingParams


class Host:
    """An engine whose first ``slow`` steps take a second, and the others 12 ms."""

    def __init__(self, slow: int = 0, longest: int = 64) -> None:
        self.clock, self.left, self.tries = VirtualClock(), slow, list[int]()
        made: tuple[Engine, LosslessWire] = SimulatedPool(1, 64, 16, longest, 4, chunk=16).engine(
            self.clock, lambda load: self._step_s()
        )
        self.engine, self.wire = made

    def _step_s(self) -> float:
        self.left -= 1
        return 1.0 if self.left >= 0 else 0.012

    def check(self, limits: Limits) -> None:
        check_limits(self.engine, limits, lambda stage, done, total: self.tries.append(done), self.clock)


@pytest.mark.parametrize("limits", [Limits(0.0121, 0.0121), Limits(ttft_s=0.0121), Limits(tbt_s=0.0121), Limits(9, 9)])
def test_what_is_kept_is_promised_after_one_try(limits: Limits) -> None:
    host = Host()
    host.check(limits)
    assert host.tries == [0]


def test_where_nothing_is_promised_nothing_is_tried() -> None:
    host = Host()
    host.check(NO_LIMITS)
    assert (host.tries, host.wire.decoding) == ([], [])


def test_a_slow_beginning_refuses_nobody() -> None:
    host = Host()
    for _ in range(TRIES - 1):
        _alone(host.engine, host.clock)
    host = Host(slow=-host.left)
    host.check(Limits(0.02, 0.02))
    assert host.tries == list(range(TRIES))
    host = Host(slow=1000)
    with pytest.raises(ValueError, match="--slo-ttft 20ms is below .* takes alone, 1s, the best of"):
        host.check(Limits(0.02, 0.02))


def test_an_end_that_is_near_leaves_no_gap_to_measure() -> None:
    host = Host(longest=1)
    assert host.engine.info.max_model_len == 2
    host.check(Limits(tbt_s=0.001))
    assert host.tries == [0]


def test_nothing_of_it_stays() -> None:
    """No block, no seed that is drawn, no event, nothing that is learned."""
    host, told = Host(), list[str]()
    engine = host.engine
    engine.promises.reasons = reasons = Reasons(lambda name, said: told.append(name))
    free, seeds, law = engine.free_blocks, engine._seeds.getstate(), engine.promises.conductor.fit.law
    host.check(Limits(1.0, 1.0))
    assert (engine.free_blocks, engine._seeds.getstate(), engine.has_work) == (free, seeds, False)
    assert engine.promises.conductor.fit.law == law
    assert engine.promises.conductor.num_waiting == engine.promises.conductor.decoding.num_running == 0
    assert engine.promises.reasons is reasons
    engine.promises.promise(ConductorRules(limits=Limits(1.0, 1.0)))
    engine.add([1, 2], SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert told == ["choice"]
