"""Merging of partial results: exact identities, and bit for bit the same on any workers that hold the chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.ops.attention.merge import CHUNK_TOKENS, Fold, MergeNode, Partial, finish, merge, root


def partial(score: Tensor, v: Tensor) -> Partial:
    """Attention of fp64 scores [H, s] over v [H, s, Dv], rounded to fp32."""
    o = (score.softmax(-1)[..., None] * v).sum(-2)
    return Partial(o.float(), score.logsumexp(-1).float())


def leaves(start: int, stop: int, seed: int = 0, heads: int = 2) -> list[tuple[MergeNode, Partial]]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for chunk in range(start, stop):
        lse = 3 * torch.randn(heads, generator=g)
        out.append((MergeNode(0, chunk), Partial(torch.randn(heads, 5, generator=g), lse)))
    return out


def equal(a: Partial, b: Partial) -> bool:
    return torch.equal(a.o, b.o) and torch.equal(a.lse, b.lse)


EMPTY = Partial(torch.zeros(2, 5), torch.full((2,), float("-inf")))


def test_merging_two_parts_is_attention_over_both() -> None:
    g = torch.Generator().manual_seed(1)
    score, v = 4 * torch.randn(2, 60, generator=g).double(), torch.randn(2, 60, 5, generator=g).double()
    whole = partial(score, v)
    for cut in (1, 20, 59):
        got = merge(partial(score[:, :cut], v[:, :cut]), partial(score[:, cut:], v[:, cut:]))
        assert (got.o - whole.o).norm() / whole.o.norm() < 1e-6
        assert torch.allclose(got.lse, whole.lse, rtol=1e-6)


@pytest.mark.parametrize("lse", [0.0, 80.0, -80.0, 1e30, -1e30])
def test_an_empty_part_changes_nothing(lse: float) -> None:
    part = Partial(torch.randn(2, 5), torch.full((2,), lse))
    assert equal(merge(part, EMPTY), part)
    assert equal(merge(EMPTY, part), part)
    assert equal(merge(EMPTY, EMPTY), EMPTY)


def test_far_apart_parts_neither_overflow_nor_vanish() -> None:
    a, b = Partial(torch.ones(2, 5), torch.full((2,), 3e4)), Partial(-torch.ones(2, 5), torch.full((2,), -3e4))
    assert equal(merge(a, b), a)
    assert equal(merge(b, a), a)


@given(start=st.integers(0, 40), length=st.integers(1, 40), data=st.data())
@settings(max_examples=80, deadline=None)
def test_root_does_not_depend_on_who_holds_which_chunks(start: int, length: int, data: st.DataObject) -> None:
    chunks = leaves(start, start + length)
    want = root(chunks)
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=5)) | {0, length})
    nodes = []
    for low, high in pairwise(cuts):  # one holder has chunks low .. high
        fold = Fold()
        for node, part in chunks[low:high]:
            fold.push(node, part)
        nodes += fold.nodes
    data.draw(st.randoms()).shuffle(nodes)
    assert equal(root(nodes), want)


def test_folding_from_left_to_right_does_depend() -> None:
    """The control: why there is a tree."""
    parts = [part for _, part in leaves(0, 16)]

    def left(parts: list[Partial]) -> Partial:
        out = parts[0]
        for part in parts[1:]:
            out = merge(out, part)
        return out

    assert not equal(merge(left(parts[:7]), left(parts[7:])), left(parts))


@given(start=st.integers(0, 70), length=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_fold_leaves_the_maximal_aligned_nodes(start: int, length: int) -> None:
    fold = Fold()
    for node, part in leaves(start, start + length, heads=1):
        fold.push(node, part)
    covered = [n for node, _ in fold.nodes for n in range(node.number << node.level, (node.number + 1) << node.level)]
    assert covered == list(range(start, start + length))
    for node, _ in fold.nodes:  # its parent would leave the range
        parent = node.number >> 1
        low, high = parent << (node.level + 1), (parent + 1) << (node.level + 1)
        assert low < start or high > start + length


def test_fold_wants_consecutive_nodes() -> None:
    fold = Fold()
    fold.push(MergeNode(0, 3), EMPTY)
    with pytest.raises(ValueError, match="does not follow"):
        fold.push(MergeNode(0, 5), EMPTY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
def test_finish_adds_the_sink_once_and_rounds(dtype: torch.dtype, stored: bool) -> None:
    g = torch.Generator().manual_seed(2)
    score, v = torch.randn(2, 30, generator=g).double(), torch.randn(2, 30, 5, generator=g).double()
    sinks = torch.tensor([0.5, 2.0])
    cut = 20 if stored else 0
    parts = [partial(score[:, :cut], v[:, :cut]) if stored else EMPTY, partial(score[:, cut:], v[:, cut:])]
    weights = torch.cat([score, sinks.double()[:, None]], 1).softmax(-1)[:, :-1]
    want = (weights[..., None] * v).sum(-2)
    out = torch.full((1, 2, 5), float("nan"), dtype=dtype)
    finish(*(Partial(p.o[None], p.lse[None]) for p in parts), sinks, out)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert (out[0].double() - want).norm() / want.norm() < limit
    finish(*(Partial(p.o[None], p.lse[None]) for p in parts), None, out)
    assert (out[0].double() - want).norm() / want.norm() > 0.05, "the sink is without effect"


def test_chunks_suit_common_block_sizes() -> None:
    assert all(CHUNK_TOKENS % size == 0 for size in (8, 16, 32, 64))
