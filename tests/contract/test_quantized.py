"""Quantized weights: every entry of the table and every variant against one definition, which says what is rounded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from forked import launch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lamina.ops.gemm import get
from lamina.ops.gemm.quantized import GROUPS, INT4, UINT4, QuantizedWeight
from lamina.ops.gemm.quantized_op import QUANTIZED_EXPERTS_OP, QUANTIZED_LINEAR_OP, QUANTIZED_ROWS_OP

pytestmark = pytest.mark.no_retry

if TYPE_CHECKING:
    from lamina.ops.gemm import LinearBackend

native = pytest.importorskip("lamina.ops.gemm._gemm", reason="lamina.ops.gemm._gemm was not built")

BLOCK = 128  # numbers of k that are summed before they are scaled, where a row of w has one scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FORMS = [(bits, group) for bits, groups in GROUPS.items() for group in (*groups, None)]  # None: by channel
ENTRIES = ["torch", *(f"native/{v}" for v in native.usable())]


def open_entry(name: str, threads: int = 2) -> LinearBackend:
    from lamina.ops.gemm.native import NativeLinear

    return NativeLinear(threads, name.partition("/")[2]) if name.startswith("native") else get(name, threads)


class Layer:
    """A linear layer of a packed weight."""

    def __init__(self, backend: LinearBackend, w: QuantizedWeight) -> None:
        self._backend, self._packed = backend, backend.pack_quantized(w)
        self.nbytes = self._packed.data.nbytes

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        return self._backend.linear_quantized(x, self._packed.data, b, self._packed.form)


def weight(
    cols: int, k: int, bits: int, group: int | None, *, offsets: bool = False, scales: torch.dtype = torch.bfloat16,
    values: tuple[float, ...] = INT4, seed: int = 0,
) -> QuantizedWeight:  # fmt: skip
    """Any codes; scales and offsets of a large dynamic range."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (cols, k), generator=g, dtype=torch.int8)
    shape = (cols, 1 if group is None else k // group)

    def numbers() -> Tensor:
        return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-9, -2, shape, generator=g)).to(scales)

    return QuantizedWeight(
        codes if bits == 8 else (codes & 15).to(torch.uint8), numbers(), numbers() if offsets else None, values
    )


def rows_of(count: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, k, generator=g) * 2.0 ** torch.randint(-5, 1, (count, 1), generator=g)).to(dtype)


def fp32(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x.astype(np.float32).astype(np.float64)


def defined(x: Tensor, w: QuantizedWeight, b: Tensor | None) -> Tensor:
    """The rule of csrc/gemm/quantized.h. fp64 holds the exact results that are rounded to fp32, but for very few."""
    q, rows = w.q().double().numpy(), x.double().numpy()
    scales = w.scales.double().numpy()
    offsets = np.zeros_like(scales) if w.offsets is None else w.offsets.double().numpy()
    y = np.zeros((len(rows), len(q)))
    block = BLOCK if w.by_channel else w.group
    for begin in range(0, q.shape[1], block):
        size = min(block, q.shape[1] - begin)
        part, number = slice(begin, begin + size), 0 if w.by_channel else begin // block
        sums = np.zeros_like(y)
        for k in itertools.chain.from_iterable((i + 1, i) for i in range(begin, begin + size, 2)):
            if k < q.shape[1]:
                sums = fp32(sums + np.outer(rows[:, k], q[:, k]))
        y = fp32(y + sums * scales[:, number])
        if w.offsets is not None:
            lanes = np.zeros((len(rows), 8))
            for k in range(size):
                lanes[:, k % 8] = fp32(lanes[:, k % 8] + rows[:, part][:, k])
            for width in (4, 2, 1):
                lanes = fp32(lanes[:, :width] + lanes[:, width : 2 * width])
            y = fp32(y + lanes * offsets[:, number])
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
    backend, x, b = open_entry(name), rows_of(21, 384, dtype), rows_of(1, 70, dtype, 2)[0]
    w = weight(70, 384, bits, group, offsets=offsets, values=UINT4 if offsets else INT4)
    layer, due = Layer(backend, w), defined(x, w, b)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 21):
        assert torch.equal(layer.linear(x[:count], b), due[:count]), f"{count} rows"


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(("bits", "group"), FORMS, ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["", "offsets"])
def test_rows_of_a_packed_weight_are_its_numbers(name: str, bits: int, group: int | None, offsets: bool) -> None:
    backend = open_entry(name)
    for scales, k in ((torch.bfloat16, 384), (torch.float16, 384), (torch.float32, 384 if group else 200)):
        w = weight(70, k, bits, group, offsets=offsets, scales=scales, values=UINT4 if offsets else INT4)
        spread = [np.repeat(x.float().numpy(), w.group, 1) for x in (w.scales, w.offsets) if x is not None]
        due = w.q().numpy() * spread[0] + (spread[1] if offsets else np.float32(0))
        packed = backend.pack_quantized(w)
        for ids in (torch.tensor([[3, 69], [0, 33]]), torch.arange(70).flip(0), torch.empty(0, dtype=torch.int64)):
            found = QUANTIZED_ROWS_OP(ids, packed.data, packed.form)
            assert torch.equal(found, torch.from_numpy(due)[ids])
            assert torch.equal(backend.quantized_rows(ids, packed.data, packed.form), found)
    torch.set_default_dtype(torch.float16)  # as a thread may that makes a model
    try:
        other = weight(70, 384, bits, group, offsets=offsets, values=tuple(x / 2 for x in w.values))
        packed, due = backend.pack_quantized(other), other.dequantized(torch.float32)
        assert torch.equal(backend.quantized_rows(torch.arange(70), packed.data, packed.form), due)
    finally:
        torch.set_default_dtype(torch.float32)
    for wrong in (70, -1):
        with pytest.raises(IndexError, match="there are 70 rows"):
            backend.quantized_rows(torch.tensor([1, wrong]), packed.data, packed.form)


@pytest.mark.parametrize("name", ENTRIES)
def test_rows_are_looked_up_by_integers_of_32_or_64_bits(name: str) -> None:
    packed = open_entry(name).pack_quantized(weight(70, 384, 8, 32))
    ids = torch.tensor([3, 0, 69, 1])
    due = QUANTIZED_ROWS_OP(ids, packed.data, packed.form)
    assert torch.equal(QUANTIZED_ROWS_OP(ids.int(), packed.data, packed.form), due)
    for wrong in (ids.float(), ids.to(torch.uint8)):
        with pytest.raises(ValueError, match="ids must be int64 or int32, not torch"):
            QUANTIZED_ROWS_OP(wrong, packed.data, packed.form)


def bound(name: str, x: Tensor, w: QuantizedWeight, b: Tensor, exact: Tensor) -> Tensor:
    """The most by which y may differ from the exact result. A product is rounded so often on its way to y in fp32, each
    time relative to the sum of all magnitudes. Then y is rounded to the dtype of x.
    """
    k = w.codes.shape[1]
    block = min(BLOCK if w.by_channel else w.group, k)
    roundings = k + 4 if name == "torch" else block + 2 * -(-k // block) + 2
    share = roundings * 2.0**-24 / (1 - roundings * 2.0**-24)
    parts = QuantizedWeight(w.codes, w.scales.abs(), None if w.offsets is None else w.offsets.abs(), w.values)
    terms = parts.q().abs().double() * parts.scales.double().repeat_interleave(w.group, 1)
    if parts.offsets is not None:
        terms += parts.offsets.double().repeat_interleave(w.group, 1)
    sums = share * (x.double().abs() @ terms.T + b.double().abs())
    return sums + torch.finfo(x.dtype).eps / 2 * (exact.abs() + sums) + torch.finfo(x.dtype).smallest_normal


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    form=st.sampled_from(FORMS),
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    groups=st.integers(1, 9),
    k=st.integers(1, 300),
    offsets=st.booleans(),
    scales=st.sampled_from(DTYPES),
    values=st.sampled_from([INT4, UINT4, E2M1]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_equals_fp64_within_the_bound(
    name: str, dtype: torch.dtype, form: tuple[int, int | None], rows: int, cols: int, groups: int, k: int,
    offsets: bool, scales: torch.dtype, values: tuple[float, ...], seed: int,
) -> None:  # fmt: skip
    bits, group = form
    k = k if group is None else groups * group
    w = weight(cols, k, bits, group, offsets=offsets, scales=scales, values=values, seed=seed)
    x, b = rows_of(rows, k, dtype, seed), rows_of(1, cols, dtype, seed + 1)[0]
    exact = x.double() @ w.dequantized(torch.float64).T + b.double()
    y = Layer(open_entry(name), w).linear(x, b)
    assert y.dtype == dtype
    most = bound(name, x, w, b, exact)
    assert ((y.double() - exact).abs() <= most).all()
    if dtype == torch.float32:  # a code that is off by eight is seen
        wrong = QuantizedWeight(w.codes.clone(), w.scales.abs() + 1, w.offsets, INT4)
        at = int(x[0].abs().argmax())
        exact = x.double() @ wrong.dequantized(torch.float64).T
        wrong.codes[:, at] ^= 8
        y = Layer(open_entry(name), wrong).linear(x)
        assert ((y.double() - exact).abs() > bound(name, x, wrong, torch.zeros(cols), exact))[0].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMS, ids=str)
def test_a_row_depends_on_itself_alone_in_every_variant(dtype: torch.dtype, bits: int, group: int | None) -> None:
    w = weight(101, 1152, bits, group, offsets=True, scales=torch.float32)
    x = rows_of(300, 1152, dtype)
    whole = Layer(open_entry(ENTRIES[-1], 1), w).linear(x)
    for variant, threads in itertools.product(native.usable(), (1, 3)):
        layer = Layer(open_entry(f"native/{variant}", threads), w)
        for count in (1, 2, 3, 7, 17, 33, 64, 65, 128, 129, 300):
            part = layer.linear(x[-count:].clone())
            assert torch.equal(part, whole[-count:]), f"{variant}, {threads} threads, {count} rows"


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_number_and_infinity_stay_in_their_rows(name: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 32, dtype=dtype)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    w = QuantizedWeight(torch.ones(40, 32, dtype=torch.int8), torch.ones(40, 2))
    y = Layer(open_entry(name), w).linear(x)
    assert y[0].isnan().all()
    assert y[1].eq(float("inf")).all()
    assert y[2].eq(32).all()


@pytest.mark.parametrize("name", ENTRIES)
def test_any_strides_and_no_rows(name: str) -> None:
    w, x, b = weight(40, 64, 4, 32, offsets=True), rows_of(6, 64, torch.bfloat16), rows_of(1, 40, torch.bfloat16)[0]
    layer = Layer(open_entry(name), w)
    due = layer.linear(x, b)
    strided = QuantizedWeight(*(torch.stack([t, t], dim=1)[:, 0] for t in (w.codes, w.scales, w.offsets)))
    other = Layer(open_entry(name), strided)
    for tensor in (strided.codes, strided.scales, strided.offsets):
        tensor.zero_()  # nothing of them is kept
    spaced = torch.stack([x, x * 3], dim=1)[:, 0]
    assert torch.equal(other.linear(spaced.view(2, 3, 64), torch.stack([b, b * 3], dim=1)[:, 0]).view(6, 40), due)
    assert layer.linear(x[:0]).shape == (0, 40)
    assert layer.nbytes >= 40 * (32 + 8)


def test_zero_points_are_offsets() -> None:
    """A zero point of integers gives what q without it gives, as 8 bits and as 4."""
    g = torch.Generator().manual_seed(0)
    q, zero = torch.randint(0, 16, (33, 64), generator=g), torch.randint(0, 16, (33, 2), generator=g)
    scales = torch.ones(33, 2) / 4
    x, spread = torch.randint(-8, 8, (5, 64), generator=g).float(), zero.repeat_interleave(32, 1)
    plain = QuantizedWeight((q - spread).to(torch.int8), scales)
    shifted = QuantizedWeight(q.to(torch.uint8), scales, -scales * zero, UINT4)
    for name in ENTRIES:
        assert torch.equal(
            Layer(open_entry(name), shifted).linear(x), Layer(open_entry(name), plain).linear(x)
        )  # exact


@pytest.mark.parametrize("name", ENTRIES)
def test_no_rows_or_no_columns_are_no_numbers(name: str) -> None:
    layer, none = (Layer(open_entry(name), weight(cols, 96, 4, 32)) for cols in (5, 0))
    assert layer.linear(torch.ones(0, 96)).shape == (0, 5)
    assert none.linear(torch.ones(2, 3, 96)).shape == (2, 3, 0)


CODES, SCALES = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ((CODES.int(), SCALES), r"codes must be int8 or uint8 \[N, K\], not torch.int32 \(4, 96\)"),
        ((CODES, SCALES.double()), "scales must be fp32, bf16 or fp16, and of one dtype, not torch.float64"),
        ((CODES, SCALES, SCALES.half()), "offsets must be fp32, bf16 or fp16, and of one dtype, not torch.float16"),
        ((CODES, SCALES, SCALES[:, :1]), r"offsets \(4, 1\) do not fit codes \(4, 96\)"),
        ((CODES, SCALES[:3]), r"scales \(3, 3\) do not fit codes \(4, 96\)"),
        (
            (CODES, SCALES[:, :2]),
            r"by channel or by groups of 16, 32, 64, 128, not as \(4, 2\) scales of \(4, 96\) codes",
        ),
        ((CODES, torch.ones(4, 12)), "by channel or by groups of 16, 32, 64, 128"),
        ((CODES.char(), torch.ones(4, 0)), "by channel or by groups of 16, 32, 128"),
        ((CODES, SCALES, None, (0.1,) * 16), "a code of 4 bits stands for one of 16 numbers that bf16 can hold"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tensors: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QuantizedWeight(*tensors)


@pytest.mark.parametrize(
    ("x", "b", "text"),
    [
        (torch.ones(2, 95), None, r"x must be \[\.\.\., 96\] of fp32, bf16 or fp16, not torch.float32 \(2, 95\)"),
        (torch.ones(2, 96).double(), None, "not torch.float64"),
        (torch.ones(2, 96), torch.ones(3), r"b must be \[4\] of torch.float32, not torch.float32 \(3,\)"),
        (torch.ones(2, 96), torch.ones(4).half(), "not torch.float16"),
    ],
)
def test_refuses_operands_that_do_not_fit(x: Tensor, b: Tensor | None, text: str) -> None:
    layer = Layer(open_entry(ENTRIES[-1]), QuantizedWeight(CODES, SCALES))
    with pytest.raises(ValueError, match=text):
        layer.linear(x, b)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_operator_computes_what_its_backend_does(name: str) -> None:
    w, x, b = weight(40, 64, 4, 32, offsets=True), rows_of(6, 64, torch.float32), rows_of(1, 40, torch.float32)[0]
    data, form = open_entry(name).pack_quantized(w)
    y = QUANTIZED_LINEAR_OP(x.view(2, 3, 64), data, b, form)
    assert torch.allclose(y.view(6, 40), x @ w.dequantized(torch.float32).T + b, rtol=1e-4, atol=1e-4)
    assert QUANTIZED_LINEAR_OP(x.to("meta"), data.to("meta"), None, form).shape == (6, 40)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("offsets", [False, True])
def test_rows_of_experts_have_the_bits_of_their_experts_weights(name: str, offsets: bool) -> None:
    backend, experts = open_entry(name), 5
    weights = [weight(70, 64, 4, 32, offsets=offsets, values=E2M1, seed=seed) for seed in range(experts)]
    packed = backend.pack_quantized_experts(iter(weights), experts)
    assert len(packed.data) == experts
    g = torch.Generator().manual_seed(9)
    x, b = torch.randn(13, 64, generator=g), torch.randn(experts, 70, generator=g)
    ids = torch.tensor([4, 0, 0, 2, 4, 4, 0, 2, 2, 4, 0, 4, 2])  # 1 and 3 have no rows
    for bias in (None, b):
        y = backend.linear_quantized_experts(x, packed.data, ids, bias, packed.form)
        through = QUANTIZED_EXPERTS_OP(x, packed.data, ids, bias, packed.form)
        for row, expert in enumerate(ids.tolist()):
            exact = x[row].double() @ weights[expert].dequantized(torch.float64).T
            exact += 0 if bias is None else bias[expert].double()
            assert float((y[row] - exact).norm() / exact.norm()) < 1e-5
            if name != "torch":
                own = Layer(backend, weights[expert])
                assert torch.equal(own.linear(x[row : row + 1], None if bias is None else bias[expert])[0], y[row])
        assert float((through - y).norm() / y.norm()) < 1e-6
    assert backend.linear_quantized_experts(x[:0], packed.data, ids[:0], b, packed.form).shape == (0, 70)


@pytest.mark.parametrize("name", ENTRIES)
def test_experts_of_several_forms_and_unknown_experts_are_refused(name: str) -> None:
    backend = open_entry(name)
    same, other = weight(32, 64, 4, 32), weight(32, 64, 4, 64)
    with pytest.raises(ValueError, match="experts of several forms"):
        backend.pack_quantized_experts([same, other], 2)
    packed = backend.pack_quantized_experts([same, same], 2)
    for ids, text in (([0, 2], "there are 2 experts, and a row names number 2"), ([0], "do not fit rows")):
        with pytest.raises(ValueError, match=text):
            backend.linear_quantized_experts(torch.zeros(2, 64), packed.data, torch.tensor(ids), None, packed.form)


def test_a_form_that_no_kernel_has_is_refused() -> None:
    engine = native.Engine(1, "")
    for form in ((5, 32), (4, 0), (4, 12)):
        with pytest.raises(ValueError, match=f"no weights of {form[0]} bits by blocks of {form[1]}"):
            engine.quantized_bytes(4, 96, *form, 0, 0, 0, 0, 0)
    halves = torch.arange(16.0) / 2
    for group in (32, 24):
        with pytest.raises(ValueError, match=f"no weights of 4 bits by blocks of {group}"):
            engine.quantized_bytes(4, 96, 4, group, 0, 0, 0, 1, halves.data_ptr() if group == 32 else 0)


def test_row_programs_refuse_forms_that_make_no_sense() -> None:
    from lamina.ops.gemm.native import NativeLinear, native_form
    from lamina.ops.rows._rows import Program
    from lamina.ops.rows.instructions import Instruction, View, encode

    backend = NativeLinear(1)
    form = native_form(backend.pack_quantized(weight(4, 32, 4, 32)).form)
    x, y, w = (
        View(slot, dtype, 0, (size,), (1,))
        for slot, (dtype, size) in enumerate([(torch.float32, 32), (torch.float32, 4), (torch.uint8, 1)])
    )

    def open_program(each: Instruction) -> Program:
        return Program(backend.engine, encode(3, [128, 16, 0], [], [each]), "")

    good = Instruction("linear", (32,), views=[x, y, w], n=4, form=form)
    open_program(good)
    for wrong in (
        replace(good, form=form._replace(numbers=(5, *form.numbers[1:]))),
        replace(good, form=form._replace(numbers=(4, 12, *form.numbers[2:]))),
        replace(good, form=form._replace(numbers=(*form.numbers[:3], 3, *form.numbers[4:]))),
        replace(good, form=form._replace(numbers=(*form.numbers[:5], 2, *form.numbers[6:]))),
        replace(good, form=None),
        replace(good, leading=32),
        replace(good, kind="layer_norm"),
        replace(good, n=5),  # y has 4
        replace(good, views=[x, replace(y, dtype=torch.bfloat16), w]),
        replace(good, views=[x, y, replace(w, dtype=torch.float32)]),
        replace(good, views=[x, replace(y, dtype=torch.uint8), w]),
    ):
        with pytest.raises(ValueError, match="of the table makes no sense$"):
            open_program(wrong)
    with pytest.raises(ValueError, match="^a weight in the order of torch, which native does not multiply$"):
        native_form(get("torch", 1).pack_quantized(weight(4, 32, 4, 32)).form)


AT_THE_END = """
    import ctypes, itertools, mmap, sys
    import torch
    from lamina.ops.gemm._gemm import Engine

    libc = ctypes.CDLL(None, use_errno=True)
    page, room = mmap.PAGESIZE, 40 * mmap.PAGESIZE

    def at_the_end(x):
        size = x.numel() * x.itemsize
        memory = mmap.mmap(-1, room + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(start + room), page, 0) == 0
        ctypes.memmove(start + room - size, x.data_ptr(), size)
        kept.append(memory)
        return start + room - size

    engine, kept = Engine(2, sys.argv[1]), []
    values = torch.arange(16.0)
    forms = [(4, 32, 0), (4, 128, 1), (8, 16, 0), (8, 128, 1)]
    for (bits, block, by_channel), kind, offsets, int8 in itertools.product(forms, range(3), range(2), range(2)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[kind]
        form = bits, block, by_channel, kind, offsets, int8, values.data_ptr()
        shapes = (1, 1, block), (2, 33, 3 * block), (9, 34, block), (17, 5, 2 * block), (1, 4, 96), (3, 9, 97)
        for rows, cols, k in shapes:
            if k % block and not by_channel:
                continue
            scales = at_the_end(torch.ones(cols, 1 if by_channel else k // block, dtype=dtype))
            codes = at_the_end(torch.ones(cols, k, dtype=torch.uint8))
            packed = at_the_end(torch.zeros(engine.quantized_bytes(cols, k, *form), dtype=torch.uint8))
            engine.pack_quantized(codes, scales, scales, packed, cols, k, *form)
            due = torch.full((rows, cols), k * (1.0 + offsets) + 1).to(dtype)
            if int8:  # 1 is 127 of 127.5 parts
                due = torch.full((rows, cols), 127.0 * k * (1 + offsets)) * torch.tensor(1 / 127.5) + 1
                due = due.to(dtype)
            x, b, y = (at_the_end(torch.ones(shape, dtype=dtype)) for shape in ((rows, k), (cols,), (rows, cols)))
            engine.linear_quantized(x, packed, b, y, kind, rows, cols, k, *form)
            result = torch.zeros_like(due)
            ctypes.memmove(result.data_ptr(), y, due.numel() * due.itemsize)
            assert torch.equal(result, due), (rows, cols, k, form)
    print("done")
"""


@pytest.mark.parametrize("variant", native.usable())
def test_nothing_is_touched_behind_the_operands(variant: str) -> None:
    """Each lies at the end of its pages, and the next page may not be read or written."""
    assert launch(variant, code=dedent(AT_THE_END)) == "done\n"
