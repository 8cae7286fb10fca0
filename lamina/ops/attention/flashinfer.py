"""The flashinfer backend: FlashInfer's kernels for decode over stored tokens, the cuda backend for everything else.

HARDWARE-UNVERIFIED: tested with a stand-in for FlashInfer on a CPU.

FlashInfer folds a sequence's tokens in an order of its own. So it is given every chunk of 128 tokens as a request by
itself, and the results, with their log-sum-exp, are merged in the tree. That keeps the contract's bits. It costs a
partial result for each chunk, rounded to the store's dtype, which is what FlashInfer returns.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable, SlotMapping
from lamina.kv.stored_format import StoredRows

from . import AttentionBackend, Operator
from .cuda import CudaAttention, DeviceTable
from .cuda_kernels import CupyKernels
from .merge import CHUNK_TOKENS, Partial
from .reference_tiles import _levels

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
NEEDED = "disable_split_kv"  # an argument of its plan, without which a chunk's bits would depend on other chunks


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> FlashInferAttention:
    """Open the backend for stores of ``dtype`` (bfloat16, float16) on a CUDA device."""
    if device.type != "cuda":
        raise ValueError(f"attention backend 'flashinfer' computes on CUDA devices, not on {device}")
    if dtype == torch.float32:
        raise ValueError("attention backend 'flashinfer' takes bfloat16 and float16, not float32")
    try:
        cuda = CudaAttention(CupyKernels(device), device, dtype)
        return FlashInferAttention(_wrapper_class(), cuda, device, dtype)
    except ImportError as error:
        raise ImportError(f"attention backend 'flashinfer' cannot be used here: {error}") from error


def _wrapper_class() -> Any:
    try:
        flashinfer = import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            f"it needs FlashInfer, which did not load ({error}); pip install flashinfer-python"
        ) from error
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    if NEEDED not in inspect.signature(wrapper.plan).parameters:
        raise ImportError(f"it needs a FlashInfer whose plan takes {NEEDED}, {flashinfer.__version__} does not")
    return wrapper


class FlashInferChunks:
    """A decode step's stored chunks as FlashInfer's requests, and the merges of their results."""

    def __init__(self, table: RowTable, device: torch.device) -> None:
        base, size = table.origin // CHUNK_TOKENS, table.block_size
        counts = np.where(table.seen < table.stop, -(-table.stop // CHUNK_TOKENS) - base, 0)
        sequence = np.repeat(np.arange(len(counts)), counts)
        chunk = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts) + base[sequence]
        tokens = np.minimum(CHUNK_TOKENS, table.stop[sequence] - chunk * CHUNK_TOKENS)
        blocks = -(-tokens // size)
        column = (chunk - base[sequence]) * (CHUNK_TOKENS // size)
        ids = [table.table[s, c : c + n] for s, c, n in zip(sequence, column, blocks, strict=True)]
        first = np.flatnonzero(np.diff(sequence, prepend=-1))
        self.block_size = size
        self.indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32))
        self.last = torch.from_numpy((tokens - (blocks - 1) * size).astype(np.int32))
        self.indices = torch.from_numpy(np.concatenate(ids).astype(np.int32)).to(device)
        self.row = torch.from_numpy(table.row[sequence]).to(device)
        self.levels = [tuple(torch.from_numpy(x).to(device) for x in pair) for pair in _levels(sequence, chunk)]
        self.roots = torch.from_numpy(first).to(device)
        self.planned: dict[tuple[object, ...], Any] = {}  # shape -> FlashInfer's wrapper


class FlashInferRows(NamedTuple):
    step: DeviceTable
    chunks: FlashInferChunks | None  # None: the cuda backend attends


class FlashInferAttention(AttentionBackend):
    """The ``AttentionBackend`` that calls FlashInfer's kernels."""

    def __init__(self, wrapper: Any, cuda: CudaAttention, device: torch.device, dtype: torch.dtype) -> None:
        """``wrapper``: flashinfer.BatchDecodeWithPagedKVCacheWrapper."""
        self._wrapper, self._cuda, self._device, self._dtype = wrapper, cuda, device, dtype
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def prepare(self, rows: RowTable) -> FlashInferRows:
        step, decode = self._cuda.prepare(rows), not rows.window and (rows.count == 1).all()
        taken = decode and (rows.seen == rows.origin).all() and (rows.seen < rows.stop).any()
        return FlashInferRows(step, FlashInferChunks(rows, self._device) if taken else None)

    def attend_stored(self, op: Operator, prepared: FlashInferRows, store: LayerCache, q: Tensor) -> Partial:
        chunks, known = prepared.chunks, op.qk_dim == op.v_dim and op.qk_dim in HEAD_DIMS and op.slopes is None
        if chunks is None or not known:
            return self._cuda.attend_stored(op, prepared.step, store, q)
        wrapper = self._planned(op, chunks)
        o, lse = wrapper.run(q[chunks.row], (store.k, store.v), return_lse=True)
        parts = Partial(o.to(torch.float32), lse * log(2))  # its log-sum-exp has base 2
        for left, right in chunks.levels:
            self._cuda.merge(parts, left, right)
        out = Partial(
            torch.zeros(q.shape[0], op.q_heads, op.v_dim, device=self._device),
            torch.full((q.shape[0], op.q_heads), float("-inf"), device=self._device),
        )
        rows = chunks.row[chunks.roots]
        out.o[rows], out.lse[rows] = parts.o[chunks.roots], parts.lse[chunks.roots]
        return out

    def attend_new(self, op: Operator, prepared: FlashInferRows, q: Tensor, kv: StoredRows) -> Partial:
        return self._cuda.attend_new(op, prepared.step, q, kv)

    def finish(
        self, op: Operator, prepared: FlashInferRows, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor
    ) -> None:
        self._cuda.finish(op, prepared.step, stored, q, kv, out)

    def write_rows(self, store: LayerCache, slot_mapping: SlotMapping, rows: StoredRows) -> None:
        self._cuda.write_rows(store, slot_mapping, rows)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        self._cuda.merge(parts, left, right)

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        self._cuda.merge_output(stored, new, sinks, out)

    def _planned(self, op: Operator, chunks: FlashInferChunks) -> Any:
        key = (op.q_heads, op.kv_heads, op.qk_dim, op.spec)
        if key not in chunks.planned:
            wrapper = self._wrapper(self._workspace, "HND", use_tensor_cores=op.q_heads > op.kv_heads)
            wrapper.plan(
                chunks.indptr,
                chunks.indices,
                chunks.last,
                op.q_heads,
                op.kv_heads,
                op.qk_dim,
                chunks.block_size,
                logits_soft_cap=op.spec.softcap or None,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                sm_scale=op.spec.scale,
                disable_split_kv=True,
            )
            chunks.planned[key] = wrapper
        return chunks.planned[key]
