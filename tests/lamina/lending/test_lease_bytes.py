"""A guest takes no more memory than was lent, whatever its debtor asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamina.env import LEASE_BYTES
from lamina.memory.store import _kv_bytes


@pytest.mark.parametrize(("lent", "asked", "right"), [("", 9, True), ("9", 9, True), ("8", 9, False)])
def test_no_more_than_was_lent(lent: str, asked: int, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEASE_BYTES, lent or "0")
    bind: Any = SimpleNamespace(kv_bytes=asked, kv_most=0)
    if right:
        assert _kv_bytes(bind, torch.device("cpu"), 1.0, 0) == asked
    else:
        with pytest.raises(ValueError, match="9 bytes are asked for of a memory worker that was lent with 8"):
            _kv_bytes(bind, torch.device("cpu"), 1.0, 0)
