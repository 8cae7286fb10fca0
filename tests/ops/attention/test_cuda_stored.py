"""Stored numbers of 8 bits on a GPU: every code stands for its number, compiled with the product's flags."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_attention as contract
import torch
from cuda_emulation import emulated, needs_gxx
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable, allocate_layer
from lamina.ops.attention.cuda_kernels import CSRC, FLAGS

pytestmark = needs_gxx

CPU = torch.device("cpu")
DIM = 64  # as in the contract's cases, so that there is less to compile
HEADS = 256 // DIM
cores = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["plain", "bf16", "fp16"])
stores = pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def codes(store: torch.dtype) -> Tensor:
    """All 256."""
    return torch.arange(256, dtype=torch.uint8).view(store)


def meant(store: torch.dtype) -> Tensor:
    """Returns the values of codes.

    The two that torch has as NaN are never stored; kernels of CPUs and GPUs go on counting.
    """
    found = codes(store).float()
    return torch.where(found.isnan(), torch.where(torch.arange(256) < 128, 480.0, -480.0), found)


def tokens(count: int, kv_heads: int, store: torch.dtype) -> tuple[RowTable, LayerCache]:
    """``count`` sequences of one stored token and one row, each in a block of its own; all numbers 0, scales 1."""
    ones, at = np.ones(count, np.int64), np.arange(count)
    table = RowTable(0, 16, count, at, ones, ones, 0 * ones, ones, 0 * ones, np.full((count, 8), count, np.int64))
    table.table[:, 0] = at
    kv = allocate_layer(count, kv_heads, 16, DIM, DIM, store, CPU)
    assert kv.scales is not None
    for scale in kv.scales:
        scale[:] = 1.0
    return table, kv


def test_the_product_flushes_subnormal_floats() -> None:
    """CuPy does, whatever is asked: so tests do."""
    assert "-ftz=true" in FLAGS


def all_of_v(dtype: torch.dtype, store: torch.dtype, csrc: Path = CSRC) -> Tensor:
    """Returns the output for one token whose V has every code once."""
    table, kv = tokens(1, HEADS, store)
    kv.v[0, :, 0] = codes(store).view(HEADS, DIM)
    backend, q = emulated(dtype, csrc=csrc, store=store), torch.zeros(1, HEADS, DIM, dtype=dtype)
    return backend.attend_stored(contract.operator(HEADS, HEADS, DIM), backend.prepare(table), kv, q).o.flatten()


@pytest.mark.long
@cores
@stores
def test_every_code_of_v(dtype: torch.dtype, store: torch.dtype) -> None:
    assert torch.equal(all_of_v(dtype, store), meant(store))


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="this processor's floats are not flushed")
def test_codes_that_pass_through_a_subnormal_float_are_lost(tmp_path: Path) -> None:
    """A GPU loses them in the same way, so the test of every code would show it."""
    shutil.copytree(CSRC / "attention" / "cuda", tmp_path / "attention" / "cuda")
    path = tmp_path / "attention" / "cuda" / "stored.cuh"
    text, right = path.read_text(), "to_float(Half{u16((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f"
    assert right in text
    wrong = "from_bits(u32(x.bits & 0x80) << 24 | u32(x.bits & 0x7f) << 20) * 0x1p120f"
    path.write_text(text.replace(right, wrong))
    found, want = all_of_v(torch.float32, torch.float8_e4m3fn, tmp_path), meant(torch.float8_e4m3fn)
    lost = [*range(0x01, 0x08), *range(0x81, 0x88)]
    assert torch.nonzero(found != want).flatten().tolist() == lost
    assert not found[lost].any()


@pytest.mark.long(but=["int8-plain", "int8-bf16", "int8-fp16", "fp8-plain", "fp8-bf16"])
@cores
@stores
def test_every_code_of_k(dtype: torch.dtype, store: torch.dtype) -> None:
    """The log-sum-exp of one token is its score: each code meets a query that is 1 there and 0 elsewhere."""
    table, kv = tokens(256, 1, store)
    each, at = torch.arange(256), torch.arange(256) * 7 % DIM
    q = torch.zeros(256, 1, DIM, dtype=dtype)
    kv.k.view(torch.uint8)[each, 0, 0, at] = each.to(torch.uint8)
    q[each, 0, at] = 1
    backend = emulated(dtype, store=store)
    found = backend.attend_stored(contract.operator(1, 1, DIM, scale=1.0), backend.prepare(table), kv, q)
    want = meant(store)
    assert torch.allclose(found.lse.flatten(), want, rtol=1e-6, atol=0)
    assert torch.equal(found.lse.flatten() == 0, want == 0)
