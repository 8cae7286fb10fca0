"""A memory worker that stores zeros: what runs correctly against it does not depend on the KV cache."""

from __future__ import annotations

import socket

import torch

from lamina.kv.paged_cache import LayerCache, SlotMapping
from lamina.kv.stored_format import StoredRows
from lamina.workers.memory import main as memory_main

_write = LayerCache.write


def _write_zeros(self: LayerCache, at: SlotMapping, rows: StoredRows) -> None:
    _write(self, at, StoredRows(torch.zeros_like(rows.k), torch.zeros_like(rows.v)))


def serve_memory(sock: socket.socket) -> None:
    LayerCache.write = _write_zeros  # type: ignore[method-assign]
    memory_main.serve_memory(sock)
