"""Rows that become int8 before integers multiply them: every entry and variant against one definition in fp64.

Covers: lamina/ops/gemm/quantized.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantized import DTYPES, E2M1, ENTRIES, FORMS, Layer, fp32, native, open_entry, rows_of, weight
from torch import Tensor

from lamina.ops.gemm.quantized import INT4, UINT4, PackedForm, QuantizedWeight

pytestmark = pytest.mark.no_retry


def int8_weight(
    cols: int, k: int, bits: int, group: int | None, *, offsets: bool = False, seed: int = 0
) -> QuantizedWeight:
    w = weight(cols, k, bits, group, offsets=offsets, values=UINT4 if offsets else INT4, seed=seed)
    return QuantizedWeight(w.codes, w.scales, w.offsets, w.values, int8_inputs=True)


def scales_and_codes(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Each row's scale [rows], and its int8 [rows, K], both in fp64: the rule of csrc/gemm/quantized.h."""
    rows = x.double().numpy()
    scales = fp32(np.abs(rows).max(1) / 127.5)
    codes = np.rint(fp32(rows / np.where(scales == 0, 1, scales)[:, None]))  # to even
    return scales, np.clip(codes, -128, 127)


def defined(x: Tensor, w: QuantizedWeight, b: Tensor | None) -> Tensor:
    """The rest of that rule. fp64 holds all integers, and the exact results that are rounded, but for very few."""
    scales, rows = scales_and_codes(x)
    q, by = w.q().double().numpy(), w.scales.double().numpy()
    y = np.zeros((len(rows), len(q)))
    for group in range(by.shape[1]):
        part = slice(group * w.group, (group + 1) * w.group)
        y = fp32(y + fp32(rows[:, part] @ q[:, part].T) * by[:, group])
        if w.offsets is not None:
            y = fp32(y + fp32(rows[:, part].sum(1))[:, None] * w.offsets.double().numpy()[:, group])
    y = fp32(y * scales[:, None])
    if b is not None:
        y = fp32(y + b.double().numpy())
    return torch.from_numpy(y).float().to(x.dtype)


@pytest.mark.parametrize("name", [e for e in ENTRIES if e.startswith("native")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMS, ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["", "offsets"])
def test_every_variant_gives_the_bits_of_the_definition(
    name: str, dtype: torch.dtype, bits: int, group: int | None, offsets: bool
) -> None:
    k = 384 if group else 390
    backend, x, b = open_entry(name), rows_of(21, k, dtype), rows_of(1, 70, dtype, 2)[0]
    x[4] = 0
    w = int8_weight(70, k, bits, group, offsets=offsets)
    layer, due = Layer(backend, w), defined(x, w, b)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 21):
        assert torch.equal(layer.linear(x[:count], b), due[:count]), f"{count} rows"
    floats = Layer(backend, QuantizedWeight(w.codes, w.scales, w.offsets, w.values))
    assert not torch.equal(floats.linear(x, b), due), "rows of floats would not be seen"
    ids = torch.tensor([69, 0, 33])
    data, form = backend.pack_quantized(w)
    assert torch.equal(backend.quantized_rows(ids, data, form), w.dequantized(torch.float32)[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMS, ids=str)
def test_a_row_depends_on_itself_alone_in_every_variant(dtype: torch.dtype, bits: int, group: int | None) -> None:
    w, x = int8_weight(101, 1152, bits, group, offsets=True), rows_of(150, 1152, dtype)
    whole = Layer(open_entry(ENTRIES[-1], 1), w).linear(x)
    for variant in native.usable():
        layer = Layer(open_entry(f"native/{variant}", 3), w)
        for count in (1, 2, 3, 7, 17, 64, 65, 129, 150):
            part = layer.linear(x[-count:].clone())
            assert torch.equal(part, whole[-count:]), f"{variant}, {count} rows"


@pytest.mark.parametrize("name", ENTRIES)
@given(
    form=st.sampled_from(FORMS), rows=st.integers(1, 40), cols=st.integers(1, 70), groups=st.integers(1, 9),
    k=st.integers(1, 300), offsets=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_shape_equals_fp64_within_the_bound(
    name: str, form: tuple[int, int | None], rows: int, cols: int, groups: int, k: int, offsets: bool, seed: int
) -> None:
    bits, group = form
    k = k if group is None else groups * group
    w, x = int8_weight(cols, k, bits, group, offsets=offsets, seed=seed), rows_of(rows, k, torch.float32, seed)
    scales, codes = scales_and_codes(x)
    exact = torch.from_numpy(codes) @ w.dequantized(torch.float64).T * torch.from_numpy(scales)[:, None]
    terms = w.q().abs().double() * w.scales.abs().double().repeat_interleave(w.group, 1)
    if w.offsets is not None:
        terms += w.offsets.abs().double().repeat_interleave(w.group, 1)
    most = (k + 8) * 2.0**-24 * (torch.from_numpy(np.abs(codes)) @ terms.T * torch.from_numpy(scales)[:, None])
    assert ((Layer(open_entry(name), w).linear(x).double() - exact).abs() <= most + 2.0**-149).all()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_codes_and_sums_are_exact(name: str, dtype: torch.dtype) -> None:
    """255 * 127, of which 16-bit sums of two would overflow, for as many inputs as no float counts."""
    k = 1 << 16
    x, w = torch.full((2, k), 255, dtype=dtype), torch.full((3, k), -128, dtype=torch.int8)
    x[1] = -255  # -127.5 scales are -128
    y = Layer(open_entry(name), QuantizedWeight(w, torch.full((3, 1), 2.0**-16), int8_inputs=True)).linear(x)
    assert torch.equal(y, torch.tensor([[-127.0 * 256], [128.0 * 256]]).expand(2, 3).to(dtype))


@pytest.mark.parametrize("name", [e for e in ENTRIES if e.startswith("native")])
def test_more_products_than_an_int32_holds_are_refused(name: str) -> None:
    x, w = torch.full((1, 1 << 17), -255.0), torch.full((1, 1 << 17), -128, dtype=torch.int8)
    most = QuantizedWeight(w[:, 1:].contiguous(), torch.ones(1, 1), int8_inputs=True)
    y = Layer(open_entry(name), most).linear(x[:, 1:])
    assert y.item() == float(fp32(np.array(128.0 * 128 * 131071))) * 2
    with pytest.raises(ValueError, match="rows of int8 have up to 131071 inputs by channel, not 131072"):
        QuantizedWeight(w, torch.ones(1, 1), int8_inputs=True)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_an_infinity_or_no_number_are_no_numbers_and_others_stay(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(4, 33, dtype=dtype)
    x[0, 5], x[1, 32], x[2] = float("nan"), float("-inf"), 0
    w = QuantizedWeight(torch.ones(40, 33, dtype=torch.int8), torch.ones(40, 1), int8_inputs=True)
    y = Layer(open_entry(name), w).linear(x)
    assert y[:2].isnan().all()
    assert y[2].eq(0).all()
    assert torch.equal(y[3], (torch.tensor(127.0 * 33) * (torch.tensor(1.0) / 127.5)).to(dtype).expand(40))


def test_a_rows_scale_may_be_no_normal_number() -> None:
    least = torch.finfo(torch.float32).smallest_normal
    x = torch.tensor([[least, -least / 2] * 16, [2.0**-149] * 32, [-191 * 2.0**-149, 2.0**-149] * 16])  # -191 scales
    w = QuantizedWeight(torch.ones(5, 32, dtype=torch.int8), torch.ones(5, 1), int8_inputs=True)
    due = defined(x, w, None)
    assert due[0].ne(0).all()
    for name in ENTRIES:
        assert torch.equal(Layer(open_entry(name), w).linear(x), due), name


def test_codes_of_floats_are_refused_and_a_form_says_what_it_is() -> None:
    codes, scales = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3)
    with pytest.raises(ValueError, match="codes of floats are not multiplied by rows of int8"):
        QuantizedWeight(codes, scales, values=E2M1, int8_inputs=True)
    for int8 in (False, True):
        form = PackedForm.of("native", QuantizedWeight(codes, scales, int8_inputs=int8))
        assert PackedForm.decode(form.encode()) == form
        assert form.int8_inputs == int8
