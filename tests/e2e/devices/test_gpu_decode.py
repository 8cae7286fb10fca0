"""The end-to-end part of perf/gpu_suite.py, on a CPU and a model of few weights: it runs, and tells what it should."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "perf"))
from gpu import decode

pytestmark = [pytest.mark.usefixtures("no_child_left"), pytest.mark.timeout(300)]
SMALL = decode.settings(dry=True)


@pytest.mark.long
def test_tokens_are_those_of_transformers(tiny_lm: Path) -> None:
    assert decode.tokens_as_transformers(SMALL) == {"memory on cpu": 1.0}


@pytest.mark.long
def test_every_contender_is_timed() -> None:
    found = decode.speed(SMALL)
    assert list(found) == [
        *(f"2 x 16, {name}" for name in decode.ALL),
        *(f"3 x 16, {name}" for name in decode.BEYOND),
    ]
    for name, result in found.items():
        if "compiled" not in name and "offloaded" not in name:  # a compiler of torch's own choice; streams of a GPU
            assert result["tokens_s"] > 0, name
            assert result["tokens_s"] == pytest.approx(int(name[0]) * 1e3 / result["tbt_ms"])
            assert result["steps"] >= 2


def test_more_of_the_device_than_the_budget_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "lamina", lambda *_: {"device_gb": 12.5})
    with pytest.raises(ValueError, match=r"12\.5 GB of the device, of 12"):
        decode.within_budget(SMALL, Path(), [])


def test_what_there_is_no_time_for_is_said() -> None:
    assert set(decode.speed(replace(SMALL, limit_s=-1.0)).values()) == {"no time was left"}


@pytest.mark.parametrize(("a", "b", "same"), [([1, 2, 3], [1, 2, 3], 3), ([1, 5, 3], [1, 2, 3], 1), ([], [1], 0)])
def test_a_text_counts_up_to_its_first_difference(a: list[int], b: list[int], same: int) -> None:
    assert decode.prefix_length(a, b) == same
