"""A memory worker that stores zeros: what runs correctly against it does not depend on the KV cache."""

from __future__ import annotations

import socket

import torch

from lamina.kv.pool import LayerStore, WriteIndex
from lamina.kv.stored import StoredRows
from lamina.memory import main as memory_main

_write = LayerStore.write


def _write_zeros(self: LayerStore, at: WriteIndex, rows: StoredRows) -> None:
    _write(self, at, StoredRows(torch.zeros_like(rows.k), torch.zeros_like(rows.v)))


def serve_memory(sock: socket.socket) -> None:
    LayerStore.write = _write_zeros  # type: ignore[method-assign]
    memory_main.serve_memory(sock)
