"""The emulated medium does what its script says, to the calls that it names."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from emulated_medium import EMULATE_VARIABLE, environment

from lamina.kv.pages import PAGE, Page, PageFragment, Provenance
from lamina.kv.storage import (
    FragmentLostError,
    StorageBackend,
    StorageConfig,
    StorageError,
    StorageFullError,
    open_storage,
)

WHAT = Page(b"k" * 32, 0, PAGE, b"t" * 16, Provenance("prompt"))


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StorageBackend]:
    def open_one(*script: dict[str, Any]) -> StorageBackend:
        for name, value in environment(*script).items():
            monkeypatch.setenv(name, value)
        return open_storage("host", StorageConfig(1000))

    return open_one


def get(medium: StorageBackend) -> bytes:
    into = {PageFragment(0, 0): bytearray(4)}
    medium.read(WHAT.key, into)
    return bytes(into[PageFragment(0, 0)])


def test_faults_of_some_calls(opener: Callable[..., StorageBackend]) -> None:
    medium = opener(
        {"call": "read", "after": 1, "times": 2, "fault": "lost"}, {"call": "read", "after": 4, "fault": "flip"},
        {"call": "drop", "fault": "broken"}, {"call": "reserve", "after": 1, "fault": "full"},
    )  # fmt: skip
    medium.reserve(4)
    medium.write(WHAT, {PageFragment(0, 0): b"data"})
    assert get(medium) == b"data"
    for _ in range(2):
        with pytest.raises(FragmentLostError, match=f"{EMULATE_VARIABLE}: read [12] is lost"):
            get(medium)
    assert [get(medium) for _ in range(3)] == [b"data", b"eata", b"eata"]
    with pytest.raises(StorageError, match="drop 0 is broken"):
        medium.delete([WHAT.key])
    with pytest.raises(StorageFullError, match="reserve 1 is full"):
        medium.reserve(4)
    assert len(medium.pages()) == 1


def test_delays(opener: Callable[..., StorageBackend]) -> None:
    medium = opener({"call": "pages", "delay_s": 0.02}, {"call": "pages", "after": 1, "delay_s": 0.03})
    for least in (0.02, 0.05):
        start = time.perf_counter()
        medium.pages()
        assert time.perf_counter() - start >= least


@pytest.mark.parametrize("script", [{"call": "erase"}, {"call": "read", "fault": "fire"}, {"call": "read", "often": 3}])
def test_a_script_that_cannot_be_read(opener: Callable[..., StorageBackend], script: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=EMULATE_VARIABLE):
        opener(script)
