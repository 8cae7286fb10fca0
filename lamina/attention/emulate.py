"""The best backend of this machine, as slow as an emulated memory device (``lamina.emulate``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.attention import AttentionBackend, Operator, get
from lamina.attention.merge import Partial
from lamina.emulate import Device, DeviceTimes
from lamina.kv.pool import LayerStore, RowTable


def open_backend(device: torch.device, dtype: torch.dtype) -> Emulated:
    """Takes the times of the environment; without them it adds none. Raises ValueError for times that cannot be."""
    return Emulated(get("auto", device, dtype), DeviceTimes.from_environment() or DeviceTimes())


class _Prepared(NamedTuple):
    inner: Any
    stored_tokens: int  # that attention reads, over all sequences


class Emulated(AttentionBackend):
    """See ``AttentionBackend`` for the contract. A layer's attention takes its time from ``attend_stored``, when Q is
    there, to the end of ``finish``; the device is one, so the attention of another step waits for it.
    """

    def __init__(self, inner: AttentionBackend, times: DeviceTimes) -> None:
        self._inner = inner
        self._times = times
        self._device = Device()

    def prepare(self, rows: RowTable) -> _Prepared:
        return _Prepared(self._inner.prepare(rows), int((rows.first - rows.seen).sum()))

    def attend_stored(self, op: Operator, prepared: _Prepared, store: LayerStore, q: Tensor) -> Partial:
        token_bytes = op.kv_heads * (op.qk_dim + op.v_dim) * q.element_size()
        times = self._times
        self._device.begin(times.attention_s + prepared.stored_tokens * token_bytes * times.attention_byte_s)
        return self._inner.attend_stored(op, prepared.inner, store, q)

    def attend_new(self, op: Operator, prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return self._inner.attend_new(op, prepared.inner, q, k, v)

    def finish(
        self, op: Operator, prepared: _Prepared, stored: Partial, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        self._inner.finish(op, prepared.inner, stored, q, k, v, out)
        self._device.finish()
