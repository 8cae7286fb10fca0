"""Workers that make good what others have lost, each wrong in one way that no token shows."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lamina.compute.prefill import OwnAttention
from lamina.compute.prefill import main as prefill_main
from lamina.memory import main as memory_main
from lamina.memory.store import Store
from lamina.protocol.plan import Keep

FOLDER = "PYTEST_CARELESS_FOLDER"
SLIGHTLY = 1.0 + 2.0**-20
_reconcile, _kv = Store.reconcile, OwnAttention.kv


def _change_what_stays(self: Store, keep: Sequence[Keep]) -> None:
    _reconcile(self, keep)
    for piece in (piece for layer in self.layers for piece in layer):
        piece.kv.v.mul_(SLIGHTLY)


def _send_other_values(self: OwnAttention, layer: int, k: Tensor, v: Tensor) -> None:
    _kv(self, layer, k, v * SLIGHTLY)


def serve_memory(sock: socket.socket) -> None:
    """One whose values change a little where somebody else is lost."""
    Store.reconcile = _change_what_stays  # type: ignore[method-assign]
    memory_main.serve_memory(sock)


def serve_prefill(sock: socket.socket) -> None:
    """The first one is sound, those that take its place compute other values."""
    try:
        (Path(os.environ[FOLDER]) / "first").touch(exist_ok=False)
    except FileExistsError:
        OwnAttention.kv = _send_other_values  # type: ignore[method-assign]
    prefill_main.serve_prefill(sock)
