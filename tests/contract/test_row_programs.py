"""Programs on rows: what torch computes, for each operator, dtype, number of rows and threads, and instruction set.

Covers: lamina/ops/rows/arithmetic.py, lamina/ops/rows/fusion.py, lamina/ops/rows/instructions.py,
lamina/ops/rows/layout_ops.py, lamina/ops/rows/lowering.py, lamina/ops/rows/program.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.converter import Slice, SlicedProgram
from lamina.ops import gemm, rows
from lamina.ops.gemm.packed_memory import PrivateMemory
from lamina.ops.gemm.packing import packed_weights
from lamina.ops.gemm.quantized import QuantizedWeight
from lamina.ops.gemm.quantized_op import QUANTIZED_LINEAR_OP, QUANTIZED_ROWS_OP
from lamina.ops.rows import program as row_program
from lamina.ops.rows._rows import Chain, Program
from lamina.ops.rows.instructions import Instruction, Operation, UnsupportedError, View, encode, registers_of
from lamina.ops.rows.program import ChainedSlice

pytestmark = pytest.mark.no_retry

WIDE = 600  # more than a chunk
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (1, 2, 7, 65)


class Part(nn.Module):
    """A piece of a model: ``compute`` of its weights and what it is given."""

    def __init__(self, compute: Callable[..., Any], weights: list[Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.weights = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, *x: Tensor) -> Any:
        made = self.compute(*self.weights, *x)
        return made if isinstance(made, tuple) else (made,)


def exported(part: Part, x: tuple[Tensor, ...]) -> SlicedProgram:
    with torch.no_grad():
        shapes = ({0: torch.export.Dim("rows", min=1, max=1 << 20)},) * len(x)
        module = torch.export.export(part, x, dynamic_shapes=(shapes,)).module()
    for node in list(module.graph.nodes):  # which a capture of a model has not
        if "_assert_" in str(node.target) or "_guards" in str(node.target):
            module.graph.erase_node(node)
    module.recompile()
    return SlicedProgram((Slice(0, module, "", {}),), (), (), rows="static")


def bound(part: Part, x: tuple[Tensor, ...], threads: int = 1, left: int = 0) -> Callable[..., tuple[Tensor, ...]]:
    """``part`` on rows, with no more than ``left`` of torch's operators, besides views."""
    return taken(exported(part, x), threads, left)


def taken(captured: SlicedProgram, threads: int = 1, left: int = 0) -> Callable[..., tuple[Tensor, ...]]:
    """Binds, as ``bound`` does, a program that is used up."""
    program = rows.bind_rows(captured, gemm.get("native", threads))
    found = program.slices[0]
    names = [
        str(n.target)
        for n in found.module.graph.nodes
        if n.op == "call_function" and str(n.target).startswith(("aten", "lamina"))
    ]
    assert len([n for n in names if "sym_size" not in n and "view" not in n]) <= left, names
    return found


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> None:
    """To a unit in the last place of the dtype, or a few of fp32's."""
    assert found.dtype == wanted.dtype
    unit = max(torch.finfo(wanted.dtype).eps, 2e-6)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=unit, atol=unit / 2, equal_nan=True)


def rotate(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def norm(w: Tensor, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


ONE: dict[str, Callable[[Tensor], Any]] = {
    "neg": torch.neg, "silu": F.silu, "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp,
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "cos": torch.cos, "sin": torch.sin,
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.1), "sqrt": lambda x: torch.sqrt(x * x), "square": torch.square,
    "cube": lambda x: x.float() ** 3, "numbers": lambda x: (x + 1.5) * 0.75 / 3.0 - 2,
    "clamp": lambda x: x.clamp(-0.5, 0.7), "clamp_min": lambda x: x.clamp(min=0.1),
    "mean": lambda x: x.float().mean(-1, keepdim=True) + 0.0,
    "reciprocal": lambda x: torch.reciprocal(x * x + 0.5), "widen": lambda x: (x.float() * 3.0).to(x.dtype),
    "rotate": lambda x: rotate(x.view(-1, 1, 6, 100)), "heads": lambda x: x.view(-1, 1, 6, 100).transpose(1, 2) * 2.0,
    "interleaved": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "split": lambda x: torch.cat([p * 2.0 for p in x.view(-1, 1, 6, 100).split(4, -2)], -2),
    "chunk": lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
    "select": lambda x: x.view(-1, 1, 6, 100).select(2, 3) + 0.5,
    "repeated": lambda x: x.repeat_interleave(2, -1) + 1.0,
    "permuted": lambda x: x.view(-1, 6, 4, 25).permute(0, 3, 1, 2) * 2.0,
    "expanded": lambda x: x.view(-1, 6, 1, 100).expand(-1, 6, 3, 100).reshape(-1, 18, 100) + 1.0,
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {  # a weight, then rows
    "add": lambda w, x, y: x + y, "sub": lambda w, x, y: x - w - y, "mul": lambda w, x, y: x * w * y,
    "div": lambda w, x, y: x / (y * y + 1.0), "max": lambda w, x, y: torch.maximum(x, y) + torch.minimum(x, w),
    "norm": lambda w, x, y: norm(w, x + y), "layer_norm": lambda w, x, y: F.layer_norm(x + y, (WIDE,), w, w, 1e-5),
    "no_bias": lambda w, x, y: F.layer_norm(x.view(-1, 6, 100), (100,), w.view(6, 100)[1], None, 1e-5),
    "broadcast": lambda w, x, y: x.view(-1, 6, 100) * y[..., :100] + w[:100],
    "computed weights": lambda w, x, y: x * (1.0 + w.float()) + y,
    "several": lambda w, x, y: (x + y, (x + y) * w, y.neg()),
}  # fmt: skip


@pytest.mark.long(but=["neg-torch.float32", "neg-torch.bfloat16", "neg-torch.float16", "silu-torch.float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_each_operator_gives_what_torch_gives(name: str, dtype: torch.dtype) -> None:
    shape = (3, 1, WIDE)
    if name in ONE:
        part, x = Part(ONE[name], []), (numbers(shape, dtype),)
    else:
        part, x = Part(TWO[name], [numbers((WIDE,), dtype, 9)]), (numbers(shape, dtype), numbers(shape, dtype, 1))
    unit = bound(part, x, threads=2)
    for count in SIZES:
        x = tuple(numbers((count, *t.shape[1:]), dtype, count + i) * 3 for i, t in enumerate(x))
        for found, wanted in zip(unit(*x), part(*x), strict=True):
            close(found, wanted)


@pytest.mark.long(but=["neg", "silu", "relu", "tanh", "sigmoid", "exp", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_a_chain_gives_the_bits_of_its_units(name: str) -> None:
    dtype = torch.bfloat16
    x: tuple[Tensor, ...] = (numbers((3, 1, WIDE), dtype),)
    part = Part(ONE[name], []) if name in ONE else Part(TWO[name], [numbers((WIDE,), dtype, 9)])
    if name in TWO:
        x = (*x, numbers((3, 1, WIDE), dtype, 1))
    program = rows.bind_rows(exported(part, x), gemm.get("native", 2))
    (chain,) = rows.chain_slices(program).slices
    assert isinstance(chain, ChainedSlice) or "run" not in program.slices[0].module.code
    for count in SIZES:
        x = tuple(numbers((count, *t.shape[1:]), dtype, count + i) for i, t in enumerate(x))
        assert all(torch.equal(a, b) for a, b in zip(chain(*x), program.slices[0](*x), strict=True))


def test_a_chain_passes_on_what_it_is_given_and_makes_what_is_wanted_twice_once() -> None:
    part = Part(lambda w, x, y: (x, F.linear(x, w) * 2.0, y, x), [numbers((64, 64), torch.bfloat16)])
    x = tuple(numbers((5, 1, 64), torch.bfloat16, i) for i in range(2))
    program = rows.bind_rows(exported(part, x), gemm.get("native", 2))
    (chain,) = rows.chain_slices(program).slices
    for each in (x, tuple(torch.stack([t, t], -1)[..., 0] for t in x), tuple(t[:0] for t in x)):
        found, wanted = chain(*each), program.slices[0](*each)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    many = tuple(numbers((500, 1, 64), torch.bfloat16, i) for i in range(2))  # more rows than one call takes
    assert all(torch.equal(a, b) for a, b in zip(chain(*many), program.slices[0](*many), strict=True))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "exp", "cos", "sin"])
def test_functions_are_exact_over_their_range(name: str) -> None:
    if name in ("cos", "sin"):
        near, far = torch.linspace(-100, 100, 20_001), torch.tensor([1e3, 12345.678, 1e6 + 0.25, 3.3e8, -7e8])
    else:
        near, far = torch.linspace(-20, 20, 20_001), torch.tensor([-1e30, -200.0, -104.0, -87.5, 88.7, 200.0, 1e30])
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, math.inf, -math.inf, math.nan])
    x = torch.cat([near, far, special])[:, None]
    (found,) = bound(Part(ONE[name], []), (x,))(x)
    wanted = ONE[name](x.double()).float().double()  # what is too large for floats is infinite
    unit = torch.finfo(torch.float32).eps
    size = wanted.abs().clamp_min(1.0 if name in ("cos", "sin") else 1e-30)
    if name in ("silu", "gelu", "gelu_tanh"):
        size = torch.maximum(size, x.double().abs() * 1e-2)  # tails are small relative to x
    right = (found.double() == wanted) | ((found.double() - wanted).abs() <= 8 * unit * size)
    assert right[: len(near) + len(far)].all(), (x[~right], found[~right], wanted[~right])
    assert found.isnan()[-1]
    assert found[-8:-3].isfinite().all()


def heads(w: Tensor, one: Tensor, two: Tensor, x: Tensor, cos: Tensor) -> tuple[Tensor, ...]:
    """Much of a layer: a norm, linear layers, an activation, rotation, a residual."""
    hidden = norm(w, x)
    gate = F.silu(F.linear(hidden, one)) * F.linear(hidden, one)
    out = x + F.linear(gate, two)
    q = F.linear(out, one).view(-1, 1, 8, 32).transpose(1, 2)
    return out, q * cos + rotate(q) * cos, q


@pytest.mark.long(but=["torch.float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_the_same_for_any_rows_beside_it(dtype: torch.dtype) -> None:
    part = Part(heads, [numbers((96,), dtype), numbers((256, 96), dtype, 1) / 10, numbers((96, 256), dtype, 2) / 16])
    x = numbers((70, 1, 96), dtype, 3), numbers((70, 1, 1, 32), dtype, 4)
    few, many = bound(part, x, threads=1), bound(part, x, threads=3)
    whole = few(*x)
    for count, unit in ((1, few), (5, many), (64, many)):
        for found, due in zip(unit(*(t[:count] for t in x)), whole, strict=True):
            assert torch.equal(found, due[:count])
    for found, wanted in zip(whole, part(*x), strict=True):
        torch.testing.assert_close(
            found.float(), wanted.float(), rtol=0.03, atol=0.03 if dtype != torch.float32 else 1e-4
        )


def test_results_stay_while_others_are_made() -> None:
    part = Part(lambda x: (x + 1.0, F.silu(x)), [])
    x, y = numbers((4, 1, 64), torch.float32), numbers((9, 1, 64), torch.float32, 1)
    unit = bound(part, (x,))
    first = unit(x)
    kept = [t.clone() for t in first]
    unit(y)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_weights_are_read_where_they_lie() -> None:
    part = Part(lambda w, x: x * w, [numbers((64,), torch.float32)])
    x = numbers((2, 1, 64), torch.float32)
    program = exported(part, (x,))
    weight = next(p for p in program.slices[0].module.parameters())
    unit = rows.bind_rows(program, gemm.get("native", 1)).slices[0]
    weight.fill_(2.0)
    assert torch.equal(unit(x)[0], x * 2.0)


def test_rows_with_gaps_and_no_rows_at_all() -> None:
    part = Part(lambda x: F.silu(x) + 1.0, [])
    x = numbers((6, 1, 64), torch.float32)
    unit = bound(part, (x,))
    apart = torch.stack([x, x], -1)[..., 0]
    assert torch.equal(unit(apart)[0], unit(x)[0])
    assert unit(x[:0])[0].shape == (0, 1, 64)


def test_linear_layers_take_what_they_are_given() -> None:
    wide = numbers((96, 128), torch.bfloat16, 1)
    weights = [
        numbers((48, 64), torch.bfloat16),
        numbers((48,), torch.bfloat16, 2),
        wide[:, :48],
        wide[:7, 48:54].contiguous(),
    ]

    def compute(one: Tensor, b: Tensor, two: Tensor, three: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        hidden = F.relu(F.linear(x, one, b))
        return F.linear(hidden, two), F.linear(hidden.view(-1, 6, 8).mT, three), hidden

    part, native = Part(compute, weights), gemm.get("native", 2)
    x = numbers((3, 1, 64), torch.bfloat16)
    unit = bound(part, (x,), threads=2)
    for count in (1, 2, 3, 300):  # the last one is more than native takes, where torch has instructions for bf16
        x = numbers((count, 1, 64), torch.bfloat16, count)
        hidden = F.relu(native.linear(x, weights[0], weights[1]))
        due = native.linear(hidden, weights[2]), native.linear(hidden.view(-1, 6, 8).mT, weights[3]), hidden
        for found, wanted in zip(unit(x), due, strict=True):
            torch.testing.assert_close(found, wanted)
            assert torch.equal(found, wanted) or count == 300


@pytest.mark.long(but=["3-torch.bfloat16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [3, 200])
def test_weights_in_other_forms(dtype: torch.dtype, count: int) -> None:
    """Parts, widened ones, single ones: whatever a unit does not take stays torch's."""
    forms: list[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = [
        (lambda w, b, x: F.linear(x.float(), w.float()), 1),
        (lambda w, b, x: F.linear(x, w, b.float().to(w.dtype)) * 1.0, 1),
        (lambda w, b, x: x.float() @ w.t().float(), 1),
        (lambda w, b, x: F.linear(x + 1.0, b), 1),
        (lambda w, b, x: F.linear(x, w, b[:1]), 1),
        (lambda w, b, x: F.linear(x + 1.0, w[:48]), 0),
        (lambda w, b, x: F.linear(x[..., :32] + 1.0, w[:, :32]), 0),
        (lambda w, b, x: F.linear(x[..., :32] + 1.0, w.view(128, 32), None), 0),
        (lambda w, b, x: F.linear(x, w[:32], b[:32]), 0),
    ]
    weights = [numbers((64, 64), dtype, 1), numbers((64,), dtype, 2)]
    x = numbers((count, 1, 64), dtype, 3)
    for number, (compute, left) in enumerate(forms):
        part = Part(compute, weights)
        unit = bound(part, (x,), left=4 * left)
        found, wanted = unit(x)[0], part(x)[0]
        assert found.shape == wanted.shape, number
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.2, msg=str(number))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    one = torch.tensor(0.123)
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda x: x + 0.123, lambda x: x - 0.123, lambda x: x * 0.123, lambda x: x**3, lambda x: x + one.to(x.dtype),
    ]  # fmt: skip
    x = numbers((7, 1, 500), dtype)
    for compute in forms:
        part = Part(compute, [])
        assert torch.equal(bound(part, (x,))(x)[0], part(x)[0])
    scale = Part(lambda w, x: x + w, [one])
    assert torch.equal(bound(scale, (x,), left=1)(x)[0], scale(x)[0])
    part, at = Part(lambda x, at: x * at, []), torch.arange(4096, 4103)[:, None, None]
    assert torch.equal(bound(part, (x, at), left=1)(x, at)[0], part(x, at)[0])


def test_integers_are_moved_by_torch() -> None:
    part = Part(lambda i: ((i + 1).repeat_interleave(2, -1), i.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) + 3), [])
    i = torch.arange(20).view(5, 4)
    for found, wanted in zip(bound(part, (i,), left=4)(i), part(i), strict=True):
        assert torch.equal(found, wanted)
    bits = Part(lambda x: (x * 2.0).view(torch.float16) * 1.0, [])
    x = numbers((5, 64), torch.bfloat16)
    assert torch.equal(bound(bits, (x,), left=2)(x)[0], bits(x)[0])


def test_rows_that_do_not_fit_are_refused() -> None:
    part = Part(lambda x, y: x + y, [])
    x = numbers((4, 16), torch.float32)
    unit = bound(part, (x, x.clone()))
    for wrong in (x[:1], x[:, :3], x.to(torch.bfloat16)):
        with pytest.raises(
            ValueError, match=r"^rows of \(.*\), torch\.\w+, where a slice takes \(16,\), torch.float32$"
        ):
            unit(x, wrong)


def test_memory_that_cannot_be_had_is_not_counted() -> None:
    arena = row_program.Arena()
    with pytest.raises(RuntimeError):
        arena.reserve(1 << 50)
    arena.reserve(1 << 20)
    assert arena.address


def test_threads_take_turns() -> None:
    part = Part(lambda x: F.silu(x + 1.0).float().pow(2).mean(-1, keepdim=True) * x, [])
    x = [numbers((40, 1, 600), torch.float32, seed) for seed in range(4)]
    unit = bound(part, (x[0],))
    due = [unit(t)[0] for t in x]
    wrong = list[int]()

    def call(number: int) -> None:
        for _ in range(50):
            if not torch.equal(unit(x[number])[0], due[number]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def tied(one: Tensor, two: Tensor, table: Tensor, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Linear layers, one of them with a table that is looked up, too."""
    hidden = F.silu(F.linear(x, one)) * F.linear(x, one) + F.embedding(ids, table)
    return F.linear(hidden, two), F.linear(hidden, table)


@pytest.mark.skipif(
    not gemm.get("native", 1).packed_bytes(torch.bfloat16, 1, 1), reason="no variant of this CPU packs weights"
)
@pytest.mark.parametrize("count", [1, 7, 65])
def test_packed_weights_change_no_bit_and_are_copies(count: int) -> None:
    weights = [numbers((96, 64), torch.bfloat16), numbers((33, 96), torch.bfloat16, 1) / 8]
    table = numbers((40, 96), torch.bfloat16, 2)
    part = Part(tied, [*weights, table])
    x = numbers((count, 1, 64), torch.bfloat16, 3), torch.arange(count).view(-1, 1) % 40
    few = numbers((2, 1, 64), torch.bfloat16, 3), torch.tensor([[0], [1]])
    due, program = bound(part, few)(*x), exported(part, few)
    backend = gemm.get("native", 2)
    needed = sum(size for _, size in packed_weights(program, backend))
    assert needed >= sum(w.numel() * 2 for w in [*weights, table])
    held = dict(program.slices[0].module.named_parameters())
    unit = rows.bind_rows(program, backend, PrivateMemory()).slices[0]
    for wanted, got in zip(due, unit(*x), strict=True):
        assert torch.equal(wanted, got)
    for weight in held.values():
        if weight.shape != table.shape:
            weight.zero_()
    for wanted, got in zip(due, unit(*x), strict=True):
        assert torch.equal(wanted, got)
    next(w for w in held.values() if w.shape == table.shape).zero_()
    assert not unit(*x)[1].any()  # what is looked up, too, stays where it lies


def quantized(cols: int, k: int, bits: int, group: int, scales: torch.dtype, seed: int = 0) -> QuantizedWeight:
    codes = torch.randint(-128, 128, (cols, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    shape = cols, k // (group or k)
    offsets = numbers(shape, scales, seed + 1) / 9 if bits == 4 else None
    return QuantizedWeight(codes if bits == 8 else (codes & 15).byte(), numbers(shape, scales, seed) / 99, offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 0), (8, 128), (8, 0)])
def test_quantized_products_give_the_bits_of_the_operator(bits: int, group: int, dtype: torch.dtype) -> None:
    native, b = gemm.get("native", 2), numbers((384,), dtype, 5)
    w = [quantized(384, 128, bits, group, dtype, 1), quantized(33, 384, bits, group, torch.float32, 3)]
    (one, first), (two, second) = [native.pack_quantized(each) for each in w]

    def compute(one: Tensor, two: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        hidden = F.relu(QUANTIZED_LINEAR_OP(x + x, one, b, first))
        return QUANTIZED_LINEAR_OP(hidden[..., :384], two, None, second), hidden

    part = Part(compute, [one, two, b])
    units = rows.bind_rows(exported(part, (numbers((3, 1, 128), dtype),)), native)
    (chain,) = rows.chain_slices(units).slices
    assert isinstance(chain, ChainedSlice), "a product was left to torch"
    for count in (*SIZES, 300):
        x = numbers((count, 1, 128), dtype, count)
        hidden = F.relu(native.linear_quantized(x + x, one, b, first))
        due = native.linear_quantized(hidden, two, None, second), hidden
        for found in (chain(x), units.slices[0](x)):
            assert all(torch.equal(*each) for each in zip(found, due, strict=True))
        exact = F.linear(
            F.relu(F.linear((x + x).float(), w[0].dequantized(torch.float32), b.float())),
            w[1].dequantized(torch.float32),
        )
        torch.testing.assert_close(due[0].float(), exact, rtol=0.02, atol=0.02 * float(exact.std()))


def test_a_weight_written_the_other_way_round() -> None:
    part = Part(lambda w, x: x @ w.T + 1.0, [numbers((24, 64), torch.float32)])
    x = numbers((5, 1, 64), torch.float32)
    close(bound(part, (x,))(x)[0], part(x)[0])


def test_ids_are_looked_up_and_positions_counted() -> None:
    part = Part(
        lambda w, p, ids, at: F.embedding(ids, w) + F.embedding(at + 2, p),
        [numbers((9, 64), torch.bfloat16), numbers((12, 64), torch.bfloat16, 1)],
    )
    ids, at = torch.tensor([[3], [8], [0]]), torch.tensor([[0], [9], [4]])
    unit = bound(part, (ids, at))
    assert torch.equal(unit(ids, at)[0], part(ids, at)[0])
    for wrong in (torch.tensor([[3], [9], [0]]), torch.tensor([[3], [-1], [0]])):
        with pytest.raises(IndexError, match="^a row looks up what the table has not$"):
            unit(wrong, at)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 0), (8, 128), (8, 0)])
def test_ids_are_looked_up_in_a_quantized_table(bits: int, group: int, dtype: torch.dtype) -> None:
    native, w = gemm.get("native", 2), quantized(70, 384, bits, group, torch.float32)
    data, form = native.pack_quantized(w)
    part = Part(lambda w, ids: QUANTIZED_ROWS_OP(ids, w, form).to(dtype) + 1, [data])
    ids, due = torch.tensor([[3], [69], [0]]), w.dequantized(torch.float32).to(dtype) + 1
    units = rows.bind_rows(exported(part, (ids,)), native)
    (chain,) = rows.chain_slices(units).slices
    assert isinstance(chain, ChainedSlice), "the look-up was left to torch"
    for count in (3, 300):
        some = ids.repeat(count // 3, 1)
        for found in (chain(some), units.slices[0](some)):
            assert torch.equal(found[0], due[some])
    for wrong in (70, -1):
        with pytest.raises(IndexError, match="^a row looks up what the table has not$"):
            units.slices[0](torch.tensor([[3], [wrong], [0]]))


def test_what_no_instruction_does_stays_torchs() -> None:
    def compute(x: Tensor) -> tuple[Tensor, ...]:
        best, where = (F.silu(x) + 1.0).topk(4, -1)
        return F.relu(best) * 2.0, where

    part, x = Part(compute, []), numbers((5, 1, 64), torch.float32)
    unit = bound(part, (x,), left=1)
    close(unit(x)[0], part(x)[0])
    assert torch.equal(unit(x)[1], part(x)[1])
    twice = Part(lambda x: x.double() * 2.0, [])
    assert torch.equal(bound(twice, (x,), left=2)(x)[0], x.double() * 2.0)


MOVES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b, lambda a, b: a * b, lambda a, b: F.silu(a), lambda a, b: a - 0.5,
    lambda a, b: a * a.float().mean(-1, keepdim=True).to(a.dtype), lambda a, b: rotate(a), lambda a, b: a[..., :1] * b,
    torch.maximum,
    lambda a, b: a.view(-1, 1, 4, 6).transpose(2, 3).reshape(-1, 1, 24) + b,
]  # fmt: skip


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=14
    ),
    results=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_merging_changes_no_bit(moves: list[tuple[int, int, int]], results: list[int], dtype: torch.dtype) -> None:
    def compute(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = [x, y]
        for move, a, b in moves:
            made.append(MOVES[move](made[a % len(made)], made[b % len(made)]))
        return (made[-1] * 1.0, *(made[n % len(made)] + 0.0 for n in results))

    part = Part(compute, [])
    x = numbers((5, 1, 24), dtype), numbers((5, 1, 24), dtype, 1)
    captured = exported(part, x)
    (piece,) = captured.slices
    together = taken(replace(captured, slices=(replace(piece, module=deepcopy(piece.module)),)))(*x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_program, "merged", lambda instructions, results: list(instructions))
        apart = taken(captured)(*x)
    for found, wanted, torchs in zip(together, apart, part(*x), strict=True):
        assert torch.equal(found, wanted) or (found.isnan() == wanted.isnan()).all()
        if torchs.abs().max() < 100:
            torch.testing.assert_close(found.float(), torchs.float(), rtol=0.1, atol=0.1)


def one_step(op: str, dtype: torch.dtype, variant: str, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    views = [View(slot, dtype, 0, (x.shape[1],), (1,)) for slot in (0, 1)]
    steps = [Operation("load", view=views[0]), Operation(op, 0, value=0.3), Operation("store", 1, view=views[1])]
    size = x.shape[1] * dtype.itemsize
    table = encode(2, [size, size], [], [Instruction("elements", (x.shape[1],), steps)])
    engine = gemm.get("native", 1).engine
    Program(engine, table, variant).run(x.shape[0], 0, 1, 0, x.data_ptr(), y.data_ptr())
    return y


@pytest.mark.parametrize("op", ["silu", "gelu", "gelu_tanh", "tanh", "cos", "exp", "rsqrt", "mul_by", "round_half"])
def test_bits_do_not_depend_on_the_instruction_set(op: str) -> None:
    x = torch.cat(
        [numbers((3, WIDE), torch.float32) * 10, torch.tensor([[math.nan, math.inf, -math.inf, 1e-40] * 150])]
    )
    narrow = one_step(op, torch.float32, "avx2", x)
    try:
        wide = one_step(op, torch.float32, "avx512", x)
    except ValueError:
        pytest.skip("this CPU has no AVX-512")
    assert torch.equal(narrow.view(torch.int32)[:3], wide.view(torch.int32)[:3])
    assert torch.equal(narrow.isnan(), wide.isnan())


def test_bad_tables_are_refused() -> None:
    engine = gemm.get("native", 1).engine
    view = View(0, torch.float32, 0, (4,), (1,))
    table = encode(
        1, [16], [], [Instruction("elements", (4,), [Operation("load", view=view), Operation("store", 0, view=view)])]
    )
    for wrong in (table[:-8], table + b"\0" * 8, b"\xff" * len(table), b""):
        with pytest.raises(ValueError, match="of the table makes no sense$"):
            Program(engine, wrong, "")
        with pytest.raises(ValueError, match="of the table makes no sense$"):
            Chain((Program(engine, table, ""),), wrong)
    for at in range(0, len(table), 8):  # whatever number is wrong, nothing else breaks
        for value in (-1, 1 << 40):
            try:
                Program(engine, table[:at] + value.to_bytes(8, "little", signed=True) + table[at + 8 :], "")
            except ValueError:
                continue
    rows = [View(slot, torch.float32, 0, (4,), (1,)) for slot in (0, 1)]
    unpacked = Instruction("linear", (4,), views=[*rows, View(2, torch.float32, 0, (4, 4), (4, 1))], n=4, leading=0)
    with pytest.raises(ValueError, match="of the table makes no sense$"):  # fp32 is never packed
        Program(engine, encode(3, [16, 16, 0], [], [unpacked]), "")
    unpacked.leading = 4
    Program(engine, encode(3, [16, 16, 0], [], [unpacked]), "")
    with pytest.raises(ValueError, match="^this CPU has no sse9$"):
        Program(engine, table, "sse9")
    good = Program(engine, table, "")
    for first, last, count in ((0, 2, 1), (1, 0, 1), (0, 1, 0), (-1, 1, 1)):
        with pytest.raises(ValueError, match="^no instructions"):
            good.run(count, first, last, 0, 0)
    with pytest.raises(TypeError, match="^run takes 5 arguments, not 4$"):
        good.run(1, 0, 0, 0)


def test_chunks_that_are_too_many_are_refused() -> None:
    def sums(count: int) -> list[Operation]:
        steps = [Operation("load", view=View(0, torch.float32, i, (1,), (1,))) for i in range(count)]
        return steps + [Operation("add", i + count - 1 if i else 0, i + 1) for i in range(count - 1)]

    assert max(registers_of(sums(16))) == 15
    with pytest.raises(UnsupportedError):
        registers_of(sums(17))


def test_operators_that_look_alike_are_not_taken_for_each_other() -> None:
    """Equal ones are looked at once; a dtype, a shape or a constant makes another one."""
    taken, graph = row_program.SupportedOperators(), torch.fx.Graph()

    def add(dtype: torch.dtype, size: int, **constants: int) -> bool:
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(2, size, dtype=dtype)
        node = graph.call_function(torch.ops.aten.add.Tensor, (x, x), constants)
        node.meta["val"] = x.meta["val"]
        return taken.takes(node)

    for _ in range(2):
        assert add(torch.float32, 3)
        assert not add(torch.int64, 3), "integers do not move"
        assert add(torch.float32, 4)
        assert not add(torch.float32, 3, alpha=2), "an option that no rule has"
    assert len(taken.known) == 4
