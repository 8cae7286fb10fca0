"""The end of a prefill worker's step: every memory worker has reported it, step by step.

Covers: lamina/workers/prefill/prefill_worker.py.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from lamina.netstack import ChannelTimeout
from lamina.protocol.control import StepDone
from lamina.workers.prefill.prefill_worker import POLL_S, PrefillWorker


class FakeWorker:
    """Computes a step a turn."""

    def __init__(self, steps: int) -> None:
        self.left = deque(StepDone(batch=1, step=i, sampled_tokens=[]) for i in range(steps))

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def connect(self, *others: object) -> None:
        pass

    def run_next(self) -> StepDone:
        return self.left.popleft()

    def stats(self) -> dict[str, float]:
        return dict.fromkeys(("slice_s", "sample_s", "steps", "rows", "wait_s", "carry_s", "send_s"), 0.0)


class FakeLink:
    """Has stored some steps, and says so late by the time that it is given; the clock stands still otherwise."""

    def __init__(self, now: list[float]) -> None:
        self.now, self.stored = now, list[int]()

    def wait_until_stored(self, step: int, timeout_s: float) -> bool:
        self.now[0] += timeout_s
        return step in self.stored


def make(steps: int, links: int = 2, timeout_s: float = 1.0) -> tuple[PrefillWorker, list[FakeLink], list[float]]:
    now = [100.0]
    fakes = [FakeLink(now) for _ in range(links)]
    own = SimpleNamespace(attend_s=2.0, sending_s=3.0, fetch_s=0.0, fetched_bytes=0)
    worker = PrefillWorker(FakeWorker(steps), own, fakes, timeout_s, clock=lambda: now[0])  # type: ignore[arg-type]
    return worker, fakes, now


def test_a_step_is_done_when_all_have_stored_it() -> None:
    worker, (first, second), _ = make(2)
    first.stored += [0, 1]
    assert worker.run_next() is None
    second.stored.append(0)
    done = worker.run_next()
    assert done is not None
    assert done.step == 0
    assert worker.run_next() is None
    assert worker.has_work
    second.stored.append(1)
    done = worker.run_next()
    assert done is not None
    assert done.step == 1
    assert not worker.has_work


def test_time_with_nothing_else_to_do_counts_also_when_the_answer_comes_in_it() -> None:
    worker, (link,), _ = make(1, links=1)
    assert worker.run_next() is None, "computed"
    assert worker.stats()["stored_wait_s"] == 0.0
    assert worker.run_next() is None
    link.stored.append(0)
    assert worker.run_next() is not None
    assert worker.stats()["stored_wait_s"] == pytest.approx(2 * POLL_S)
    assert (worker.stats()["attend_s"], worker.stats()["send_s"]) == (2.0, 3.0)
    assert "wait_s" not in worker.stats(), "no O is waited for there"


def test_a_stage_waits_for_those_before_it_as_long_as_they_may_take() -> None:
    """A step's time for each of two; what it is waited for begins anew with each slice."""
    worker, (link,), now = make(2, links=1, timeout_s=1.0)
    here = False

    def comes(timeout_s: float) -> bool:
        now[0] += timeout_s
        return here

    worker.connect_stages(SimpleNamespace(), comes, before=2)  # type: ignore[arg-type]
    assert worker.run_next() is None
    now[0] += 1.9
    assert worker.run_next() is None, "both may need their time"
    here = True
    assert worker.run_next() is None, "computed, and not stored"
    link.stored.append(0)
    here = False
    assert worker.run_next() is not None
    now[0] += 1.9
    assert worker.run_next() is None
    now[0] += 0.2
    with pytest.raises(ChannelTimeout, match="the stage before sent nothing of a step in 2 s"):
        worker.run_next()
    assert worker.has_work
