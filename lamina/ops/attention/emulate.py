"""The best backend of this machine, as slow as an emulated memory device (``lamina.utils.emulated_device``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable, SlotMapping
from lamina.kv.stored_format import StoredRows
from lamina.utils.emulated_device import DeviceTimes, EmulatedDevice

from . import AttentionBackend, Operator, get
from .merge import Partial


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> EmulatedAttention:
    """Open the backend with the times of the environment, or without added time. Raises ValueError for invalid
    times.
    """
    return EmulatedAttention(get("auto", device, dtype, store_dtype), DeviceTimes.from_environment() or DeviceTimes())


class _EmulatedRows(NamedTuple):
    inner: Any
    stored_tokens: int  # tokens that attention reads, over all sequences


class EmulatedAttention(AttentionBackend):
    """An ``AttentionBackend`` that takes another device's time. ``attend_stored`` takes the time of a layer's
    attention.
    """

    def __init__(self, inner: AttentionBackend, times: DeviceTimes) -> None:
        self._inner = inner
        self._times = times
        self._device = EmulatedDevice()

    def prepare(self, rows: RowTable) -> _EmulatedRows:
        return _EmulatedRows(self._inner.prepare(rows), int((rows.stop - rows.seen).sum()))

    def attend_stored(self, op: Operator, prepared: _EmulatedRows, store: LayerCache, q: Tensor) -> Partial:
        times, token_bytes = self._times, store.token_bytes
        self._device.begin(times.attention_s + prepared.stored_tokens * token_bytes * times.attention_byte_s)
        stored = self._inner.attend_stored(op, prepared.inner, store, q)
        self._device.finish()
        return stored

    def attend_new(self, op: Operator, prepared: _EmulatedRows, q: Tensor, kv: StoredRows) -> Partial:
        return self._inner.attend_new(op, prepared.inner, q, kv)

    def finish(
        self, op: Operator, prepared: _EmulatedRows, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor
    ) -> None:
        self._inner.finish(op, prepared.inner, stored, q, kv, out)

    def block_scores(self, op: Operator, store: LayerCache, blocks: Tensor, q: Tensor, seen: Tensor) -> Tensor:
        """Return the block scores, in the time of reading K once more: half of a token's bytes."""
        times, tokens = self._times, len(blocks) * store.k.shape[2]
        self._device.begin(times.attention_s + tokens * store.token_bytes / 2 * times.attention_byte_s)
        scores = self._inner.block_scores(op, store, blocks, q, seen)
        self._device.finish()
        return scores

    def write_rows(self, store: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        self._inner.write_rows(store, slot_mapping, rows)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        self._inner.merge(parts, left, right)

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        self._inner.merge_output(stored, new, sinks, out)
