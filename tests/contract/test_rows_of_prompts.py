"""The promise of native attention beyond the contract: a prompt's row is as exact as a token that is decoded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import DTYPES, VARIANTS, Case, operator, run
from torch import Tensor

from lamina.ops.attention.merge import CHUNK_TOKENS, finish
from lamina.ops.attention.native import NativeAttention

pytestmark = pytest.mark.no_retry

# Matrix instructions have an order of their own for many rows, and round weights that add up to 1.
ONE_ORDER = [v for v in VARIANTS if v != "amx_bf16"]
variants = pytest.mark.parametrize("variant", ONE_ORDER)


@st.composite
def prompts(draw: st.DrawFn) -> Case:
    group, kv_heads = draw(st.sampled_from([(1, 3), (2, 2), (3, 1), (4, 2), (5, 1), (7, 2), (8, 2), (12, 1), (20, 1)]))
    op = operator(
        group * kv_heads,
        kv_heads,
        draw(st.sampled_from([16, 20, 32, 64, 96, 128, 256])),
        draw(st.sampled_from([0, 24, 32])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 16, 100, CHUNK_TOKENS, 200])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        scale=draw(st.sampled_from([0.25, 1.0])),
    )
    lengths = ((draw(st.sampled_from([1, 31, 32, 33, 127, 128, 129, 300, 517])), draw(st.integers(2, 70))),)
    store = draw(st.sampled_from([None, None, None, torch.int8, torch.float8_e4m3fn]))
    size = draw(st.sampled_from([1, 8, 16, 32, 128]))
    return Case(lengths, op, draw(st.sampled_from(list(DTYPES))), size, draw(st.integers(0, 99)), store)


def row_alone(case: Case, at: int) -> tuple[Case, list[tuple[Tensor, Tensor, Tensor]]]:
    """The step whose one row is row ``at`` of a case's, the rows before it being stored."""
    ((stored, _),), ((q, k, v),) = case.lengths, case.tensors()
    return replace(case, lengths=((stored + at, 1),)), [(q[at : at + 1], k[: stored + at + 1], v[: stored + at + 1])]


@pytest.mark.long(but=["avx2"])
@variants
@settings(max_examples=80, deadline=None)
@given(case=prompts())
def test_the_first_row_of_a_prompt_has_the_bits_of_a_decoded_token(variant: str, case: Case) -> None:
    """However many rows share its keys: what is stored before it, its own token, and both of them together."""
    backend = NativeAttention(case.dtype, variant, case.store)
    whole = run(backend, case)
    for many, one in zip(whole[1:], run(backend, *row_alone(case, 0))[1:], strict=True):
        assert torch.equal(many.o[:1], one.o)
        assert torch.equal(many.lse[:1], one.lse)


@variants
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [{}, {"window": 150, "sinks": True, "alibi": True}, {"scale": 3.0}], ids=str)
def test_where_a_prompt_is_cut_changes_its_rows_by_rounding_of_fp32_alone(
    variant: str, dtype: torch.dtype, spec: dict[str, float]
) -> None:
    """Each row is computed in a chunk, and by itself after those before it. The weights are rounded to bf16 by their
    scores alone. KV that is computed anew therefore differs from that of decoded tokens as little as that of fp32 does.
    """
    case = Case(((100, 70),), operator(8, 2, 64, **spec), dtype, seed=3)
    backend = NativeAttention(dtype, variant)
    _, *parts = run(backend, case)
    whole = torch.empty_like(parts[0].o)
    finish(*parts, case.op.sinks, whole)
    for at in (0, 1, 30, 69):
        _, *parts = run(backend, *row_alone(case, at))
        one = torch.empty_like(parts[0].o)
        finish(*parts, case.op.sinks, one)
        assert float((one[0] - whole[at]).norm() / whole[at].norm()) < 2e-6


@variants
@pytest.mark.parametrize("size", [1e3, 1e5, 1e8, 1e30])
def test_scores_of_any_size(variant: str, size: float) -> None:
    """One token whose score is far above all others has all of the weight; equal ones share it."""
    case = Case(((300, 9),), operator(4, 2, 64, scale=1.0), torch.bfloat16, seed=1)
    ((q, k, v),) = case.own_tensors()
    q[:], k[:] = 1.0, -size / 64
    k[17], k[250] = size / 64, size / 64
    out = run(NativeAttention(torch.bfloat16, variant), case, [(q, k, v)])[0]
    want = ((v[17].double() + v[250].double()) / 2).repeat_interleave(2, 0)
    assert float((out.double() - want).abs().max()) < 2e-2
