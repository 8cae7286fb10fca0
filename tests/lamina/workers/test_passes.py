"""The order in which a program is bound, compiled, captured and wrapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lamina.compute.passes import passes

OWN, TORCH = SimpleNamespace(own_threads=True), SimpleNamespace(own_threads=False)
GROUP, CAPTURE = SimpleNamespace(), SimpleNamespace()
LINEAR, LAST = "bind linear layers", "emulate a device"


@pytest.mark.parametrize(
    ("backend", "more", "due"),
    [
        (TORCH, {}, [LINEAR, LAST]),
        (OWN, {}, [LINEAR, "one thread for few rows", LAST]),
        (OWN, {"group": GROUP}, ["meet ranks", LINEAR, "one thread for few rows", LAST]),
        (OWN, {"compiled": abs}, ["compile", LINEAR, "one thread for few rows", LAST]),
        (TORCH, {"group": GROUP, "compiled": abs}, ["meet ranks", "compile", LINEAR, LAST]),
        (TORCH, {"capture": CAPTURE}, [LINEAR, "record graphs", LAST]),
        (OWN, {"capture": CAPTURE, "group": GROUP, "compiled": abs}, [LINEAR, "record graphs", LAST]),
    ],
)
def test_the_order(backend: Any, more: dict[str, Any], due: list[str]) -> None:
    assert [each.name for each in passes(backend, **more)] == due
