"""The progress of a start: every stage, and its end."""

from __future__ import annotations

import logging
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.utils import progress
from lamina.utils.progress import StartupLog, progress_bar, start_progress

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 30.0


def last_states(text: str) -> list[str]:
    """Returns what stands in every line in the end."""
    return [line.rpartition("\r")[2] for line in text.split("\n")[:-1]]


def cut(*, fails: bool) -> None:
    with progress_bar(True) as show:
        show("loading", 0, 5)
        show("cutting", 0, 1)
        if fails:
            raise ValueError("no")


def test_a_stage_has_ended_when_the_next_one_begins_or_all_have(capsys: pytest.CaptureFixture[str]) -> None:
    cut(fails=False)
    loading, cutting = last_states(capsys.readouterr().err)
    assert "loading " in loading
    assert " 5/5 " in loading
    assert "cutting " in cutting
    assert " 1/1 " in cutting


def test_what_fails_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"):
        cut(fails=True)
    assert " 0/1 " in last_states(capsys.readouterr().err)[1]


def test_nothing_is_shown_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(False) as show:
        show("cutting", 0, 1)
    assert capsys.readouterr().err == ""


def test_the_log_has_one_line_for_a_short_stage_and_two_for_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHORT_STAGE_S", SOON_S)
    stages = StartupLog()
    with caplog.at_level(logging.INFO):
        for stage, done in (("starting", 1), ("loading", 0), ("loading", 1), ("loading", 1)):
            stages(stage, done, 1)
        monkeypatch.setattr(progress, "SHORT_STAGE_S", 0.0)
        stages("cutting", 0, 1)
        limit = time.monotonic() + SOON_S
        while caplog.messages[-1] != "cutting":
            assert time.monotonic() < limit
            select.select([], [], [], 0.01)
        stages.end()
    said = [r.getMessage().partition(",")[0] for r in caplog.records]
    assert said == ["starting: done", "loading: done", "cutting", "cutting: done"]


def fail_late(is_long: Callable[[], bool]) -> None:
    """Starts, and fails in the third stage; the second one takes until ``is_long``."""
    with start_progress(False) as show:
        show("starting", 1, 1)
        show("loading", 0, 1)
        limit = time.monotonic() + SOON_S
        while not is_long():
            assert time.monotonic() < limit
            select.select([], [], [], 0.01)
        show("loading", 1, 1)
        show("cutting", 0, 1)
        raise ValueError("no")


@pytest.mark.parametrize(("limit_s", "shown"), [(0.1, ["loading", "loading: done"]), (SOON_S, [])])
def test_a_long_stage_of_a_start_in_python_is_logged_while_it_lasts(
    limit_s: float, shown: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_STAGE_S", limit_s)
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match="no"):
        fail_late(lambda: not shown or bool(caplog.messages))
    assert [text.partition(",")[0] for text in caplog.messages][:2] == shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepared", "shown"),
    [
        ("", True),
        ("logging.basicConfig()", False),
        ("logging.basicConfig(level='INFO')", True),
        ("logging.getLogger('lamina').setLevel('ERROR')", False),
    ],
)
def test_a_program_shows_the_stages_unless_it_has_set_up_logging_otherwise(prepared: str, shown: bool) -> None:
    code = (
        f"import logging; {prepared}\nfrom lamina.utils import progress; progress.LONG_STAGE_S = 0\n"
        "with progress.start_progress(False) as show: show('starting workers', 0, 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    assert ("starting workers" in done.stderr, "starting workers: done, 0.0 s" in done.stderr) == (shown, shown)
