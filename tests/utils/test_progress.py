"""The progress of a start: every stage, and its end."""

from __future__ import annotations

import pytest

from lamina.utils.progress import progress_bar


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
