"""The launches of the cuda backend in a step, replayed over growing lengths as by a graph; merge and append.

Covers: lamina/ops/attention/cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import test_attention as contract
import torch
from cuda_emulation import EmulatedKernels, emulated, needs_gxx

from lamina.kv.paged_cache import SlotMapping, allocate_layer, row_table, slot_mapping
from lamina.kv.stored_format import StoredRows, to_stored_format
from lamina.ops.attention import BACKENDS, get
from lamina.ops.attention.cuda import CudaAttention
from lamina.ops.attention.cuda_geometry import Variant
from lamina.ops.attention.cuda_kernels import Argument
from lamina.ops.attention.merge import CHUNK_TOKENS, Partial, finish, merge
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan

CPU = torch.device("cpu")


@dataclass
class Recorded(EmulatedKernels):
    """Keeps launches, for replays."""

    calls: list[tuple[Variant, str, int, tuple[Argument, ...]]] = field(default_factory=list)

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        self.calls.append((variant, name, blocks, arguments))
        super().launch(variant, name, blocks, arguments)


def recorded(dtype: torch.dtype) -> tuple[CudaAttention, Recorded]:
    backend, kernels = emulated(dtype), Recorded()
    backend.kernels = kernels
    return backend, kernels


def grow(tables: BlockTables, lengths: list[int], step: int) -> list[RowRange]:
    rows = [RowRange(i, n, 1) for i, n in enumerate(lengths)]
    tables.apply(StepPlan(step=step, ops=[], rows=rows))
    return rows


@pytest.fixture
def tables() -> BlockTables:
    tables = BlockTables([0], [200], 16)
    tables.apply(StepPlan(step=0, ops=[New(i) for i in range(3)], rows=[]))
    tables.apply(StepPlan(step=1, ops=[], rows=[RowRange(0, 0, 120), RowRange(1, 0, 250), RowRange(2, 0, 1)]))
    return tables


@pytest.mark.long
@needs_gxx
def test_launches_of_a_step_can_be_replayed_over_growing_lengths(tables: BlockTables) -> None:
    """Recorded once, at the shortest lengths; then only the step's own memory changes. As in a CUDA graph."""
    torch.manual_seed(0)
    op = contract.operator(4, 2, 64)
    store = allocate_layer(200, 2, 16, 64, 64, torch.bfloat16, CPU)
    store.k.normal_()
    store.v.normal_()
    q, k, v = (torch.randn(3, heads, 64).bfloat16() for heads in (4, 2, 2))
    backend, kernels = recorded(torch.bfloat16)
    step = backend.new_step(sequences=3, rows=3, tokens=2048, block_size=16)
    out, lengths = torch.empty(3, 4, 64, dtype=torch.bfloat16), [120, 250, 1]
    stored, captured = None, []
    for number in range(24):
        table = row_table(tables, 0, grow(tables, lengths, number + 2), align=CHUNK_TOKENS)
        backend.refill(step, table)
        if stored is None:
            stored = backend.attend_stored(op, step, store, q)
            backend.finish(op, step, stored, q, StoredRows(k, v), out)
            captured = [c for c in kernels.calls if c[1] == "lamina_attend"]
            assert len(captured) == 2
        else:
            for call in captured:
                kernels.launch(*call)
        eager = emulated(torch.bfloat16)
        prepared = eager.prepare(table)
        fresh, want = eager.attend_stored(op, prepared, store, q), torch.empty_like(out)
        eager.finish(op, prepared, fresh, q, StoredRows(k, v), want)
        assert torch.equal(stored.o, fresh.o)
        assert torch.equal(stored.lse, fresh.lse)
        assert torch.equal(out, want)
        lengths = [n + 1 for n in lengths]
        if number == 10:  # a jump, over which the plan changes
            rows = [RowRange(i, n, 600) for i, n in enumerate(lengths)]
            tables.apply(StepPlan(step=100, ops=[], rows=rows))
            lengths = [n + 600 for n in lengths]
    assert len({tuple(map(float, c[3])) for c in captured}) == 2, "addresses are all that a launch knows"


@needs_gxx
def test_a_layer_takes_one_launch_for_each_part(tables: BlockTables) -> None:
    backend, kernels = recorded(torch.float32)
    op, store = contract.operator(4, 2, 16), allocate_layer(200, 2, 16, 16, 16, torch.float32, CPU)
    prepared = backend.prepare(row_table(tables, 0, grow(tables, [120, 250, 1], 2), align=CHUNK_TOKENS))
    q, k, out = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.empty(3, 4, 16)
    for _ in range(3):
        backend.finish(op, prepared, backend.attend_stored(op, prepared, store, q), q, StoredRows(k, k), out)
    assert kernels.launched == {"lamina_plan": 2, "lamina_attend": 6}
    assert not backend.outgrown


@pytest.mark.long
@needs_gxx
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16, None), (torch.float16, torch.int8), (torch.float32, torch.int8)]
)
def test_rows_of_a_message_may_begin_anywhere(
    tables: BlockTables, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    torch.manual_seed(3)
    op, backend = contract.operator(4, 2, 64), emulated(dtype, store=stored)
    prepared = backend.prepare(row_table(tables, 0, grow(tables, [120, 250, 1], 2), align=CHUNK_TOKENS))
    q = torch.randn(3, 4, 64).to(dtype)
    rows = to_stored_format(*(torch.randn(3, 2, 64).to(dtype) for _ in range(2)), stored or dtype)
    anywhere = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, *rows[:2])]
    assert all(x.data_ptr() % 16 for x in anywhere)
    beside_others = [torch.cat([x, x], -1)[..., :64] for x in (q, *rows[:2])]
    assert not any(x.is_contiguous() for x in beside_others)
    want = backend.attend_new(op, prepared, q, rows)
    for moved, *kv in (anywhere, beside_others):
        assert torch.equal(backend.attend_new(op, prepared, moved, StoredRows(*kv, rows.scales)).o, want.o)


@needs_gxx
def test_a_step_of_no_sequences_has_a_plan_that_says_so() -> None:
    """Memory that was never written would be one of many tasks."""
    backend, kernels = recorded(torch.bfloat16)
    step, op, none = (
        backend.new_step(sequences=0, rows=0, tokens=128, block_size=16),
        contract.operator(4, 2, 64),
        (0, 2),
    )
    kv = StoredRows(*(torch.empty(*none, 64, dtype=torch.bfloat16) for _ in range(2)))
    backend.attend_new(op, step, torch.empty(0, 4, 64, dtype=torch.bfloat16), kv)
    assert kernels.launched["lamina_plan"] == 1
    (plan,) = step.plans.values()
    assert plan[1] == 0


@pytest.mark.long
@needs_gxx
def test_what_goes_without_tensor_cores_is_said_once(tables: BlockTables, caplog: pytest.LogCaptureFixture) -> None:
    store = allocate_layer(200, 2, 16, 64, 64, torch.int8, CPU)
    for dtype in (torch.bfloat16, torch.float32):
        backend = emulated(dtype, store=torch.int8)
        table = row_table(tables, 0, grow(tables, [120, 250, 1], 2), align=CHUNK_TOKENS)
        prepared, q = backend.prepare(table), torch.zeros(3, 4, 64, dtype=dtype)
        for _ in range(2):
            backend.attend_stored(contract.operator(4, 2, 64), prepared, store, q)
    (said,) = caplog.messages
    assert said.startswith("attention over float heads of 64 and 64 uses no tensor cores")
    assert said.endswith("heads of 64 to 256, a multiple of 8")


def test_a_step_refuses_what_does_not_fit(tables: BlockTables) -> None:
    backend = CudaAttention(EmulatedKernels(), CPU, torch.float32)
    table = row_table(tables, 0, grow(tables, [120, 250, 1], 2), align=CHUNK_TOKENS)
    for sequences, rows, tokens, size, reason in (
        (2, 9, 512, 16, "takes 2 sequences, .* not 3,"),
        (3, 2, 512, 16, "2 rows"),
        (3, 3, 0, 16, "8 blocks of each, not 3, 3 and 16"),
        (3, 3, 512, 8, "blocks of 8 tokens, not 16"),
    ):
        with pytest.raises(ValueError, match=reason):
            backend.refill(backend.new_step(sequences=sequences, rows=rows, tokens=tokens, block_size=size), table)
    prompt = row_table(tables, 0, [RowRange(0, 120, 2), RowRange(1, 250, 1)], align=CHUNK_TOKENS)
    with pytest.raises(ValueError, match="takes 1 rows of a sequence, not 2"):
        backend.refill(backend.new_step(sequences=3, rows=3, tokens=512, block_size=16), prompt)
    with pytest.raises(ValueError, match="tokens of a sequence"):
        backend.new_step(sequences=1, rows=1, tokens=1 << 22, block_size=16)


@needs_gxx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_merge_and_close_are_those_of_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    backend = emulated(dtype)
    o, lse = torch.randn(6, 3, 40), torch.randn(6, 3) * 20
    o[1], lse[1], lse[4, 0] = 0, float("-inf"), float("nan")
    o[0, 1], lse[0, 1] = 0, float("-inf")
    parts, left, right = Partial(o.clone(), lse.clone()), torch.tensor([0, 3]), torch.tensor([1, 4])
    backend.merge(parts, left, right)
    want = merge(Partial(o[left], lse[left]), Partial(o[right], lse[right]))
    assert torch.allclose(parts.o[left], want.o, atol=1e-6, equal_nan=True)
    assert torch.allclose(parts.lse[left], want.lse, atol=1e-6, equal_nan=True)
    assert torch.equal(parts.o[0, 0], o[0, 0]), "an empty one changes nothing"
    assert torch.equal(parts.o[[1, 2, 4, 5]], o[[1, 2, 4, 5]])
    for sinks in (None, torch.randn(3)):
        found, expected = torch.empty(2, 3, 40, dtype=dtype), torch.empty(2, 3, 40, dtype=dtype)
        stored, new = Partial(o[:2], lse[:2]), Partial(o[2:4], lse[2:4])
        backend.merge_output(stored, new, sinks, found)
        finish(stored, new, sinks, expected)
        assert torch.allclose(found.float(), expected.float(), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)


@needs_gxx
@pytest.mark.parametrize("dims", [(16, 16), (20, 24), (8, 40)])
def test_append_writes_where_the_store_does(tables: BlockTables, dims: tuple[int, int]) -> None:
    torch.manual_seed(2)
    backend = emulated(torch.float32)
    rows = [RowRange(0, 120, 20), RowRange(2, 1, 1)]
    tables.apply(StepPlan(step=2, ops=[], rows=rows))
    at: SlotMapping = slot_mapping(tables, 0, rows, CPU)
    k, v = torch.randn(21, 3, dims[0]), torch.randn(21, 3, dims[1])
    found, want = (allocate_layer(200, 3, 16, *dims, torch.float32, CPU) for _ in range(2))
    backend.write_rows(found, at, StoredRows(k, v))
    want.write(at, StoredRows(k, v))
    assert torch.equal(found.k, want.k)
    assert torch.equal(found.v, want.v)
    assert np.count_nonzero(found.k.numpy()) == k.numel()


@pytest.mark.long
@needs_gxx
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_append_of_stored_numbers_of_8_bits(tables: BlockTables, dtype: torch.dtype) -> None:
    backend, rows = emulated(torch.bfloat16, store=dtype), [RowRange(0, 120, 20), RowRange(2, 1, 1)]
    tables.apply(StepPlan(step=2, ops=[], rows=rows))
    at: SlotMapping = slot_mapping(tables, 0, rows, CPU)
    new = to_stored_format(torch.randn(21, 3, 20), torch.randn(21, 3, 24), dtype)
    found, want = (allocate_layer(200, 3, 16, 20, 24, dtype, CPU) for _ in range(2))
    backend.write_rows(found, at, new)
    want.write(at, new)
    for x, y in ((found.k, want.k), (found.v, want.v)):
        assert torch.equal(x.view(torch.int8), y.view(torch.int8))
    assert found.scales is not None
    assert want.scales is not None
    assert all(torch.equal(x, y) for x, y in zip(found.scales, want.scales, strict=True))
    assert int((found.scales.k > 0).sum()) == 21 * 3


@pytest.mark.parametrize("name", ["cuda", "flashinfer"])
def test_without_a_gpu_one_line_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention backend '{name}' computes on CUDA devices, not on cpu") as refused:
        get(name, CPU, torch.bfloat16)
    assert "\n" not in str(refused.value)
    if not torch.cuda.is_available():
        with pytest.raises(ImportError, match=f"attention backend '{name}' cannot be used here: .*needs") as missing:
            get(name, torch.device("cuda"), torch.bfloat16)
        assert "\n" not in str(missing.value)


def test_auto_does_not_pick_a_gpu_for_the_cpu() -> None:
    assert type(get("auto", CPU, torch.float32)).__module__.rpartition(".")[2] not in ("cuda", "flashinfer")
    assert list(BACKENDS)[-2:] == ["reference", "emulate"]
