"""The contract of lamina.ops.gemm.LinearBackend, run over every entry of the table and every variant that this CPU
has.

Covers: converter/slices.py, lamina/ops/gemm/native.py, lamina/ops/gemm/torch.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
import torch
from forked import launch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.converter.slices import Slice, SlicedProgram
from lamina.ops.gemm import BACKENDS, LinearBackend, bind, get
from lamina.ops.gemm.packed_memory import PrivateMemory

pytestmark = pytest.mark.no_retry

if TYPE_CHECKING:
    from lamina.ops.gemm.native import NativeLinear

native = pytest.importorskip("lamina.ops.gemm._gemm", reason="lamina.ops.gemm._gemm was not built")

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # norm-wise error after rounding
ENTRIES = [*BACKENDS, *(f"native/{v}" for v in native.usable())]


def open_entry(name: str, threads: int = 2) -> LinearBackend:
    return open_native(name, threads) if name.startswith("native") else get(name, threads)


def open_native(name: str, threads: int) -> NativeLinear:
    """Opens ``native`` or ``native/variant``."""
    from lamina.ops.gemm.native import NativeLinear

    return NativeLinear(threads, name.partition("/")[2])


def operands(rows: int, cols: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, b of a large dynamic range: each row and column has its own scale."""
    g = torch.Generator().manual_seed(seed)

    def scaled(n: int) -> Tensor:
        return torch.randn(n, k, generator=g) * 2.0 ** torch.randint(-6, 4, (n, 1), generator=g)

    return scaled(rows).to(dtype), scaled(cols).to(dtype), torch.randn(cols, generator=g).to(dtype)


def error(y: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> float:
    """The worst row's norm-wise error against fp64, relative to the sums of the products' magnitudes."""
    x, w, b = x.double(), w.double(), torch.zeros(len(w)).double() if b is None else b.double()
    exact, scale = x @ w.T + b, x.abs() @ w.abs().T + b.abs()
    return float(((y.double() - exact).norm(dim=-1) / scale.norm(dim=-1).clamp_min(0.01)).max())


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 80),
    k=st.one_of(st.integers(1, 70), st.sampled_from([128, 1000, 3001])),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_equals_fp64_within_the_bound(
    name: str, dtype: torch.dtype, rows: int, cols: int, k: int, bias: bool, seed: int
) -> None:
    x, w, b = operands(rows, cols, k, dtype, seed)
    y = open_entry(name).linear(x, w, b if bias else None)
    assert y.dtype == dtype
    assert y.shape == (rows, cols)
    looser = 8 if name == "torch" else 1  # its fp16 sums are not fp32 on every CPU
    assert error(y, x, w, b if bias else None) < BOUNDS[dtype] * looser


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    "view", ["x strided", "w rows of a fused weight", "w transposed", "w one row for all", "b strided", "meta dims"]
)
def test_any_strides(name: str, view: str) -> None:
    x, w, b = operands(6, 9, 48, torch.bfloat16)
    if view == "x strided":
        x = torch.stack([x, x * 3], dim=1)[:, 0]
    elif view == "w rows of a fused weight":
        w = torch.cat([w, w, w])[9:18]
    elif view == "w transposed":
        w = w.T.contiguous().T
    elif view == "w one row for all":
        w = w[:1].expand(9, 48)
    elif view == "b strided":
        b = torch.stack([b, b * 3], dim=1)[:, 0]
    shape = (2, 3, 1) if view == "meta dims" else (6,)
    y = open_entry(name).linear(x.reshape(*shape, 48) if view == "meta dims" else x, w, b)
    assert y.shape == (*shape, 9)
    assert error(y.reshape(6, 9), x, w, b) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("name", [e for e in ENTRIES if e.startswith("native")])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("k", [203, 4200], ids=["k in one block", "k in several blocks"])
def test_a_row_depends_on_itself_alone(name: str, dtype: torch.dtype, k: int) -> None:
    rows = 333  # more than stay in a cache together
    x, w, b = operands(rows, 101, k, dtype)
    whole = open_entry(name, 1).linear(x, w, b)
    for threads in (1, 2, 3):
        backend = open_entry(name, threads)
        for count in (1, 2, 3, 4, 5, 16, 17, 32, 33, rows):
            part = backend.linear(x[:count], w, b)
            assert torch.equal(part, whole[:count]), f"{threads} threads, {count} rows"


@pytest.mark.parametrize("name", [e for e in ENTRIES if e.startswith("native")])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rounds_once_to_nearest_even_and_keeps_nan_and_infinity(name: str, dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 3.3895e38, -65519.0, 65520.0, float("inf"), float("nan")])
    x = values.to(dtype).reshape(-1, 1)
    w = torch.ones(5, 1, dtype=dtype)
    b = torch.full((5,), 2**-9, dtype=dtype)
    y = open_entry(name).linear(x, w, b)
    expected = (x.float() + b.float()).to(dtype)
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(y.isnan(), expected.isnan())


PACKING = [v for v in native.usable() if native.Engine(1, v).packed_bytes(1, 1, 1)]


@pytest.mark.skipif(not PACKING, reason="no variant of this CPU packs weights")
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 256, 515])),
    cols=st.one_of(st.integers(1, 100), st.sampled_from([257, 600])),
    k=st.one_of(st.integers(1, 130), st.sampled_from([1000, 3001])),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_packed_weights_give_the_same_bits(rows: int, cols: int, k: int, bias: bool, threads: int, seed: int) -> None:
    for variant in PACKING:
        backend = open_native(f"native/{variant}", threads)
        x, w, b = operands(rows, cols, k, torch.bfloat16, seed)
        w = torch.cat([w, w], dim=1)[:, :k]  # with gaps between its rows
        packed, y = backend.pack(w, PrivateMemory()), torch.full((rows, cols), 7.0, dtype=torch.bfloat16)
        bias_at = b.data_ptr() if bias else 0
        backend.engine.linear(x.data_ptr(), packed.data_ptr(), bias_at, y.data_ptr(), 1, rows, cols, k, 0)
        assert torch.equal(y, backend.linear(x, w, b if bias else None))


def test_what_is_not_packed_is_refused() -> None:
    engine = native.Engine(1, "avx2") if "avx2" in native.usable() else native.Engine(1, "")
    assert not engine.packed_bytes(0, 4, 4)
    for call in (lambda: engine.pack(0, 0, 0, 4, 4, 4), lambda: engine.linear(0, 0, 0, 0, 0, 1, 4, 4, 0)):
        with pytest.raises(ValueError, match="no weights of type 0 are packed here"):
            call()
    with pytest.raises(ValueError, match="torch packs no weights"):
        get("torch", 1).pack(torch.ones(2, 2), PrivateMemory())


def flushes(name: str, dtype: torch.dtype) -> bool:
    """Returns whether numbers below 2^-126 in magnitude count as zero: bf16 products of the CPU's own know
    no others.
    """
    variant = name.partition("/")[2] or native.usable()[0]
    return dtype == torch.bfloat16 and variant in ("amx", "avx512_bf16")


@pytest.mark.parametrize("name", [e for e in ENTRIES if e.startswith("native")])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_denormal_numbers_count_for_their_value_or_all_for_zero(name: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    small = tiny / torch.tensor([2.0, 4.0, 1.0])
    big = torch.tensor([[64.0], [0.25], [1.0]])
    kept = 0.0 if flushes(name, dtype) else 1.0
    below = torch.tensor([kept, kept, 1.0])
    for x, w in ((small[:, None], big), (big, small[:, None])):
        y = open_entry(name).linear(x.to(dtype), w.to(dtype))
        due = (x * torch.where(x < tiny, kept, 1.0)) @ (w * torch.where(w < tiny, kept, 1.0)).T
        assert torch.equal(y.float(), due * torch.where(due < tiny, kept, 1.0))
    b = (small * below).to(dtype)
    zeros = torch.zeros(1, 3, dtype=dtype), torch.zeros(3, 3, dtype=dtype)
    assert torch.equal(open_entry(name).linear(*zeros, small.to(dtype))[0], b)


AT_THE_END = """
    import ctypes, mmap, sys
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
    SHAPES = (1, 1, 1), (1, 9, 33), (2, 8, 31), (3, 5, 64), (7, 11, 97), (17, 13, 70), (33, 34, 65), (66, 33, 70)
    SHAPES += ((259, 33, 70),)
    for kind, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        for rows, cols, k in SHAPES:
            one = [torch.ones(shape, dtype=dtype) for shape in ((rows, k), (cols, k), (cols,), (rows, cols))]
            x, w, b, y = map(at_the_end, one)
            forms = [(w, k)]
            if packed := engine.packed_bytes(kind, cols, k):
                forms.append((at_the_end(torch.zeros(packed, dtype=torch.uint8)), 0))
                engine.pack(w, forms[1][0], kind, cols, k, k)
            due = torch.full((rows, cols), k + 1.0).to(dtype)
            for w, ldw in forms:
                engine.linear(x, w, b, y, kind, rows, cols, k, ldw)
                ctypes.memmove(one[3].data_ptr(), y, due.numel() * due.itemsize)
                assert torch.equal(one[3], due), (rows, cols, k, ldw)
                ctypes.memset(y, 0, due.numel() * due.itemsize)
    print("done")
"""


@pytest.mark.parametrize("variant", native.usable())
def test_nothing_is_touched_behind_the_operands(variant: str) -> None:
    """Each lies at the end of its pages, and the next page can be neither read nor written."""
    assert launch(variant, code=dedent(AT_THE_END)) == "done\n"


@pytest.mark.parametrize("name", ENTRIES)
def test_empty_operands_and_those_that_do_not_fit(name: str) -> None:
    backend = open_entry(name)
    for rows, cols, k in ((0, 4, 8), (3, 0, 8), (3, 4, 0)):
        y = backend.linear(torch.ones(rows, k), torch.ones(cols, k), torch.ones(cols))
        assert torch.equal(y, torch.full((rows, cols), k + 1.0))
    for x, b in ((torch.ones(8, 4), None), (torch.ones(4, 8), torch.ones(1, 3))):
        with pytest.raises(RuntimeError):
            backend.linear(x, torch.ones(5, 8), b)


def test_threads_that_the_system_does_not_have_are_told() -> None:
    code = """
        import resource
        from lamina.ops.gemm._gemm import Engine
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        try:
            Engine(1000, "")
        except RuntimeError as error:
            print(error)
    """
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.startswith("cannot start 1000 threads: "), done.stderr


def test_what_native_has_no_code_for_goes_to_torch() -> None:
    backend = open_entry("native")
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(backend.linear(x, w), torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_calls_from_several_threads_take_turns(dtype: torch.dtype) -> None:
    import threading

    backend = open_entry("native", 3)
    cases = [operands(5 + i, 64, 96 << i, dtype, i) for i in range(4)]
    wanted = [backend.linear(*c) for c in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(200) if not torch.equal(backend.linear(*cases[i]), wanted[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: get("mkl", 1), "--gemm mkl: unknown; choose one of auto, native, torch"),
        (lambda: native.Engine(0, ""), "threads must lie in 1..1024, not 0"),
        (lambda: native.Engine(1, "sse2"), "this CPU has no sse2"),
    ],
)
def test_refuses_in_one_line(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_bind_puts_every_linear_layer_of_a_program_on_the_backend() -> None:
    class Counting:
        calls, own_threads = 0, False

        def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            self.calls += 1
            return torch.nn.functional.linear(x, w, b)

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)))

    module = torch.export.export(Part(), (torch.randn(3, 4),)).module()
    program = SlicedProgram((Slice(0, module, "", {}),), (), (), rows="static")
    x, counting = torch.randn(3, 4), Counting()
    before = program.slices[0](x)  # as the proof of its rows does: what it runs must not stay what it ran
    assert torch.equal(bind(program, counting).slices[0](x), before)
    assert counting.calls == 2
