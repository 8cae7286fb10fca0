from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.kv.stored_format import (
    DTYPES,
    MAX_VALUE,
    dequantise,
    head_bytes,
    kv_cache_dtype_name,
    quantise,
    stored_dtype,
    to_stored_format,
)

SMALLEST = 2.0**-126  # below it fp32 itself loses bits
dtypes = pytest.mark.parametrize("dtype", MAX_VALUE, ids=kv_cache_dtype_name)


def rows(seed: int, count: int, dim: int, spread: float) -> torch.Tensor:
    """Rows whose numbers, and which themselves, differ by up to ``spread`` orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    size = torch.rand(count, dim, generator=g) + torch.rand(count, 1, generator=g)
    return torch.randn(count, dim, generator=g) * 10.0 ** (spread * (size - 1))


@dtypes
@given(seed=st.integers(0, 9999), dim=st.integers(1, 130), spread=st.sampled_from([0.0, 1.0, 5.0, 15.0, 36.0]))
@settings(max_examples=60, deadline=None)
def test_errors_are_within_the_stated_bound(dtype: torch.dtype, seed: int, dim: int, spread: float) -> None:
    x = rows(seed, 9, dim, spread)
    x[3], x[4, dim // 2] = 0.0, -0.0
    numbers, scale = quantise(x, dtype)
    assert numbers.dtype == dtype
    assert scale.dtype == torch.float32
    most = x.double().abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        bound = most / 254
    else:
        bound = (x.double().abs() / 16).maximum(most / 448 / 1024)
    error = (dequantise(numbers, scale).double() - x.double()).abs()
    assert (error <= bound * (1 + 1e-4) + 127 * SMALLEST).all()
    assert (dequantise(numbers, scale)[3] == 0).all()
    if spread == 0.0 and dim >= 16:
        assert (error > bound / 4).any(), "the bound says something"


@dtypes
def test_a_row_is_stored_the_same_whatever_is_beside_it(dtype: torch.dtype) -> None:
    x = rows(1, 40, 24, 3.0).view(10, 4, 24)
    numbers, scale = quantise(x, dtype)
    for i in range(10):
        for h in range(4):
            one, its = quantise(x[i : i + 1, h : h + 1], dtype)
            assert torch.equal(one[0, 0].view(torch.int8), numbers[i, h].view(torch.int8))
            assert its[0, 0] == scale[i, h]


@dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_own_row_nan(dtype: torch.dtype, bad: float) -> None:
    x = rows(2, 3, 8, 0.0)
    clean = dequantise(*quantise(x, dtype))
    x[1, 5] = bad
    found = dequantise(*quantise(x, dtype))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@dtypes
def test_every_number_stands_for_itself(dtype: torch.dtype) -> None:
    """A stored number that comes again, as on a replayed step, is stored as the same: with a scale of 1."""
    if dtype == torch.int8:
        x = torch.arange(-127, 128).float()[None]
    else:
        bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
        x = bits.view(dtype).float()[None]
    numbers, scale = quantise(x, dtype)
    assert scale.item() == 1.0
    assert torch.equal(dequantise(numbers, scale), x)


def test_bytes_and_names() -> None:
    assert head_bytes(128, 128, torch.bfloat16) == 512
    assert head_bytes(128, 128, torch.int8) == 264
    assert head_bytes(64, 32, torch.float8_e4m3fn) == 104
    assert stored_dtype("auto", torch.float16) == torch.float16
    assert {name: stored_dtype(name, torch.float32) for name in DTYPES} == DTYPES
    with pytest.raises(ValueError, match="--kv-cache-dtype must be one of auto, int8, fp8, not 'int4'"):
        stored_dtype("int4", torch.float32)
    k = torch.randn(2, 3, 4)
    assert to_stored_format(k, k, torch.float32).k is k
