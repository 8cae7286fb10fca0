"""The order in which a program is bound, captured and wrapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.workers.compute.compile_passes import compile_passes

OWN, TORCH = SimpleNamespace(has_own_threads=True, engine=object()), SimpleNamespace(has_own_threads=False, engine=None)
GROUP, CAPTURE = SimpleNamespace(), SimpleNamespace()
ROWS, LINEAR, LAST = "bind rows", "bind linear layers", "emulate a device"
CHAIN, FEW = "chain units", "one thread for few rows"


@pytest.mark.parametrize(
    ("backend", "more", "due"),
    [
        (TORCH, {"emulate": abs}, [LINEAR, LAST]),
        (TORCH, {"group": GROUP}, ["meet ranks", LINEAR]),
        (OWN, {"emulate": abs}, [ROWS, LINEAR, CHAIN, FEW, LAST]),
        (OWN, {"group": GROUP}, ["meet ranks", ROWS, LINEAR, CHAIN, FEW]),
        (TORCH, {"capture": CAPTURE, "emulate": abs}, [LINEAR, "record graphs", LAST]),
        (OWN, {"capture": CAPTURE, "group": GROUP}, [LINEAR, "record graphs"]),
    ],
)
def test_the_order(backend: Any, more: dict[str, Any], due: list[str]) -> None:
    assert [each.name for each in compile_passes(backend, **more)] == due
