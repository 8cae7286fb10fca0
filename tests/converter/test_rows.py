"""Rows must not see each other; whatever couples them is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import CUT, Decoder

from lamina.converter import ConversionError, SlicedProgram, convert


def mixing(function: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
    """An MLP that applies ``function`` to [R, 1, H]."""

    class Mixing(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.up = nn.Linear(hidden, hidden)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(function(x))

    return Mixing


def cut(mlp: Callable[[int], nn.Module], dtype: torch.dtype = torch.float32) -> SlicedProgram:
    return convert(Decoder(layers=1, mlp=mlp).to(dtype), CUT)


@pytest.mark.long(but=["batch-mean"])
@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x - x.mean(0), r"aten\.mean\.dim in layers\.0\.mlp \(\w+\) reduces dimension 0 of \[R, 1, 32\]"),
        (lambda x: x / x.abs().max(), r"aten\.max\.default .* reduces"),
        (lambda x: x.softmax(0), r"aten\.softmax\.int"),
        (lambda x: x + x[0], r"aten\.select\.int .* takes single rows"),
        (lambda x: x + x[:2].sum(), r"aten\.slice\.Tensor .* takes rows 0:2"),
        (lambda x: (x.squeeze(1).t() @ x.squeeze(1) @ x.squeeze(1).t()).t()[:, None], r"aten\.matmul.* sums over"),
        (lambda x: x.flatten().sum() + x, r"aten\.sum\.default"),
        (lambda x: x + torch.rand_like(x), r"aten\.rand_like.* draws random numbers"),
    ],
    ids=["batch-mean", "batch-max", "batch-softmax", "first-row", "some-rows", "gram-matrix", "flat-sum", "noise"],
)  # fmt: skip
def test_operators_that_combine_rows_are_named(function: Callable[[Tensor], Tensor], operator: str) -> None:
    with pytest.raises(ConversionError, match=operator):
        cut(mixing(function))


def _by_value(x: Tensor) -> Tensor:
    return x.gather(0, x.argsort(0))  # every feature sorted over the batch


@pytest.mark.long(but=["batch-norm"])
@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: F.batch_norm(x.squeeze(1), None, None, training=True)[:, None], "batch_norm"),
        (_by_value, "argsort|gather"),
    ],
    ids=["batch-norm", "sorted"],
)
def test_what_shapes_do_not_show_is_found_by_running(function: Callable[[Tensor], Tensor], operator: str) -> None:
    with pytest.raises(ConversionError, match=rf"slice 1 couples its rows: .* first at ({operator}) in layers\.0\.mlp"):
        cut(mixing(function))


class LongRope(nn.Module):
    """Scales every row by what the longest text of the batch needs."""

    def __init__(self, model: Decoder, branch: bool) -> None:
        super().__init__()
        self.model, self.branch = model, branch

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        longest = position_ids.max() + 1
        if self.branch:
            return self.model(input_ids, position_ids * (2 if longest > 48 else 1))
        return self.model(input_ids, position_ids * torch.where(longest > 48, 2, 1))


@pytest.mark.parametrize(("branch", "reason"), [(False, r"aten\.max"), (True, "^the decode step takes a branch")])
def test_rotary_scale_of_the_longest_row_is_refused(branch: bool, reason: str) -> None:
    with pytest.raises(ConversionError, match=reason):
        convert(LongRope(Decoder(layers=1), branch), CUT)


class Loop(nn.Module):
    """Computes the experts that a batch has chosen, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        for chosen in x.argmax(-1).unique().tolist():
            x = x + chosen
        return x


def test_what_cannot_be_captured_is_named_with_its_line() -> None:
    words = r"layers\.0\.mlp \(Loop, `for chosen in x.argmax\(-1\).unique\(\).tolist\(\):`\) takes a branch, or makes"
    with pytest.raises(ConversionError, match=words):
        cut(lambda hidden: Loop())


class Experts(nn.Module):
    """Two of four experts per token, one grouped GEMM over the tokens sorted by expert."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 4)
        self.weight = nn.Parameter(torch.randn(4, hidden, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.squeeze(1)
        weight, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.histc(chosen.flatten().float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        mixed = torch._grouped_mm(tokens[order // 2], self.weight, offs=ends)
        restored = torch.empty_like(mixed).index_copy(0, order, mixed).view(-1, 2, x.shape[-1])
        return (restored * weight[..., None]).sum(1, keepdim=True)


@pytest.mark.long
def test_experts_pass_though_they_sort_the_batch() -> None:
    assert cut(Experts, torch.bfloat16).rows == "numeric"


class Overflowing(Experts):
    """Expert 0 serves only the first three tokens of a batch that want it."""

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.router(x).argmax(-1) < 2
        return x * (wanted & (wanted.int().cumsum(0) <= 3))[..., None]


def test_experts_of_limited_capacity_are_refused() -> None:
    with pytest.raises(ConversionError, match="couples its rows"):
        cut(Overflowing)


@pytest.mark.long
def test_positions_beyond_a_table_are_explained() -> None:
    class Learnt(Decoder):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.table = nn.Embedding(32, 32)

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(input_ids, position_ids) + self.table(position_ids).sum(-1, keepdim=True)

    assert convert(Learnt(), CUT, max_positions=32).rows == "numeric"
    with pytest.raises(ConversionError, match="positions below 33"):
        convert(Learnt(), CUT, max_positions=33)
    assert convert(Learnt(), CUT, max_positions=1).rows == "numeric"
