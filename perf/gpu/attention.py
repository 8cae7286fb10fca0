"""The attention part of gpu_suite.py: every head size against fp64, and one CUDA graph over growing lengths. It prints
microseconds of a layer, and bytes per second of stored tokens next to torch's and FlashInfer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from common import BrokenError
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable
from lamina.kv.stored_format import MAX_VALUE, Scales, StoredRows, dequantise, head_bytes, to_stored_format
from lamina.ops.attention import Operator
from lamina.ops.attention.merge import CHUNK_TOKENS, Partial
from lamina.ops.attention.spec import AttentionSpec

from .place import DEVICE, IS_DRY, backend, capture, seconds, synchronize

BLOCK = 16
# Sequences, tokens; 32 query heads, 8 KV heads of 128, bf16.
SHAPES = ((4, 256), (2, 128)) if IS_DRY else ((64, 8192), (32, 4096))
TARGET = 0.85  # of the measured read bandwidth

Result = dict[str, Any]


def operator(q_heads: int, kv_heads: int, dim: int, **spec: Any) -> Operator:
    slopes = 0.5 ** torch.arange(1, q_heads + 1, device=DEVICE, dtype=torch.float32) if spec.get("alibi") else None
    return Operator(
        spec=AttentionSpec(scale=dim**-0.5, **spec),
        q_heads=q_heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, slopes=slopes,
    )  # fmt: skip


def store(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """Random K and V, and the null block."""
    k, v = (torch.randn(tokens // BLOCK + 1, kv_heads, BLOCK, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    k[-1], v[-1] = 0, 0
    return LayerCache(k, v)


def row_table(lengths: Sequence[int], room: int, window: int = 0) -> RowTable:
    """One row a sequence after ``lengths`` stored tokens; ``room`` tokens each, their blocks scattered."""
    n, each = len(lengths), room // BLOCK
    ids = np.random.default_rng(0).permutation(n * each).reshape(n, each)
    stop, ones = np.array(lengths, np.int64), np.ones(n, np.int64)
    seen = np.clip(stop - window + 1, 0, stop) if window else 0 * stop
    origin = seen // CHUNK_TOKENS * CHUNK_TOKENS
    width = int(-(-(stop - origin).max() // CHUNK_TOKENS)) * (CHUNK_TOKENS // BLOCK)
    table = np.full((n, max(width, 1)), n * each, np.int64)
    for i in range(n):
        blocks = ids[i, int(origin[i]) // BLOCK : -(-int(stop[i]) // BLOCK)]
        table[i, : len(blocks)] = blocks
    return RowTable(window, BLOCK, n * each, np.arange(n), stop, ones, seen, stop, origin, table)


def oracle(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor, i: int) -> Tensor:
    """Sequence i's attention over its stored tokens, fp64 [Hq, D]."""
    low, high, origin = int(rows.seen[i]), int(rows.stop[i]), int(rows.origin[i])
    ids = torch.from_numpy(rows.table[i]).to(DEVICE)
    k, v = (x[ids].transpose(0, 1).flatten(1, 2)[:, low - origin : high - origin].double() for x in (kv.k, kv.v))
    k, v = (x.repeat_interleave(op.q_heads // op.kv_heads, 0) for x in (k, v))
    score = (k @ q[i].double()[:, :, None])[..., 0] * op.spec.scale
    if op.spec.softcap:
        score = op.spec.softcap * torch.tanh(score / op.spec.softcap)
    if op.slopes is not None:
        away = torch.arange(low, high, device=DEVICE) - int(rows.first[i])
        score = score + op.slopes.double()[:, None] * away
    return (score.softmax(-1)[:, None] @ v)[:, 0]


def worst(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor, part: Partial) -> float:
    """The largest error of a head, relative to the largest vector of its sequence."""
    errors = []
    for i in np.flatnonzero(rows.stop > rows.seen).tolist():
        want = oracle(op, rows, kv, q, i)
        errors.append(float((part.o[i].double() - want).norm(dim=-1).max() / want.norm(dim=-1).max()))
    return max(errors) if not any(e != e for e in errors) else float("nan")


def in_form(kv: LayerCache, dtype: torch.dtype | None) -> tuple[LayerCache, LayerCache]:
    """``kv`` as it is stored in ``dtype`` (None = as it is), and what that stands for."""
    rows = to_stored_format(kv.k, kv.v, dtype or kv.k.dtype)
    if rows.scales is None:
        return kv, kv
    meant = LayerCache(dequantise(rows.k, rows.scales.k), dequantise(rows.v, rows.scales.v))
    return LayerCache(rows.k, rows.v, rows.scales), meant


def exactness() -> Result:
    """Every kind of head and of K and V, against fp64. o is not rounded, so 16-bit stores are as exact as fp32 ones."""
    torch.manual_seed(0)
    lengths, errors = [1, 127, 128, 300] if IS_DRY else [1, 127, 128, 1000, 5000, 20_001], Result()
    wires = (torch.bfloat16,) if IS_DRY else (torch.bfloat16, torch.float16, torch.float32)
    room = -(-max(lengths) // 512) * 512
    for dtype, form in ((dtype, form) for dtype in wires for form in (None, *MAX_VALUE)):
        kernels, name = backend(dtype, form), str(form or dtype)[6:]
        for dim in (128,) if IS_DRY else (64, 80, 128, 256):
            for group, spec in ((1, {}), (4, {"softcap": 3.0}), (8, {"window": 700}), (12, {"alibi": True})):
                op = operator(2 * group, 2, dim, **spec)
                kv, meant = in_form(store(len(lengths) * room, 2, dim, dtype), form)
                rows = row_table(lengths, room, int(spec.get("window", 0)))
                q = torch.randn(len(lengths), op.q_heads, dim, device=DEVICE, dtype=dtype)
                part = kernels.attend_stored(op, kernels.prepare(rows), kv, q)
                errors[f"{str(dtype)[6:]} over {name} {dim} x{group}"] = worst(op, rows, meant, q, part)
    bad = {name: error for name, error in errors.items() if not error < 5e-5}
    if bad:
        raise BrokenError(f"errors over 5e-5: {bad}")
    return {"worst": max(errors.values()), "cases": len(errors)}


def graph(replays: int) -> Result:
    """One captured graph over growing lengths, bit for bit what separate launches give, and near fp64."""
    torch.manual_seed(1)
    kernels, room, dtype, every = backend(torch.bfloat16), 8192, torch.bfloat16, 50
    starts, q_heads, kv_heads = [1, 100, 127, 1000, 3000, 4095, 4096, 7000], 32, 8
    if IS_DRY:  # emulated, 50 replays of these would take minutes
        starts, q_heads, kv_heads, room, replays, every = [1, 126, 255], 4, 1, 512, 4, 2
    count = len(starts)
    op, kv = operator(q_heads, kv_heads, 128), store(count * room, kv_heads, 128, dtype)
    shapes = (q_heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(count, heads, 128, device=DEVICE, dtype=dtype) for heads in shapes)
    out = torch.empty_like(q)
    step = kernels.new_step(sequences=count, rows=count, tokens=room, block_size=BLOCK)
    kernels.refill(step, row_table(starts, room))
    kernels.finish(op, step, kernels.attend_stored(op, step, kv, q), q, StoredRows(k, v), out)
    kept: list[Partial] = []

    def attend() -> None:
        kept[:] = [kernels.attend_stored(op, step, kv, q)]
        kernels.finish(op, step, kept[0], q, StoredRows(k, v), out)

    replay = capture(attend)
    error, checked = 0.0, 0
    for i in range(replays):
        rows = row_table([n + i for n in starts], room)
        kernels.refill(step, rows)
        replay()
        stored = kept[0]
        if i % every and i != replays - 1:
            continue
        prepared, want = kernels.prepare(rows), torch.empty_like(out)
        fresh = kernels.attend_stored(op, prepared, kv, q)
        kernels.finish(op, prepared, fresh, q, StoredRows(k, v), want)
        if not (torch.equal(stored.o, fresh.o) and torch.equal(stored.lse, fresh.lse) and torch.equal(out, want)):
            raise BrokenError(f"replay {i} differs from separate launches")
        error, checked = max(error, worst(op, rows, kv, q, stored)), checked + 1
    if not error < 5e-5:
        raise BrokenError(f"error {error} against fp64")
    return {"replays": replays, "checked": checked, "worst": error}


def memory() -> Result:
    """GB/s of a copy (bytes read and written) and of a read."""
    data = torch.empty(1 << (20 if IS_DRY else 31), dtype=torch.uint8, device=DEVICE).view(torch.float32).normal_()
    other = torch.empty_like(data)
    size = data.numel() * 4 / 1e9
    return {"copy_gb_s": 2 * size / seconds(lambda: other.copy_(data)), "read_gb_s": size / seconds(data.sum)}


def launches() -> Result:
    """Microseconds of a layer of decode without a graph, where nothing but launches takes time."""
    kernels, dtype = backend(torch.bfloat16), torch.bfloat16
    op, kv, rows = operator(32, 8, 128), store(4 * 128, 8, 128, dtype), row_table([100] * 4, 128)
    q, k, v = (torch.randn(4, heads, 128, device=DEVICE, dtype=dtype) for heads in (32, 8, 8))
    prepared, out = kernels.prepare(rows), torch.empty_like(q)
    kernels.finish(op, prepared, kernels.attend_stored(op, prepared, kv, q), q, StoredRows(k, v), out)
    synchronize()
    start, rounds = time.perf_counter(), 2 if IS_DRY else 500
    for _ in range(rounds):
        kernels.finish(op, prepared, kernels.attend_stored(op, prepared, kv, q), q, StoredRows(k, v), out)
    synchronize()
    return {"layer_us": (time.perf_counter() - start) / rounds * 1e6}


def attention() -> Result:
    """GB/s of K and V of a decode step, by shape and contender; one that does not run is named with its error."""
    torch.manual_seed(2)
    speeds = Result()
    for sequences, tokens in SHAPES:
        op, rows = operator(32, 8, 128), row_table([tokens] * sequences, tokens)
        kv = store(sequences * tokens, 8, 128, torch.bfloat16)
        q = torch.randn(sequences, 32, 128, device=DEVICE, dtype=torch.bfloat16)
        size = 2 * sequences * tokens * 8 * 128 * 2 / 1e9
        rates = speeds[f"{sequences} x {tokens}"] = Result()
        for name, contender in CONTENDERS.items():
            try:
                rates[name] = size / seconds(contender(op, rows, kv, q))
            except Exception as error:  # noqa: BLE001 - it may not be installed
                rates[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        del kv
    return speeds


def eight_bits() -> Result:
    """GB/s of K and V of a decode step that are stored in 8 bits, their scales included."""
    torch.manual_seed(3)
    rates, (sequences, tokens) = Result(), SHAPES[0]
    op, rows = operator(32, 8, 128), row_table([tokens] * sequences, tokens)
    q = torch.randn(sequences, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    shape = sequences * tokens // BLOCK + 1, 8, BLOCK
    for dtype in MAX_VALUE:
        k, v = (torch.randint(-100, 100, (*shape, 128), device=DEVICE, dtype=torch.int8).view(dtype) for _ in range(2))
        kv = LayerCache(k, v, Scales(*(torch.full(shape, 0.01, device=DEVICE) for _ in range(2))))
        kernels = backend(q.dtype, dtype)
        size = sequences * tokens * 8 * head_bytes(128, 128, dtype) / 1e9
        run = partial(kernels.attend_stored, op, kernels.prepare(rows), kv, q)
        rates[f"{str(dtype)[6:]} {sequences} x {tokens}"] = size / seconds(run)
    return rates


def ours(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor) -> Callable[[], Any]:
    kernels = backend(q.dtype)
    prepared = kernels.prepare(rows)
    return lambda: kernels.attend_stored(op, prepared, kv, q)


def dense(rows: RowTable, kv: LayerCache, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same work without pages: q [S, Hq, 1, D], k, v [S, Hkv, tokens, D]."""
    shape = len(rows.stop), kv.k.shape[1], int(rows.stop[0]), kv.k.shape[3]
    k, v = (x[:-1].reshape(-1).view(shape) for x in (kv.k, kv.v))
    return q[:, :, None], k, v


def sdpa(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor) -> Callable[[], Any]:
    q, k, v = dense(rows, kv, q)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, enable_gqa=True)


def flex(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = dense(rows, kv, q)
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, enable_gqa=True)


def flashinfer(op: Operator, rows: RowTable, kv: LayerCache, q: Tensor) -> Callable[[], Any]:
    wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True
    )
    n, width = rows.table.shape
    indptr = torch.arange(n + 1, dtype=torch.int32) * width
    indices, last = torch.from_numpy(rows.table.reshape(-1).astype(np.int32)).to(DEVICE), torch.full((n,), BLOCK).int()
    wrapper.plan(
        indptr, indices, last, op.q_heads, op.kv_heads, op.qk_dim, BLOCK, q_data_type=q.dtype, kv_data_type=q.dtype
    )
    return lambda: wrapper.run(q, (kv.k, kv.v), return_lse=True)


CONTENDERS = {"lamina": ours, "torch SDPA": sdpa, "FlexAttention": flex, "FlashInfer": flashinfer}


def judge(results: dict[str, Result]) -> None:
    """The aims: bytes per second of a read, and at most 5 % slower than the best."""
    rates, limit = results["attention"], max(results["memory"].get(f"{x}_gb_s", 0.0) for x in ("copy", "read"))
    missed = []
    for shape in (f"{n} x {tokens}" for n, tokens in SHAPES):
        speeds = {name: rate for name, rate in rates.get(shape, {}).items() if isinstance(rate, float)}
        speed = speeds.get("lamina", 0.0)
        if limit and speed < TARGET * limit:
            missed.append(f"{shape}: {speed / limit:.2f} of the measured bandwidth, not {TARGET}")
        if speed < 0.95 * max(speeds.values(), default=0.0):
            missed.append(f"{shape}: {speed / max(speeds.values()):.2f} of the best")
        rates.setdefault("of_memory", {})[shape] = speed / limit if limit else None
    rates["missed"] = missed
    if not all(isinstance(rates.get(f"{n} x {tokens}", {}).get("lamina"), float) for n, tokens in SHAPES):
        rates.setdefault("error", "lamina's own attention did not run")
