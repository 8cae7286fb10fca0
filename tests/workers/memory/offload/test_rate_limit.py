"""The speed at which pages are saved: a thread rests while cores are short and rounds are served, and only then."""

from __future__ import annotations

import time

import pytest

from lamina.workers.memory.offload import rate_limit
from lamina.workers.memory.offload.rate_limit import SAVE_CPU_SHARE, SaveRateLimiter, cpu_pressure_s


class Clock:
    """A clock that a test moves; and the seconds for which some task has waited for a core."""

    def __init__(self) -> None:
        self.now, self.waited = 100.0, 5.0


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def paced(clock: Clock) -> SaveRateLimiter:
    found = SaveRateLimiter(lambda: clock.waited, lambda: clock.now)
    found.wait()
    return found


def test_a_share_of_a_core_while_rounds_are_served(paced: SaveRateLimiter) -> None:
    paced.on_round()
    start, used = time.monotonic(), time.thread_time()
    for _ in range(3):
        busy(0.001)
        assert paced.wait() > 0.01
    assert (time.thread_time() - used) / (time.monotonic() - start) < 1.3 * SAVE_CPU_SHARE


def test_no_rest_where_nothing_else_is_done(paced: SaveRateLimiter, clock: Clock) -> None:
    busy(0.001)
    assert paced.wait() == 0.0, "no round has come"
    paced.on_round()
    clock.now += rate_limit.SERVED_S
    busy(0.001)
    assert paced.wait() == 0.0, "the last one is long ago"


def test_no_rest_where_cores_are_free(paced: SaveRateLimiter, clock: Clock) -> None:
    for waited, short in ((1.0, True), (0.01, False), (0.0, False), (0.3, True), (0.01, False)):
        clock.now, clock.waited = clock.now + rate_limit.LOOK_S, clock.waited + waited
        paced.on_round()
        busy(0.001)
        assert (paced.wait() > 0) == short


def test_a_kernel_that_does_not_count_has_no_free_cores(clock: Clock) -> None:
    paced = SaveRateLimiter(lambda: None, lambda: clock.now)
    clock.now += rate_limit.LOOK_S
    paced.on_round()
    busy(0.001)
    assert paced.wait() > 0


def test_a_task_is_over_in_time(paced: SaveRateLimiter, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages it has: who waits for its report must not take the worker for one that hangs."""
    monkeypatch.setattr(rate_limit, "TASK_S", 0.02)
    paced.on_round()
    for _ in range(2):
        paced.begin()
        rests = []
        for _ in range(4):
            busy(0.001)
            rests.append(paced.wait())
        assert rests[0] > 0
        assert sum(rests) == pytest.approx(0.02)


def test_no_rest_behind_the_end(paced: SaveRateLimiter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "MAX_REST_S", 1000.0)
    paced.on_round()
    busy(0.1)
    paced.stop()
    start = time.monotonic()
    assert paced.wait() > 1.0
    assert time.monotonic() - start < 1.0


def test_the_pressure_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "PRESSURE", "/nowhere")
    assert cpu_pressure_s() is None
