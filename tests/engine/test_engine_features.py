"""Features of the engine: when they are asked, and what follows from their answers.

Covers: lamina/engine/feature.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from engine_api import make_engine, run
from fake_executor import FakeWire, continuation

from lamina.engine.engine import Engine
from lamina.engine.feature import EngineFeature
from lamina.request import ErrorOrigin, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = [1] * 60  # no room in 8 blocks of 4 tokens


class Lender(EngineFeature):
    """Answers ``on_idle`` with each of ``answers``, and notes how many sequences wait after each schedule."""

    def __init__(self, answers: Iterable[str | None] = ()) -> None:
        self._answers, self.waiting = iter(answers), list[int]()

    def between_rounds(self, engine: Engine) -> None:
        self.waiting.append(engine.scheduler.num_waiting)

    def on_idle(self, engine: Engine) -> str | None:
        return next(self._answers)


def engine_with(*features: EngineFeature, num_blocks: int = 8, **options: int) -> Engine:
    return make_engine(FakeWire(num_blocks), features, **options)


@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_a_request_that_begins_as_soon_as_it_can_is_never_seen_waiting(pipeline: int) -> None:
    """Else memory would be borrowed for the most tokens that it may ever have."""
    lender = Lender()
    engine = engine_with(lender, num_blocks=64, pipeline=pipeline)
    for token in range(9):
        engine.add([token, 5, 6], PARAMS)
        engine.step()
    run(engine)
    assert lender.waiting
    assert not any(lender.waiting)


def test_a_request_without_room_waits_for_it_and_ends_by_the_reason_why_none_comes() -> None:
    lender = Lender(["", "", "nobody lends", None])
    engine = engine_with(lender)
    engine.add(LONG, PARAMS)
    short = engine.add([1, 2, 3], PARAMS)
    for _ in range(2):
        assert engine.step() == []
        assert not engine.idle, "room may come"
    (refused,) = engine.step()
    assert lender.waiting == [2, 2, 2]
    assert refused.finished
    assert (refused.outputs[0].stop_reason, refused.outputs[0].blame) == ("nobody lends", ErrorOrigin.LOAD)
    assert not engine.idle
    assert run(engine)[short].outputs[0].token_ids == continuation([1, 2, 3], 6)
    engine.add(LONG, PARAMS)
    assert engine.step() == []
    assert engine.idle, "no feature brings room"


def test_the_first_feature_with_an_answer_is_the_last_that_is_asked() -> None:
    engine = engine_with(Lender([None]), Lender(["first"]), Lender())
    engine.add(LONG, PARAMS)
    assert [o.outputs[0].stop_reason for o in engine.step()] == ["first"]


def test_a_feature_without_work_is_asked_as_workers_are_looked_at_and_its_error_is_the_callers() -> None:
    class Failing(EngineFeature):
        def between_rounds(self, engine: Engine) -> None:
            raise OSError("the ledger is gone")

    for call in (Engine.check_workers, Engine.step):
        with pytest.raises(OSError, match="the ledger is gone"):
            call(engine_with(Failing()))
