"""K at other positions against an oracle in fp64: whole and partial rotations, both pairings, every stored form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, allocate_layer
from lamina.kv.rope_shift import rotate_blocks, rotate_keys
from lamina.kv.stored_format import MAX_VALUE, dequantise, is_scaled, quantise
from lamina.protocol.step_plan import Rotary

D = 32


def rotary(pairs: int = 16, start: int = 0, *, interleaved: bool = False) -> Rotary:
    return Rotary((10000.0 ** -(np.arange(pairs) / pairs)).astype("<f8").tobytes(), start, interleaved)


def oracle(x: Tensor, of: Rotary, delta: int) -> Tensor:
    """Pair by pair, as a matrix, in fp64."""
    out, frequencies = x.double().clone(), np.frombuffer(of.frequencies, "<f8")
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if of.interleaved else (i, i + len(frequencies))
        pair = torch.stack([x[..., of.start + a], x[..., of.start + b]], -1).double()
        c, s = np.cos(delta * frequency), np.sin(delta * frequency)
        turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
        out[..., of.start + a], out[..., of.start + b] = (pair @ turn.T).unbind(-1)
    return out


FORMS = [rotary(), rotary(interleaved=True), rotary(4), rotary(4, 24), rotary(6, 2, interleaved=True), Rotary(b"")]


@pytest.mark.parametrize("of", FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("delta", [-1024, -128, 1, 100_000])
def test_it_is_the_rotation(of: Rotary, delta: int) -> None:
    x = torch.randn(3, 2, D, generator=torch.Generator().manual_seed(1))
    got = rotate_keys(x, of, delta)
    assert got.dtype == torch.float32
    assert (got - oracle(x, of, delta)).abs().max() < 2e-6
    assert (rotate_keys(got, of, -delta) - x).abs().max() < 2e-6
    if of.frequencies:
        wrong = rotate_keys(x, Rotary(of.frequencies, of.start, not of.interleaved), delta)
        assert (wrong - oracle(x, of, delta)).abs().max() > 0.1, "the pairing would not be seen"
        assert (rotate_keys(x, of, -delta) - oracle(x, of, delta)).abs().max() > 0.01, "nor the direction"


def stored(x: Tensor, dtype: torch.dtype) -> LayerCache:
    """x [blocks, heads, size, D] as K of a store."""
    kv = allocate_layer(len(x), x.shape[1], x.shape[2], D, D, dtype, torch.device("cpu"))
    numbers, scale = quantise(x, dtype) if is_scaled(dtype) else (x.to(dtype), None)
    kv.k.view(torch.uint8)[: len(x)] = numbers.view(torch.uint8)
    if kv.scales is not None and scale is not None:
        kv.scales.k[: len(x)] = scale
    return kv


def read(kv: LayerCache, count: int) -> Tensor:
    return dequantise(kv.k[:count], None if kv.scales is None else kv.scales.k[:count]).clone()


def step_of(dtype: torch.dtype, size: Tensor) -> Tensor:
    """The most that rounding once to a stored form moves an element of rows whose largest is ``size``."""
    if dtype == torch.int8:
        return size / (2 * MAX_VALUE[dtype])
    return size * (torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("shifts", [1, 8])
def test_stored_keys_stay_within_their_rounding(dtype: torch.dtype, shifts: int) -> None:
    """Each shift rounds once: 8 of them are at most 8 roundings away, where a row's largest element is at most sqrt(2)
    times as large as before.
    """
    x = torch.randn(4, 2, 8, D, generator=torch.Generator().manual_seed(2))
    kv, of = stored(x, dtype), rotary()
    start = read(kv, 4)
    untouched = [kv.k[0].clone(), kv.v.clone()]
    for _ in range(shifts):
        rotate_blocks(kv, [1, 3], of, -128)
    wanted = oracle(start, of, -128 * shifts)[[1, 3]]
    size = 2**0.5 * start[[1, 3]].abs().amax(-1, keepdim=True)
    limit = shifts * 2**0.5 * (step_of(dtype, size) + 2e-6)  # a rotation turns an error of two elements into one
    assert bool(((read(kv, 4)[[1, 3]] - wanted).abs() <= limit).all())
    assert bool(((start[[1, 3]] - wanted).abs().amax(-1) > limit[..., 0] / shifts).all()), (
        "unmoved keys would not be seen"
    )
    assert torch.equal(kv.k[0].view(torch.uint8), untouched[0].view(torch.uint8))
    assert torch.equal(kv.v.view(torch.uint8), untouched[1].view(torch.uint8))


def test_a_block_that_was_never_written_stays_zero() -> None:
    for dtype in (torch.int8, torch.bfloat16):
        kv = stored(torch.zeros(2, 1, 8, D), dtype)
        rotate_blocks(kv, [0], rotary(), -128)
        rotate_blocks(kv, [], rotary(), -128)
        assert not read(kv, 2).any()


def test_what_is_not_turned_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("lamina.kv.rope_shift.rotate_keys", never)
    rotate_blocks(stored(torch.ones(2, 1, 8, D), torch.float32), [0], Rotary(b""), -128)
