"""The contract of lamina.ops.attention.AttentionBackend, run over every backend of the table.

Covers: lamina/ops/attention/emulate.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, RowTable, allocate_layer, row_table
from lamina.kv.stored_format import Scales, StoredRows, to_stored_format
from lamina.ops.attention import BACKENDS, AttentionBackend, Operator
from lamina.ops.attention import get as open_backend
from lamina.ops.attention.merge import CHUNK_TOKENS, MergeNode, Partial, finish, root
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan

pytestmark = pytest.mark.no_retry

CPU = torch.device("cpu")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # norm-wise error of o after rounding

try:
    from lamina.ops.attention.native import VARIANTS, NativeAttention
except ImportError:
    VARIANTS = ("none",)

# The table, and the native backend with every set of instructions that this CPU runs and it would not choose.
backends = pytest.mark.parametrize("name", [*sorted(BACKENDS), *(f"native, {v}" for v in VARIANTS[1:])])
ON_GPU = ("cuda", "flashinfer")


class OnGpu(AttentionBackend):
    """A backend of a GPU, for tensors on the CPU."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner

    def prepare(self, rows: RowTable) -> Any:
        return self._inner.prepare(rows)

    def attend_stored(self, op: Operator, prepared: Any, store: LayerCache, q: Tensor) -> Partial:
        there = LayerCache(*_rows_there(StoredRows(store.k, store.v, store.scales)))
        return _back(self._inner.attend_stored(_there(op), prepared, there, q.cuda()))

    def attend_new(self, op: Operator, prepared: Any, q: Tensor, kv: StoredRows) -> Partial:
        return _back(self._inner.attend_new(_there(op), prepared, q.cuda(), _rows_there(kv)))

    def finish(self, op: Operator, prepared: Any, stored: Partial, q: Tensor, kv: StoredRows, out: Tensor) -> None:
        there, result = Partial(stored.o.cuda(), stored.lse.cuda()), out.cuda()
        self._inner.finish(_there(op), prepared, there, q.cuda(), _rows_there(kv), result)
        out.copy_(result)

    def merge(self, parts: Partial, left: Tensor, right: Tensor) -> None:
        there = Partial(parts.o.cuda(), parts.lse.cuda())
        self._inner.merge(there, left.cuda(), right.cuda())
        parts.o.copy_(there.o)
        parts.lse.copy_(there.lse)

    def merge_output(self, stored: Partial, new: Partial, sinks: Tensor | None, out: Tensor) -> None:
        parts, result = [Partial(p.o.cuda(), p.lse.cuda()) for p in (stored, new)], out.cuda()
        self._inner.merge_output(*parts, None if sinks is None else sinks.cuda(), result)
        out.copy_(result)


def _there(op: Operator) -> Operator:
    sinks, slopes = (None if x is None else x.cuda() for x in (op.sinks, op.slopes))
    return replace(op, sinks=sinks, slopes=slopes)


def _rows_there(kv: StoredRows) -> StoredRows:
    return StoredRows(kv.k.cuda(), kv.v.cuda(), kv.scales and Scales(*(x.cuda() for x in kv.scales)))


def _back(part: Partial) -> Partial:
    return Partial(part.o.cpu(), part.lse.cpu())


def get(name: str, device: torch.device, dtype: torch.dtype, store: torch.dtype | None = None) -> AttentionBackend:
    """The backend, on a GPU where it needs one."""
    if name not in ON_GPU:
        return open_backend(name, device, dtype, store)
    try:
        return OnGpu(open_backend(name, torch.device("cuda"), dtype, store))
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))


def opened(name: str, dtype: torch.dtype, store: torch.dtype | None = None) -> AttentionBackend:
    _, _, variant = name.partition(", ")
    return NativeAttention(dtype, variant, store) if variant else get(name, CPU, dtype, store)


@dataclass(frozen=True)
class Case:
    """Sequences (stored tokens, rows of the step) and the operator."""

    lengths: tuple[tuple[int, int], ...]
    op: Operator
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    seed: int = 0
    store: torch.dtype | None = None  # of 8 bits; None = dtype

    def tensors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per sequence q [count, Hq, D] of the new rows, k and v [stored + count, Hkv, D] of all tokens. Backends that
        are tried one after another have the same: who changes them takes ``own_tensors``.
        """
        op = self.op
        return list(drawn(self.lengths, (op.q_heads, op.kv_heads, op.qk_dim, op.v_dim), self.dtype, self.seed))

    def own_tensors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [(q.clone(), k.clone(), v.clone()) for q, k, v in self.tensors()]

    def stored(self, k: Tensor, v: Tensor) -> StoredRows:
        return to_stored_format(k, v, self.store or self.dtype)

    def meant(self, tensors: list[tuple[Tensor, Tensor, Tensor]] | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``tensors`` as they are stored, in fp64."""
        out = []
        for q, k, v in tensors or self.tensors():
            rows = self.stored(k, v)
            k, v = rows.k.double(), rows.v.double()
            if rows.scales:
                k, v = k * rows.scales.k.double()[..., None], v * rows.scales.v.double()[..., None]
            out.append((q, k, v))
        return out

    def heads(self, start: int, stop: int) -> Case:
        """The same with the KV heads ``start .. stop`` alone; take the tensors from the whole one."""
        group = self.op.q_heads // self.op.kv_heads
        cut = slice(start * group, stop * group)
        sinks = None if self.op.sinks is None else self.op.sinks[cut]
        slopes = None if self.op.slopes is None else self.op.slopes[cut]
        heads = stop - start
        return replace(self, op=replace(self.op, q_heads=heads * group, kv_heads=heads, sinks=sinks, slopes=slopes))


@lru_cache(maxsize=8)
def drawn(
    lengths: tuple[tuple[int, int], ...], shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    q_heads, kv_heads, qk_dim, v_dim = shape
    out = []
    for i, (stored, count) in enumerate(lengths):
        g = torch.Generator().manual_seed(seed * 1000 + i)
        q = torch.randn(count, q_heads, qk_dim, generator=g)
        k = torch.randn(stored + count, kv_heads, qk_dim, generator=g)
        v = torch.randn(stored + count, kv_heads, v_dim, generator=g)
        out.append((q.to(dtype), k.to(dtype), v.to(dtype)))
    return tuple(out)


def oracle(case: Case, meant: list[tuple[Tensor, Tensor, Tensor]] | None = None) -> Tensor:
    """Dense attention in fp64 over what is stored, by sequence and head, straight from AttentionSpec's text."""
    op, spec, out = case.op, case.op.spec, []
    for (stored, count), (q, k, v) in zip(case.lengths, meant or case.meant(), strict=True):
        group = op.q_heads // op.kv_heads
        k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        t = torch.arange(stored, stored + count)[:, None]
        s = torch.arange(stored + count)[None]
        score = torch.einsum("thd,shd->hts", q.double(), k) * spec.scale
        if spec.softcap:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if op.slopes is not None:
            score = score + op.slopes.double()[:, None, None] * (s - t)
        visible = (s <= t) & ((s > t - spec.window) if spec.window else torch.tensor(True))
        score = score.masked_fill(~visible, float("-inf"))
        if op.sinks is not None:
            score = torch.cat([score, op.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        out.append(torch.einsum("hts,shd->thd", score.softmax(-1)[..., : stored + count], v))
    return torch.cat(out)


def bits(tensor: Tensor) -> np.ndarray:
    """The same memory as whole numbers: numpy takes places that are given twice in their order, and copies quickly."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()


Steps = tuple[tuple[int, int, int], ...]  # rows of a step: sequence, first token, count


@lru_cache(maxsize=512)
def grown(lengths: tuple[tuple[int, int], ...], window: int, size: int, step: Steps) -> tuple[BlockTables, np.ndarray]:
    """Tables after ``step``, and where the tokens stored before it lie: block, offset and token of each, [3, n]. A
    sequence's tokens follow those of the one before. No test changes either: all dtypes and heads have the same.
    """
    tables = BlockTables([window], [blocks_of(lengths, size)], size)
    tables.apply(StepPlan(step=0, ops=[New(i) for i in range(len(lengths))], rows=[]))
    begin = np.cumsum([0, *(a + b for a, b in lengths)])
    places = [np.empty((3, 0), dtype=np.int64)]
    for at in range(0, max(a for a, _ in lengths), 40):  # sequences grow side by side, so their blocks interleave
        rows = [RowRange(i, at, min(40, a - at)) for i, (a, _) in enumerate(lengths) if at < a]
        tables.apply(StepPlan(step=1, ops=[], rows=rows))
        for row in rows:
            start, ids = tables.block_table(0, row.sequence)
            # What no window reaches has no block.
            tokens = np.arange(max(row.first, start * size), row.first + row.count)
            places.append(
                np.stack([np.array(ids)[tokens // size - start], tokens % size, begin[row.sequence] + tokens])
            )
    tables.apply(StepPlan(step=2, ops=[], rows=[RowRange(*row) for row in step]))
    return tables, np.concatenate(places, 1)


def blocks_of(lengths: tuple[tuple[int, int], ...], size: int) -> int:
    return sum(-(-(a + b) // size) for a, b in lengths) + 3


Filled = tuple[BlockTables, LayerCache]
# The last ones, by K and V as they were, which are kept so that none comes to lie where they do.
FILLED = OrderedDict[tuple[Any, ...], tuple[list[tuple[Tensor, Tensor, Tensor]], Filled]]()
MOST_FILLED = 12


def fill(case: Case, tensors: list[tuple[Tensor, Tensor, Tensor]], other: float, step: list[RowRange]) -> Filled:
    """A store that holds the stored tokens, with ``other`` in each place that is not theirs; tables after ``step``.

    Backends that are tried one after another have the same ones: no test changes them.
    """
    each = tuple((x.data_ptr(), x.shape, x.stride(), x._version) for _, *kv in tensors for x in kv)
    rows = tuple((r.sequence, r.first, r.count) for r in step)
    key = (each, case.lengths, case.op.spec.window, case.dtype, case.store, case.block_size, str(other), rows)
    if key not in FILLED:
        FILLED[key] = tensors, fill_anew(case, tensors, other, rows)
        if len(FILLED) > MOST_FILLED:
            FILLED.popitem(last=False)
    return FILLED[key][1]


def fill_anew(case: Case, tensors: list[tuple[Tensor, Tensor, Tensor]], other: float, step: Steps) -> Filled:
    op, size = case.op, case.block_size
    needed = blocks_of(case.lengths, size)
    store = allocate_layer(needed, op.kv_heads, size, op.qk_dim, op.v_dim, case.store or case.dtype, CPU)
    numbers = other if store.k.dtype != torch.int8 else 99
    store.k[:-1], store.v[:-1] = numbers, numbers
    for scale in store.scales or ():
        scale[:-1] = other
    stored = [case.stored(k, v) for _, k, v in tensors]
    tables, (block, offset, token) = grown(case.lengths, op.spec.window, size, step)
    if token.size:
        parts = [(s.k, s.v, *(s.scales or ())) for s in (store, *stored)]
        for to, *of in zip(*parts, strict=True):
            bits(to)[block, :, offset] = bits(torch.cat(of))[token]  # a block that is used again has its last tokens
    return tables, store


def run(
    backend: AttentionBackend,
    case: Case,
    tensors: list[tuple[Tensor, Tensor, Tensor]] | None = None,
    *,
    other: float = float("nan"),
    order: list[int] | None = None,
) -> tuple[Tensor, Partial, Partial]:
    """(o after rounding, stored part, new part) of one step, in the order of ``case.lengths``."""
    tensors = tensors or case.tensors()
    order = order or list(range(len(tensors)))
    rows = [RowRange(i, *case.lengths[i]) for i in order]
    tables, store = fill(case, tensors, other, rows)
    stored = [case.lengths[i][0] for i in order]
    q = torch.cat([tensors[i][0] for i in order])
    k = torch.cat([tensors[i][1][s:] for i, s in zip(order, stored, strict=True)])
    v = torch.cat([tensors[i][2][s:] for i, s in zip(order, stored, strict=True)])
    prepared = backend.prepare(row_table(tables, 0, rows, align=CHUNK_TOKENS))
    part = backend.attend_stored(case.op, prepared, store, q)
    new = backend.attend_new(case.op, prepared, q, case.stored(k, v))
    out = torch.full((len(q), case.op.q_heads, case.op.v_dim), float("nan"), dtype=case.dtype)
    finish(part, new, case.op.sinks, out)
    at = dict(zip(order, torch.arange(len(q)).split([r.count for r in rows]), strict=True))
    back = torch.cat([at[i] for i in range(len(order))])
    return out[back], *(Partial(p.o[back].clone(), p.lse[back].clone()) for p in (part, new))


def error(got: Tensor, want: Tensor) -> float:
    """The largest error of a row's head, relative to the norm of the expected vector's typical size.

    Where a sink takes nearly all of the weight, the vector lies among the type's subnormal numbers, whose rounding is
    absolute. The error there is relative to the smallest normal number.
    """
    assert not got.isnan().any()
    least = torch.finfo(got.dtype).tiny * want.shape[-1] ** 0.5
    return float((got.double() - want).norm(dim=-1).max() / want.norm(dim=-1).max().clamp_min(least))


def operator(
    q_heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int = 0,
    *,
    sinks: bool = False,
    alibi: bool = False,
    **spec: float,
) -> Operator:
    g = torch.Generator().manual_seed(q_heads)
    return Operator(
        spec=AttentionSpec(**{"scale": dim**-0.5, **spec}, sinks=sinks, alibi=alibi),  # type: ignore[arg-type]
        q_heads=q_heads,
        kv_heads=kv_heads,
        qk_dim=dim,
        v_dim=v_dim or dim,
        sinks=torch.randn(q_heads, generator=g) + 1 if sinks else None,
        slopes=0.5 ** torch.arange(1, q_heads + 1).float() if alibi else None,
    )


EDGES = (0, 1, 15, 16, 17, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS, 5 * CHUNK_TOKENS + 3)
lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, 300))
sequences = st.lists(st.tuples(lengths, st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=5).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group, kv_heads = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (7, 2), (1, 1), (3, 4), (4, 8), (3, 12)]))
    op = operator(
        group * kv_heads,
        kv_heads,
        draw(st.sampled_from([8, 16, 20, 64, 128])),
        draw(st.sampled_from([0, 8, 24])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 16, 100, CHUNK_TOKENS, 200])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        scale=draw(st.sampled_from([0.25, 1.0])),
    )
    return Case(
        draw(sequences),
        op,
        draw(st.sampled_from(list(DTYPES))),
        draw(st.sampled_from([1, 8, 16, 128])),
        draw(st.integers(0, 99)),
        draw(st.sampled_from([None, None, None, torch.int8, torch.float8_e4m3fn])),
    )


@st.composite
def tiled(draw: st.DrawFn) -> Case:
    """Inputs that matrix instructions take: many queries of a KV head in a step, and whole vectors of bf16."""
    group, kv_heads = draw(st.sampled_from([(1, 3), (2, 2), (4, 2), (5, 2), (7, 3), (8, 2), (12, 1), (16, 2), (20, 1)]))
    op = operator(
        group * kv_heads,
        kv_heads,
        draw(st.sampled_from([32, 64, 96, 128])),
        draw(st.sampled_from([0, 32])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 16, 100, CHUNK_TOKENS, 200])),
        scale=draw(st.sampled_from([0.25, 1.0])),
    )
    size = draw(st.sampled_from([1, 8, 16, 32, 128]))
    return Case(draw(sequences), op, torch.bfloat16, size, draw(st.integers(0, 99)))


@backends
@pytest.mark.parametrize("scale", [3e7, 3e9])
def test_of_scores_far_apart_the_highest_takes_all(name: str, scale: float) -> None:
    case = Case(((0, 32), (150, 20)), operator(4, 1, 64, scale=scale), torch.bfloat16)
    out, *_ = run(opened(name, case.dtype), case)
    assert error(out, oracle(case)) < DTYPES[torch.bfloat16]


@backends
@pytest.mark.parametrize("score", [-22.0, 0.0, 22.0])
def test_values_up_to_a_bound_do_not_overflow(name: str, score: float) -> None:
    """Before o is divided, weights of pairs of bf16 are e^22 at most, and a chunk adds up 128 of them. Values above the
    bound, of 6e26, may make o infinite, which ends the request with an error; fp64 has no such bound.
    """
    case = Case(((300, 1), (128, 5)), operator(4, 1, 64, scale=1.0), torch.bfloat16)
    tensors = case.own_tensors()
    for q, k, v in tensors:
        q.zero_()[..., 0], k.zero_()[..., 0] = score, 1.0
        v.sign_().mul_(2.0**89)
        v[::2].abs_()
    out, *_ = run(opened(name, case.dtype), case, tensors)
    assert error(out / 2.0**89, oracle(case, case.meant(tensors)) / 2.0**89) < DTYPES[torch.bfloat16]


@pytest.mark.long(but=["emulate", "native", "reference", "native, portable"])
@backends
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=st.one_of(cases(), tiled()))
def test_equals_the_oracle(name: str, case: Case) -> None:
    if case.store and name == "flashinfer":
        return
    out, stored, new = run(opened(name, case.dtype, case.store), case)
    assert error(out, oracle(case)) < DTYPES[case.dtype]
    assert stored.o.dtype == stored.lse.dtype == new.o.dtype == new.lse.dtype == torch.float32
    rows = torch.tensor([length == 0 for length, count in case.lengths for _ in range(count)])
    assert (stored.lse[rows] == float("-inf")).all()
    assert (stored.o[rows] == 0).all()
    assert not stored.o.isnan().any()
    assert not stored.lse.isnan().any()
    if name in VARIANTS:  # of which some round weights
        _, known, _ = run(opened("reference", case.dtype, case.store), case)
        assert (stored.lse - known.lse)[~rows].abs().max() < 2**-8


# Dtypes of wire and store. With scales one kernel serves all wires, so that two say as much as six.
SCALED = ((torch.bfloat16, torch.int8), (torch.float32, torch.float8_e4m3fn))
formats = pytest.mark.parametrize(("dtype", "store"), [*((dtype, None) for dtype in DTYPES), *SCALED])


WHOLE = {"sinks": True, "alibi": True, "window": 150, "softcap": 3.0}
STEP = ((300, 1), (0, 1), (700, 1), (5, 3), (130, 1), (200, 37), (0, 50), (129, 3))


def in_store(case: Case, name: str, store: torch.dtype | None) -> Case:
    """With stored numbers of 8 bits, where the backend has them."""
    if store and name == "flashinfer":
        pytest.skip("flashinfer stores the wire's dtype alone")
    return replace(case, store=store) if store else case


def same(a: tuple[Tensor, Partial, Partial], b: tuple[Tensor, Partial, Partial]) -> bool:
    return torch.equal(a[0], b[0]) and all(
        torch.equal(x, y) for p, r in zip(a[1:], b[1:], strict=True) for x, y in zip(p, r, strict=True)
    )


@pytest.mark.long(but=["8-4-16-plain-dtype0-None-native, portable", "8-4-16-plain-dtype3-store3-native"])
@backends
@formats
@pytest.mark.parametrize("spec", [{}, WHOLE], ids=["plain", "whole"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(8, 4, 16), (4, 4, 64), (28, 4, 20), (32, 8, 128), (28, 4, 64)]
)
def test_heads_are_independent_bit_for_bit(
    name: str,
    dtype: torch.dtype,
    spec: dict[str, float],
    q_heads: int,
    kv_heads: int,
    dim: int,
    store: torch.dtype | None,
) -> None:
    case = in_store(Case(STEP, operator(q_heads, kv_heads, dim, **spec), dtype), name, store)
    tensors = case.tensors()
    whole = run(opened(name, case.dtype, store), case, tensors)
    for workers in (2, 4):
        each, parts = kv_heads // workers, []
        for start in range(0, kv_heads, each):
            group = q_heads // kv_heads
            cut = [
                (q[:, start * group : (start + each) * group], k[:, start : start + each], v[:, start : start + each])
                for q, k, v in tensors
            ]
            parts.append(run(opened(name, case.dtype, store), case.heads(start, start + each), cut))
        joined = (
            torch.cat([p[0] for p in parts], 1),
            *(Partial(*(torch.cat(x, 1) for x in zip(*(p[i] for p in parts), strict=True))) for i in (1, 2)),
        )
        assert same(joined, whole), workers


@pytest.mark.long(but=["8-16-plain-dtype0-None-native", "8-16-plain-dtype0-None-native, portable"])
@backends
@formats
@pytest.mark.parametrize("spec", [{}, WHOLE], ids=["plain", "whole"])
@pytest.mark.parametrize(("q_heads", "dim"), [(8, 16), (12, 64)])
def test_batch_mates_are_independent_bit_for_bit(
    name: str, dtype: torch.dtype, spec: dict[str, float], q_heads: int, dim: int, store: torch.dtype | None
) -> None:
    case = in_store(Case(STEP, operator(q_heads, 2, dim, **spec), dtype), name, store)
    backend, tensors = opened(name, case.dtype, store), case.tensors()
    whole = run(backend, case, other=0.5)
    assert same(run(backend, case, order=[5, 2, 0, 7, 1, 6, 3, 4]), whole)
    rows = torch.arange(len(whole[0])).split([count for _, count in STEP])
    for i in range(len(STEP)):
        alone = run(backend, replace(case, lengths=(STEP[i],)), [tensors[i]])
        assert same(alone, (whole[0][rows[i]], *(Partial(p.o[rows[i]], p.lse[rows[i]]) for p in whole[1:]))), i


def merge_with(backend: AttentionBackend, left: Partial, right: Partial) -> Partial:
    """Merges two results, one after the other, through the backend."""
    parts, n = Partial(*(torch.cat(x) for x in zip(left, right, strict=True))), len(left.lse)
    backend.merge(parts, torch.arange(n), torch.arange(n, 2 * n))
    assert torch.equal(parts.o[n:], right.o)
    return Partial(parts.o[:n], parts.lse[:n])


@pytest.mark.long(but=["1-8-16-plain-dtype0-None-native", "1-8-16-plain-dtype0-None-native, portable"])
@backends
@formats
@pytest.mark.parametrize("spec", [{}, WHOLE], ids=["plain", "whole"])
@pytest.mark.parametrize(("q_heads", "dim"), [(8, 16), (8, 20), (12, 32)])
@pytest.mark.parametrize("stripe", [1, 2])
def test_ranges_of_tokens_merge_to_the_same_bits(
    name: str,
    dtype: torch.dtype,
    spec: dict[str, float],
    q_heads: int,
    dim: int,
    stripe: int,
    store: torch.dtype | None,
) -> None:
    """Each stripe of chunks is attended by itself, as one worker's node; ``merge`` and ``merge_output`` follow, as on
    the gathering worker.
    """
    case = in_store(Case(STEP, operator(q_heads, 2, dim, **spec), dtype), name, store)
    backend, tensors, tokens = opened(name, dtype, store), case.tensors(), stripe * CHUNK_TOKENS
    out, stored, new = run(backend, case, tensors)
    rows = [RowRange(i, *case.lengths[i]) for i in range(len(STEP))]
    tables, store = fill(case, tensors, float("nan"), rows)
    items = [(r, (at, min(at + tokens, r.first))) for r in rows for at in range(0, r.first, tokens)]
    table = row_table(tables, 0, [r for r, _ in items], align=CHUNK_TOKENS, ranges=[x for _, x in items])
    q = torch.cat([tensors[r.sequence][0] for r, _ in items])
    part = backend.attend_stored(case.op, backend.prepare(table), store, q)
    nodes: dict[int, list[tuple[MergeNode, Partial]]] = {}
    starts = torch.tensor([r.count for r, _ in items]).cumsum(0) - torch.tensor([r.count for r, _ in items])
    for (row, (low, _)), at in zip(items, starts.tolist(), strict=True):
        mine = slice(at, at + row.count)
        node = MergeNode(stripe.bit_length() - 1, low // tokens)
        nodes.setdefault(row.sequence, []).append((node, Partial(part.o[mine].clone(), part.lse[mine].clone())))
    at, closed = 0, torch.full_like(out, float("nan"))
    for row in rows:
        mine = slice(at, at := at + row.count)
        if row.first:
            whole = root(reversed(nodes[row.sequence]), partial(merge_with, backend))
            assert torch.equal(whole.o, stored.o[mine]), row
            assert torch.equal(whole.lse, stored.lse[mine]), row
            backend.merge_output(whole, Partial(new.o[mine], new.lse[mine]), case.op.sinks, closed[mine])
    decode = [i for i, r in enumerate(r for r in rows for _ in range(r.count)) if r.first]
    fused = torch.full_like(out, float("nan"))
    k = torch.cat([k[stored:] for (_, k, _), (stored, _) in zip(tensors, STEP, strict=True)])
    v = torch.cat([v[stored:] for (_, _, v), (stored, _) in zip(tensors, STEP, strict=True)])
    q = torch.cat([q for q, _, _ in tensors])
    backend.finish(
        case.op, backend.prepare(row_table(tables, 0, rows, align=CHUNK_TOKENS)), stored, q, case.stored(k, v), fused
    )
    assert torch.equal(closed[decode], fused[decode])


@pytest.mark.long(but=["plain-native", "plain-native, portable", "whole-native", "whole-native, portable"])
@backends
@pytest.mark.parametrize(
    "case",
    [
        Case(((2500, 1), (900, 1), (40, 1), (300, 30), (1200, 1)), operator(8, 4, 32), torch.bfloat16),
        Case(((2500, 1), (900, 1), (40, 1), (300, 30), (1200, 1)), operator(8, 4, 32, **WHOLE), torch.bfloat16),
        Case(((100, 1),), operator(7, 1, 16)),  # one product alone is computed in another way by many threads
        Case(((4500, 1), (600, 2), (900, 1)), operator(36, 12, 64), torch.bfloat16),  # threads divide the heads
        Case(((4500, 1), (600, 3), (300, 30)), operator(16, 2, 64, **WHOLE), torch.bfloat16),
        Case(((1500, 1), (300, 3)), operator(8, 4, 32, **WHOLE), torch.bfloat16, store=torch.int8),
        Case(((1500, 1), (300, 3)), operator(8, 4, 64), torch.float32, store=torch.float8_e4m3fn),
    ],
    ids=["plain", "whole", "one item", "heads", "many queries", "int8", "fp8"],
)
def test_threads_make_no_difference_bit_for_bit(name: str, case: Case) -> None:
    case = in_store(case, name, case.store)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            found.append(run(opened(name, case.dtype, case.store), case))
    finally:
        torch.set_num_threads(threads)
    one, *others = found
    assert [same(other, one) for other in others] == [True, True]


@backends
@pytest.mark.parametrize("stored", [1, 100, 1000])
@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
def test_nan_stays_where_it_came_from(name: str, stored: int, store: torch.dtype | None) -> None:
    case = in_store(Case(((stored, 1), (stored, 1), (stored, 4)), operator(4, 2, 16)), name, store)
    for which in (1, 2):  # K, V
        tensors = case.own_tensors()
        clean = run(opened(name, case.dtype, store), case, tensors)
        tensors[1][which][stored // 2, 1] = float("nan")  # of KV head 1 of sequence 1
        out = run(opened(name, case.dtype, store), case, tensors)[0]
        assert out[1, 2:].isnan().all()
        out[1, 2:] = clean[0][1, 2:]
        assert torch.equal(out, clean[0])


@backends
@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
def test_scales_of_any_size_and_the_bound_of_the_error(name: str, store: torch.dtype) -> None:
    """Tokens differ by ten orders of magnitude, some are zero: near what is stored, and within the stated error of what
    came. A backend that dropped a scale, or took another token's, would be far off.
    """
    case = in_store(Case(((300, 1), (129, 7), (0, 3)), operator(8, 2, 32, scale=1e-3), seed=3), name, store)
    tensors, g = case.own_tensors(), torch.Generator().manual_seed(5)
    for _, k, v in tensors:
        k *= 10.0 ** (torch.rand(k.shape[:2], generator=g) * 10 - 8).unsqueeze(-1)
        v *= 10.0 ** (torch.rand(v.shape[:2], generator=g) * 10 - 5).unsqueeze(-1)
        k[::7], v[::5] = 0.0, -0.0
    out, _, _ = run(opened(name, case.dtype, store), case, tensors)
    assert error(out, oracle(case, case.meant(tensors))) < 1e-5
    exact, bound = oracle(case, tensors), {torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16}[store]
    loss = error(out, exact)
    assert bound / 1000 < loss < 4 * bound  # V's own error, and what K's does to the weights


@backends
@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
def test_where_a_chunk_of_a_prompt_ends_makes_no_more_difference_with_scales(
    name: str, store: torch.dtype | None
) -> None:
    """The last row of a prompt, over stored tokens and over the step's own: by fp32's rounding alone."""
    ends = []
    for cut in (0, 64, 100, 149):
        case = in_store(Case(((cut, 150 - cut),), operator(4, 2, 16), seed=1), name, store)
        (q, k, v) = replace(case, lengths=((0, 150),)).tensors()[0]
        out, _, _ = run(opened(name, case.dtype, store), case, [(q[cut:], k, v)])
        ends.append(out[-1].double())
    assert max(float((x - ends[0]).norm() / ends[0].norm()) for x in ends) < 2e-6


@backends
def test_long_sequences_beside_short_ones(name: str) -> None:
    """More chunks than a backend would compute at once."""
    case = Case(((9000, 1), (3, 1), (4100, 2), (5000, 40)), operator(8, 2, 64), torch.bfloat16)
    out, stored, _ = run(opened(name, case.dtype), case)
    assert error(out, oracle(case)) < DTYPES[case.dtype]
    alone = run(opened(name, case.dtype), replace(case, lengths=case.lengths[:1]), case.tensors()[:1])
    assert torch.equal(alone[1].o, stored.o[:1])


@backends
@pytest.mark.parametrize("dropped", ["window", "softcap", "sinks", "alibi", "scale"])
@pytest.mark.parametrize("count", [1, 24])
def test_dropping_any_part_of_the_spec_would_show(name: str, dropped: str, count: int) -> None:
    whole = {"window": 60, "softcap": 1.5, "sinks": True, "alibi": True, "scale": 0.4}
    case = Case(((200, count),), operator(4, 2, 16, **whole))
    want = oracle(case)
    assert error(run(opened(name, case.dtype), case)[0], want) < 1e-5
    less = {k: v for k, v in whole.items() if k != dropped}
    assert error(run(opened(name, case.dtype), replace(case, op=operator(4, 2, 16, **less)))[0], want) > 1e-3


@backends
@pytest.mark.parametrize("count", [1, 5])
def test_every_stored_token_counts(name: str, count: int) -> None:
    """Zeroing the V of one stored token, anywhere, changes the result: nothing is skipped."""
    stored = 2 * CHUNK_TOKENS + 17
    case = Case(((stored, count),), operator(2, 1, 8))
    want = run(opened(name, case.dtype), case)[0]
    for position in (0, 15, 16, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS, stored - 1):
        tensors = case.own_tensors()
        tensors[0][2][position] = 0
        assert float((run(opened(name, case.dtype), case, tensors)[0] - want).norm()) > 1e-4, position


def test_the_table_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="reference"):
        get("no-such-backend", CPU, torch.float32)


def test_a_backend_that_misses_something_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "abacus", "no_such_module")
    with pytest.raises(ImportError, match=r"'abacus' cannot be used here: No module named .*no_such_module"):
        get("abacus", CPU, torch.float32)
