"""The numba backend: a compiled kernel for decode on CPUs, and the reference backend for sequences with more rows.

It is the portable backend: numba compiles its kernel for any CPU at run time, without a native module.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable
from lamina.kv.stored_format import Scales, StoredRows

from . import AttentionBackend, Operator
from .merge import Partial
from .reference import ReferenceAttention

OPTIONS = ".numba_config.yaml"  # numba reads options from this file in the current directory, even code folders
if os.path.exists(OPTIONS):
    raise ImportError(f"numba would take options from {os.path.abspath(OPTIONS)}: start Lamina in another directory")

from . import numba_kernels  # noqa: E402

BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.uint8,
}
COMPILE_S = 60.0  # seconds for other processes to compile
LOOK_S = 0.02
THREAD_TOKENS = 4096  # (token, KV head) pairs from which on another thread pays off

Array = NDArray[Any]


def open_backend(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> NumbaAttention:
    """Open the backend for queries of ``dtype``. Its first use on a machine takes some seconds, to compile."""
    if device.type != "cpu":
        raise ValueError(f"attention backend 'numba' computes on CPUs, not on {device}")
    return NumbaAttention(store_dtype)


class _NumbaRows:
    """The sequences with one row as the kernel takes them, and the others as the reference backend takes them."""

    def __init__(self, table: RowTable, reference: ReferenceAttention) -> None:
        single = table.count == 1
        decode = table.select_sequences(single)
        self.arrays = (table.row[single], decode.seen, decode.stop, decode.first, decode.origin, decode.table)
        self.tokens = decode.stop - decode.seen
        self.other_rows = torch.from_numpy(np.repeat(~single, table.count).nonzero()[0])
        self.others = reference.prepare(table.select_sequences(~single)) if len(self.other_rows) else None

    def bounds(self, kv_heads: int, threads: int) -> list[int]:
        """Cut the kernel's work items into runs of about equal cost, at most one for each thread."""
        cost = np.repeat(self.tokens + 1, kv_heads).cumsum()
        runs = max(1, min(threads, int(cost[-1]) // THREAD_TOKENS))
        return [0, *np.searchsorted(cost, cost[-1] * np.arange(1, runs) / runs).tolist(), len(cost)]


class NumbaAttention(AttentionBackend):
    """The ``AttentionBackend`` of numba kernels on the CPU."""

    def __init__(self, store_dtype: torch.dtype) -> None:
        self._reference = ReferenceAttention(torch.device("cpu"), _merge)
        self._helpers = ThreadPoolExecutor(thread_name_prefix="lamina-attention")  # starts threads on demand
        with _in_turn():
            self.compile_kernels(store_dtype)

    def prepare(self, rows: RowTable) -> _NumbaRows:
        return _NumbaRows(rows, self._reference)

    def attend_stored(self, op: Operator, prepared: _NumbaRows, store: LayerCache, q: Tensor) -> Partial:
        out = _empty(op, q)
        if prepared.others is not None:
            rows = prepared.other_rows
            out.o[rows], out.lse[rows] = self._reference.attend_stored(op, prepared.others, store, q[rows])
        if len(prepared.tokens):
            scaled = (q.to(torch.float32) * op.spec.scale).numpy()
            slopes = np.empty(0, np.float32) if op.slopes is None else op.slopes.numpy()
            arrays = (_array(store.k), _array(store.v), *_scales(store.scales, 3))
            inputs = (scaled, *arrays, *prepared.arrays, slopes)
            bounds = prepared.bounds(op.kv_heads, torch.get_num_threads())
            self._run(inputs, np.float32(op.spec.softcap), bounds, (out.o.numpy(), out.lse.numpy()))
        return out

    def attend_new(self, op: Operator, prepared: _NumbaRows, q: Tensor, kv: StoredRows) -> Partial:
        out = _empty(op, q)
        if prepared.others is not None:
            rows = prepared.other_rows
            out.o[rows], out.lse[rows] = self._reference.attend_new(op, prepared.others, q[rows], kv.select_rows(rows))
        queries, spec = q.to(torch.float32).numpy(), op.spec  # one kernel for queries of all dtypes
        arrays = (queries, _array(kv.k), _array(kv.v), *_scales(kv.scales, 2))
        scale, softcap = np.float32(spec.scale), np.float32(spec.softcap)
        numba_kernels.attend_self(*arrays, prepared.arrays[0], scale, softcap, out.o.numpy(), out.lse.numpy())
        return out

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        merged = _merge(*(Partial(parts.o[at], parts.lse[at]) for at in (left, right)))
        parts.o[left], parts.lse[left] = merged

    def _run(
        self, inputs: tuple[Array, ...], softcap: np.float32, bounds: list[int], outputs: tuple[Array, ...]
    ) -> None:
        """Run the kernel over work items ``bounds[i] .. bounds[i + 1]``, the first run on this thread. Python's lock is
        released.
        """
        first, *others = pairwise(bounds)
        helped = [self._helpers.submit(numba_kernels.attend_stored, *inputs, softcap, *run, *outputs) for run in others]
        numba_kernels.attend_stored(*inputs, softcap, *first, *outputs)
        for run in helped:
            run.result()

    def compile_kernels(self, store_dtype: torch.dtype) -> None:
        stored = _array(torch.empty(1, 1, 1, 1, dtype=store_dtype))
        numbers, integers = np.empty((1, 1, 1), np.float32), np.empty((1, 1), np.int64)
        tensors, zero = (numbers, stored, stored, *_scales(None, 3)), np.float32(0.0)
        inputs = (*tensors, *[integers[0]] * 5, integers, numbers[0, 0])
        self._run(inputs, zero, [0, 0], (numbers, numbers[0]))
        numba_kernels.merge(np.zeros((2, 1, 1), np.float32), np.zeros((2, 1), np.float32), 0, 1)
        rows = (numbers, stored[0], stored[0], *_scales(None, 2), integers[0, :0])
        numba_kernels.attend_self(*rows, zero, zero, numbers, numbers[0])


@contextmanager
def _in_turn() -> Iterator[None]:
    """Let one process at a time compile: the first one saves the result next to the source, and the others read it."""
    limit = time.monotonic() + COMPILE_S
    with open(numba_kernels.__file__) as file:
        while time.monotonic() < limit:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOOK_S)
            except OSError:  # this file system has no locks
                break
        yield


def _merge(left: Partial, right: Partial) -> Partial:
    """Merge like ``merge.merge``, with the kernel's arithmetic."""
    o = torch.stack([left.o, right.o]).view(2, -1, left.o.shape[-1])
    lse = torch.stack([left.lse, right.lse]).view(2, -1)
    empty = lse.amax(0) == float("-inf")
    numba_kernels.merge(o.numpy(), lse.numpy(), 0, 1)
    o[0, empty], lse[0, empty] = 0.0, float("-inf")
    return Partial(o[0].view_as(left.o), lse[0].view_as(left.lse))


def _array(x: Tensor) -> Array:
    array: Array = x.view(BITS[x.dtype]).numpy()
    return array


def _scales(scales: Scales | None, dims: int) -> tuple[Array, Array]:
    """Return scales as arrays; empty ones if there are none."""
    none: Array = np.empty((0,) * dims, np.float32)
    return (scales.k.numpy(), scales.v.numpy()) if scales else (none, none)


def _empty(op: Operator, q: Tensor) -> Partial:
    return Partial(torch.empty(q.shape[0], op.q_heads, op.v_dim), torch.empty(q.shape[0], op.q_heads))
