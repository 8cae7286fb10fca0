"""The contract suite's checks, with the CUDA kernels run on a CPU: the core on tensor cores, and the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_attention as contract
import torch
from cuda_emulation import SMALL, EmulatedKernels, emulated, needs_gxx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = [needs_gxx, pytest.mark.timeout(300)]

OPERATOR, CASE = contract.operator, contract.Case
Tensors = list[tuple[Tensor, Tensor, Tensor]]
STORES = pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn], ids=["as q", "int8", "fp8"])
# One of them and the whole operator say most of what 8 bits change; the others are slow.
FORMATS = pytest.mark.parametrize(
    ("spec", "store"),
    [
        ({}, None),
        (contract.WHOLE, None),
        (contract.WHOLE, torch.int8),
        pytest.param({}, torch.int8, marks=pytest.mark.slow),
        pytest.param(contract.WHOLE, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
    ids=["plain", "whole", "whole int8", "plain int8", "whole fp8"],
)


@pytest.fixture(params=["tensor", pytest.param("plain", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """The suite's own functions, over emulated kernels; for tensor cores all its heads have the size 64."""
    monkeypatch.setattr(contract, "get", lambda name, device, dtype, store=None: emulated(dtype, store=store))
    if request.param == "plain":
        yield torch.float32
        return
    dtype = torch.bfloat16
    monkeypatch.setattr(contract, "operator", lambda q, kv, dim, v=0, **spec: OPERATOR(q, kv, 64, **spec))
    monkeypatch.setattr(contract, "Case", lambda lengths, op, dtype=dtype, **rest: CASE(lengths, op, dtype, **rest))
    yield dtype


@st.composite
def cases(draw: st.DrawFn) -> contract.Case:
    group, kv_heads = draw(st.sampled_from([(1, 2), (4, 1), (7, 2), (12, 1)]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    op = OPERATOR(
        group * kv_heads,
        kv_heads,
        64 if dtype == torch.bfloat16 else draw(st.sampled_from([8, 20, 64])),
        0 if dtype == torch.bfloat16 else draw(st.sampled_from([0, 24])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 16, 100, 128, 200])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        scale=draw(st.sampled_from([0.25, 1.0])),
    )
    store = draw(st.sampled_from([None, None, torch.int8, torch.float8_e4m3fn]))
    size, seed = draw(st.sampled_from([1, 8, 16, 128])), draw(st.integers(0, 99))
    return CASE(draw(contract.sequences), op, dtype, size, seed, store)


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), processors=st.sampled_from([1, 2, 7]))
def test_equals_the_oracle(case: contract.Case, processors: int) -> None:
    backend = emulated(case.dtype, replace(SMALL, processors=processors), store=case.store)
    out, stored, new = contract.run(backend, case)
    assert contract.error(out, contract.oracle(case)) < contract.DTYPES[case.dtype]
    empty = torch.tensor([length == 0 for length, count in case.lengths for _ in range(count)])
    assert (stored.lse[empty] == float("-inf")).all()
    assert (stored.o[empty] == 0).all()
    assert not any(x.isnan().any() for p in (stored, new) for x in p)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (72, 80), (96, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("group", [1, 4, 8, 12])
@STORES
def test_every_head_size_on_tensor_cores(
    dtype: torch.dtype, dim: int, v_dim: int, group: int, store: torch.dtype | None
) -> None:
    op = OPERATOR(group, 1, dim, v_dim, **contract.WHOLE)
    case = CASE(((300, 1), (0, 3), (1030, 2)), op, dtype, store=store)
    backend = emulated(dtype, store=store)
    out, _, _ = contract.run(backend, case)
    assert backend.kernels.launched["tensor"] == 2  # type: ignore[attr-defined]
    assert contract.error(out, contract.oracle(case)) < contract.DTYPES[dtype]


def before_rounding(case: contract.Case, tensors: Tensors | None = None) -> Tensor:
    """o in fp32."""
    _, stored, new = contract.run(emulated(case.dtype, store=case.store), case, tensors)
    share = 1 / (1 + (new.lse - stored.lse).exp())
    return stored.o * share[..., None] + new.o * (1 - share[..., None])


@pytest.mark.long
@STORES
def test_partial_results_are_as_exact_as_fp32(dtype: torch.dtype, store: torch.dtype | None) -> None:
    """Weights are not rounded to the store's 16 bits: the oracle's o is met before it is rounded."""
    case = contract.Case(((1000, 1), (130, 1)), contract.operator(4, 2, 64), store=store)
    assert contract.error(before_rounding(case), contract.oracle(case)) < 2e-5


@pytest.mark.long
@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_scales_of_any_size_on_tensor_cores(wire: torch.dtype, store: torch.dtype) -> None:
    """Tokens differ by many orders of magnitude, some are zero. Weights times scales have the range of fp32."""
    most = {torch.bfloat16: 10.0, torch.float16: 4.0}[wire]
    case = CASE(((300, 1), (129, 7), (40, 3)), OPERATOR(8, 2, 64, scale=1e-3), wire, seed=3, store=store)
    tensors, g = case.tensors(), torch.Generator().manual_seed(5)
    for _, k, v in tensors:
        k *= 10.0 ** (torch.rand(k.shape[:2], generator=g) * most - most + 2).unsqueeze(-1)
        v *= 10.0 ** (torch.rand(v.shape[:2], generator=g) * most - most).unsqueeze(-1)
        k[::7], v[::5] = 0.0, -0.0
    assert contract.error(before_rounding(case, tensors), contract.oracle(case, case.meant(tensors))) < 2e-5


@pytest.mark.long
@FORMATS
def test_heads(dtype: torch.dtype, spec: dict[str, Any], store: torch.dtype | None) -> None:
    contract.test_heads_are_independent_bit_for_bit("", dtype, spec, 8, 4, 16, store)


@pytest.mark.long(but=["tensor-plain"])
@FORMATS
def test_batch_mates(dtype: torch.dtype, spec: dict[str, Any], store: torch.dtype | None) -> None:
    contract.test_batch_mates_are_independent_bit_for_bit("", dtype, spec, 8, 16, store)


@pytest.mark.long(but=["tensor-1-plain", "tensor-1-whole"])
@FORMATS
@pytest.mark.parametrize("stripe", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranges_of_tokens(dtype: torch.dtype, spec: dict[str, Any], stripe: int, store: torch.dtype | None) -> None:
    contract.test_ranges_of_tokens_merge_to_the_same_bits("", dtype, spec, 8, 16, stripe, store)


@pytest.mark.parametrize("check", [contract.test_nan_stays_where_it_came_from, contract.test_every_stored_token_counts])
@pytest.mark.parametrize("number", [1, 100])
def test_tokens(dtype: torch.dtype, check: Callable[..., None], number: int) -> None:
    if check is contract.test_nan_stays_where_it_came_from:
        check("", number, None)
    else:
        check("", min(number, 5))


@pytest.mark.long(but=["int8"])
@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_stored_numbers_of_8_bits_on_the_plain_core(store: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "get", lambda name, device, dtype, store=None: emulated(dtype, store=store))
    contract.test_scales_of_any_size_and_the_bound_of_the_error("", store)
    contract.test_nan_stays_where_it_came_from("", 20, store)


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("number", [1, 100])
def test_a_row_that_is_nan_stays_where_it_came_from(dtype: torch.dtype, number: int, store: torch.dtype) -> None:
    """Its scale is NaN; it shares a tile with those of others."""
    contract.test_nan_stays_where_it_came_from("", number, store)


def test_a_scale_that_is_nan_does_not_reach_rows_that_do_not_see_it() -> None:
    """The rows before it are in the same tile of queries, and their weight for it is 0."""
    case = CASE(((0, 4),), OPERATOR(4, 2, 64), torch.bfloat16, store=torch.int8)
    tensors = case.tensors()
    clean = contract.run(emulated(case.dtype, store=case.store), case, tensors)[0]
    tensors[0][2][2, 1] = float("nan")
    out = contract.run(emulated(case.dtype, store=case.store), case, tensors)[0]
    assert out[2:, 2:].isnan().all()
    assert torch.equal(out[:2], clean[:2])


@pytest.mark.parametrize("dropped", ["window", "softcap", "sinks", "alibi", "scale"])
def test_dropping_any_part_of_the_spec_would_show(dropped: str) -> None:
    whole = {"window": 6, "softcap": 1.5, "sinks": True, "alibi": True, "scale": 0.4}
    case = CASE(((200, 3),), OPERATOR(4, 2, 64, **whole), torch.bfloat16)
    less = replace(case, op=OPERATOR(4, 2, 64, **{k: v for k, v in whole.items() if k != dropped}))
    assert contract.error(contract.run(emulated(torch.bfloat16), less)[0], contract.oracle(case)) > 2e-2


@pytest.mark.long(but=["tensor"])
def test_plans_make_no_difference_bit_for_bit(dtype: torch.dtype) -> None:
    """A task may be a chunk or a whole sequence, with the warps of any GPU."""
    case = contract.Case(((2500, 1), (900, 1), (40, 1), (300, 20)), contract.operator(4, 2, 64, **contract.WHOLE))
    found = []
    for processors in (1, 3, 20, 132):
        kernels = EmulatedKernels(replace(SMALL, processors=processors))
        backend = emulated(dtype)
        backend.kernels = kernels
        found.append(contract.run(backend, case))
    assert all(contract.same(x, found[0]) for x in found)


def test_who_takes_which_task_makes_no_difference_bit_for_bit(dtype: torch.dtype) -> None:
    """Warps that are equally fast, and one that is done with all but the others' first tasks before these begin."""
    case = contract.Case(((2500, 1), (900, 1), (40, 1), (300, 20)), contract.operator(4, 2, 64, **contract.WHOLE))
    found = []
    for first_is_fast in (False, True):
        backend = emulated(dtype)
        backend.kernels = EmulatedKernels(replace(SMALL, processors=1), first_is_fast=first_is_fast)
        found.append(contract.run(backend, case))
    assert contract.same(*found)
