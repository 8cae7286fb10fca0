"""Work in the background: its result, its error, its deadline and its place after others."""

from __future__ import annotations

import os
import threading
from time import monotonic

import pytest

from lamina.utils.background_thread import NICENESS, LowPriorityCall


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_it_is_nice_and_nobody_else_is() -> None:
    before = niceness()
    assert LowPriorityCall(niceness, "nice").result(10.0) == min(19, before + NICENESS)
    assert niceness() == before


def test_its_error_is_raised_where_the_result_is_asked_for() -> None:
    work = LowPriorityCall(lambda: {}["missing"], "wrong")
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            work.result(10.0)


def test_a_wait_has_an_end() -> None:
    go = threading.Event()
    work = LowPriorityCall(go.wait, "slow")
    with pytest.raises(TimeoutError, match=r"slow is not done after 0\.01 s"):
        work.result(0.01)
    go.set()
    assert work.result(10.0)


def test_its_time_runs_from_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    work = LowPriorityCall(go.wait, "slow")
    began = monotonic()
    monkeypatch.setattr("lamina.utils.background_thread.monotonic", lambda: began + 600.0)
    with pytest.raises(TimeoutError, match=r"slow is not done after 600 s"):
        work.result(600.0)
    go.set()
    assert work.result()
    assert work.result(600.0), "what is done is not late"
