"""Steps of one batch are handed out in the order they were queued, whichever link was read first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.fleet.arrivals import Arrivals
from lamina.protocol.control import RunRound, RunStep, StepDone
from lamina.protocol.plan import StepPlan


def a_round(number: int, batches: list[int]) -> RunRound:
    steps = [RunStep(plan=StepPlan(batch=b, step=number, ops=[], rows=[]), tokens=[], draws=[]) for b in batches]
    return RunRound(round=number, steps=steps)


@given(st.data(), st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6))
def test_any_order_of_reports_keeps_the_order_of_each_batch(data: st.DataObject, rounds: list[set[int]]) -> None:
    arrivals, handed = Arrivals(), []
    queued = [(b, n) for n, batches in enumerate(rounds) for b in sorted(batches)]
    for n, batches in enumerate(rounds):
        arrivals.expect(a_round(n, sorted(batches)))
    for count, (batch, step) in enumerate(data.draw(st.permutations(queued))):
        assert len(arrivals) == len(queued) - len(handed)
        arrivals.add(StepDone(batch=batch, step=step, drawn=[]))
        while done := arrivals.take():
            handed.append((done.batch, done.step))
        assert len(handed) <= count + 1
    for batch in range(4):
        assert [n for b, n in handed if b == batch] == [n for b, n in queued if b == batch]
    assert not len(arrivals)
    assert arrivals.take() is None


def test_a_step_that_is_next_does_not_wait_for_other_batches() -> None:
    arrivals = Arrivals()
    arrivals.expect(a_round(0, [0, 1]))
    arrivals.expect(a_round(1, [0, 1]))
    arrivals.add(StepDone(batch=1, step=0, drawn=[]))
    assert arrivals.take() == StepDone(batch=1, step=0, drawn=[])
    arrivals.add(StepDone(batch=0, step=1, drawn=[]))
    assert arrivals.take() is None
