"""Steps of one batch are handed out in the order they were queued, whichever link was read first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.executor.step_reorder_buffer import StepReorderBuffer
from lamina.protocol.control import RunRound, RunStep, StepDone
from lamina.protocol.step_plan import StepPlan


def a_round(number: int, batches: list[int]) -> RunRound:
    steps = [
        RunStep(plan=StepPlan(batch=b, step=number, ops=[], rows=[]), token_ids=[], sampling_requests=[])
        for b in batches
    ]
    return RunRound(round=number, steps=steps)


@given(st.data(), st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6))
def test_any_order_of_reports_keeps_the_order_of_each_batch(data: st.DataObject, rounds: list[set[int]]) -> None:
    arrivals, handed = StepReorderBuffer(), []
    queued = [(b, n) for n, batches in enumerate(rounds) for b in sorted(batches)]
    for n, batches in enumerate(rounds):
        arrivals.add_round(a_round(n, sorted(batches)))
    for count, (batch, step) in enumerate(data.draw(st.permutations(queued))):
        assert len(arrivals) == len(queued) - len(handed)
        arrivals.on_step_done(StepDone(batch=batch, step=step, sampled_tokens=[]))
        while done := arrivals.next_done():
            handed.append((done.batch, done.step))
        assert len(handed) <= count + 1
    for batch in range(4):
        assert [n for b, n in handed if b == batch] == [n for b, n in queued if b == batch]
    assert not len(arrivals)
    assert arrivals.next_done() is None


def test_a_step_that_is_next_does_not_wait_for_other_batches() -> None:
    arrivals = StepReorderBuffer()
    arrivals.add_round(a_round(0, [0, 1]))
    arrivals.add_round(a_round(1, [0, 1]))
    arrivals.on_step_done(StepDone(batch=1, step=0, sampled_tokens=[]))
    assert arrivals.next_done() == StepDone(batch=1, step=0, sampled_tokens=[])
    arrivals.on_step_done(StepDone(batch=0, step=1, sampled_tokens=[]))
    assert arrivals.next_done() is None
