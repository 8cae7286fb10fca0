"""A memory worker that stores zeros: what runs correctly against it does not depend on the KV cache."""

from __future__ import annotations

import socket

import torch

from lamina.kv.paged_cache import LayerCache, SlotMapping
from lamina.kv.stored_format import StoredRows
from lamina.workers.memory import epoch_server
from lamina.workers.memory import main as memory_main

_write = LayerCache.write


def _write_zeros(self: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
    _write(self, slot_mapping, StoredRows(torch.zeros_like(rows.k), torch.zeros_like(rows.v)))


def serve_memory(sock: socket.socket) -> None:
    LayerCache.write = _write_zeros  # type: ignore[method-assign]
    # Native code would write K and V without a LayerCache.
    epoch_server.can_use_native_loop = lambda store, channels: False  # type: ignore[attr-defined]
    memory_main.serve_memory(sock)
