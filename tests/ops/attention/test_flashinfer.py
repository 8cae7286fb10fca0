"""The flashinfer backend over a stand-in for FlashInferAttention: every chunk is a request, results go up the merge
tree."""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Any

import pytest
import test_attention as contract
import torch
from cuda_emulation import emulated, needs_gxx
from torch import Tensor

from lamina.ops.attention.flashinfer import FlashInferAttention, FlashInferRows

pytestmark = needs_gxx
DTYPE = torch.bfloat16


class Decode:
    """A class with the documented interface of flashinfer.BatchDecodeWithPagedKVCacheWrapper, layout HND, one request
    after the other.
    """

    ran = 0

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "HND"

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        assert options["disable_split_kv"]
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        self.requests = [indices[a:b].long() for a, b in pairwise(indptr.tolist())]
        self.last, self.shape, self.options = last.tolist(), shape, options

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, return_lse: bool) -> tuple[Tensor, Tensor]:
        q_heads, kv_heads, _, size = self.shape
        cap, out = self.options["logits_soft_cap"], []
        for row, pages, last in zip(q.float(), self.requests, self.last, strict=True):
            tokens = (len(pages) - 1) * size + last
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :tokens].float() for x in kv)
            k, v = (x.repeat_interleave(q_heads // kv_heads, 0) for x in (k, v))
            score = (k @ row[:, :, None])[..., 0] * self.options["sm_scale"]
            score = cap * torch.tanh(score / cap) if cap else score
            out.append(((score.softmax(-1)[:, None] @ v)[:, 0], score.logsumexp(-1) / log(2)))
        Decode.ran += 1
        return torch.stack([o for o, _ in out]).to(q.dtype), torch.stack([lse for _, lse in out])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    monkeypatch.setattr(Decode, "ran", 0)
    return FlashInferAttention(Decode, emulated(DTYPE), torch.device("cpu"), DTYPE)


@pytest.mark.parametrize("spec", [{}, {"sinks": True, "softcap": 3.0}], ids=["plain", "sinks and softcap"])
def test_equals_the_oracle(backend: FlashInferAttention, spec: dict[str, Any]) -> None:
    case = contract.Case(((300, 1), (0, 1), (700, 1), (128, 1), (1, 1)), contract.operator(8, 2, 64, **spec), DTYPE)
    out, stored, _ = contract.run(backend, case)
    assert Decode.ran == 1
    assert contract.error(out, contract.oracle(case)) < contract.DTYPES[DTYPE]
    assert stored.lse[1].eq(float("-inf")).all()


def test_ranges_of_tokens_merge_to_the_same_bits(backend: FlashInferAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = contract.operator
    monkeypatch.setattr(contract, "get", lambda name, device, dtype, store: backend)
    monkeypatch.setattr(contract, "STEP", ((300, 1), (0, 1), (700, 1), (129, 1)))
    monkeypatch.setattr(contract, "operator", lambda q, kv, dim, **spec: operator(q, kv, 64, **spec))
    contract.test_ranges_of_tokens_merge_to_the_same_bits("", DTYPE, {}, 8, 16, 2, None)
    assert Decode.ran == 2


@pytest.mark.parametrize(
    ("lengths", "spec"), [(((300, 1), (40, 2)), {}), (((300, 1),), {"window": 40}), (((300, 1),), {"alibi": True})]
)
def test_the_cuda_backend_takes_the_rest(
    backend: FlashInferAttention, lengths: tuple[tuple[int, int], ...], spec: dict[str, Any]
) -> None:
    case = contract.Case(lengths, contract.operator(4, 2, 64, **spec), DTYPE)
    out, _, _ = contract.run(backend, case)
    assert Decode.ran == 0
    assert contract.error(out, contract.oracle(case)) < contract.DTYPES[DTYPE]


def test_one_plan_a_step(backend: FlashInferAttention) -> None:
    case = contract.Case(((300, 1),), contract.operator(4, 2, 64), DTYPE)
    rows = [contract.RowRange(0, 300, 1)]
    tables, store = contract.fill(case, case.tensors(), 0.0, rows)
    tables.apply(contract.StepPlan(step=2, ops=[], rows=rows))
    prepared: FlashInferRows = backend.prepare(contract.row_table(tables, 0, rows, align=128))
    for _ in range(3):
        backend.attend_stored(case.op, prepared, store, case.tensors()[0][0])
    assert prepared.chunks is not None
    assert len(prepared.chunks.planned) == 1
