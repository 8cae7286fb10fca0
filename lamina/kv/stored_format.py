"""K and V as they are stored: in the dtype of messages, or in 8 bits with a scale for each token and KV head.

A scale is fp32 and belongs to one row of numbers, [D]. So the stored form of a token depends on that row alone: not
on the other tokens of its block, nor on the order in which they came. Per block and head it would have to grow with
a later token, and the numbers before it would be rounded again.

    int8   scale = max |x| / 127    |x - number * scale| <= scale / 2
    fp8    scale = max |x| / 448    |x - number * scale| <= max(|x| / 16, scale / 1024)     (OCP E4M3, without infinity)

Both hold up to fp32's own rounding. A row with a NaN or an infinity has such a scale, and all of it becomes NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BYTES = 4
MAX_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes: numpy has neither bfloat16 nor float8
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # values of --kv-cache-dtype other than auto


class Scales(NamedTuple):
    """The factors of the numbers of K and of V, fp32: for a store [N + 1, Hkv, block_size], for rows [R, Hkv]."""

    k: Tensor
    v: Tensor


class StoredRows(NamedTuple):
    """The K and V of some rows in stored form: k [R, Hkv, D], v [R, Hkv, Dv]. ``scales``: only with 8 bits."""

    k: Tensor
    v: Tensor
    scales: Scales | None = None

    def select_rows(self, rows: Tensor | None) -> StoredRows:
        """Return a copy of some rows; None: all rows, without a copy."""
        if rows is None:
            return self
        scales = self.scales and Scales(self.scales.k[rows], self.scales.v[rows])
        return StoredRows(self.k[rows], self.v[rows], scales)


def stored_dtype(name: str, wire: torch.dtype) -> torch.dtype:
    """Return the dtype of --kv-cache-dtype ``name``; ``wire``: of messages. Raises ValueError for an unknown name."""
    if name not in ("auto", *DTYPES):
        raise ValueError(f"--kv-cache-dtype must be one of auto, {', '.join(DTYPES)}, not {name!r}")
    return DTYPES.get(name, wire)


def kv_cache_dtype_name(dtype: torch.dtype) -> str:
    """Return the value of --kv-cache-dtype for stores of ``dtype``."""
    return next((name for name, known in DTYPES.items() if known == dtype), "auto")


def is_scaled(dtype: torch.dtype) -> bool:
    """Return whether numbers of ``dtype`` have scales."""
    return dtype in MAX_VALUE


def head_bytes(qk_dim: int, v_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's K and V in one KV head, scales included."""
    return (qk_dim + v_dim) * dtype.itemsize + (2 * SCALE_BYTES if is_scaled(dtype) else 0)


def bounds_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of block bounds in a store of ``dtype``: the same, or fp32 if numbers have scales."""
    return torch.float32 if is_scaled(dtype) else dtype


def bounds_bytes(qk_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of the least and the largest K of one block, in one KV head."""
    return 2 * qk_dim * bounds_dtype(dtype).itemsize


def to_stored_format(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredRows:
    """Return rows of a message in the form of a store of ``dtype``; the same tensors if the dtype is the same."""
    if not is_scaled(dtype):
        return StoredRows(k, v)
    (k, k_scale), (v, v_scale) = quantise(k, dtype), quantise(v, dtype)
    return StoredRows(k, v, Scales(k_scale, v_scale))


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D] of any float dtype to numbers [..., D] of ``dtype`` and scale [...] fp32, each row by
    itself.
    """
    most = MAX_VALUE[dtype]
    x = x.to(torch.float32)
    scale = x.abs().amax(-1) / most
    # 0 / 0 is NaN. If the scale is subnormal, its own rounding may take a quotient out of the range.
    numbers = (x / scale.unsqueeze(-1)).nan_to_num_(0.0).clamp_(-most, most)
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), scale


def dequantise(numbers: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values of numbers [..., D] with scale [...] or None, in fp32."""
    wide = numbers.to(torch.float32)
    return wide if scale is None else wide * scale.unsqueeze(-1)
