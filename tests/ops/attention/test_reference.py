"""The reference backend's own promises: the tree of ``merge``, whatever the tiles.

Covers: lamina/ops/attention/reference_tiles.py, lamina/ops/attention/spec.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamina.kv.paged_cache import LayerCache, row_table
from lamina.ops.attention import Operator, reference_tiles
from lamina.ops.attention.merge import CHUNK_TOKENS, Fold, MergeNode, Partial, root
from lamina.ops.attention.reference import ReferenceAttention
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, RowRange, StepPlan

CPU = torch.device("cpu")
SIZE = 16
OP = Operator(spec=AttentionSpec(scale=0.25), q_heads=4, kv_heads=2, qk_dim=16, v_dim=16)


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0) -> Partial:
    """q [c, Hq, D] after the stored k, v [n, H, D], whose length is a multiple of the block size."""
    n, blocks = k.shape[0], k.shape[0] // SIZE
    op = Operator(**{**vars(OP), "spec": AttentionSpec(scale=0.25, window=window)})
    tables = BlockTables([window], [blocks + 4], SIZE)
    tables.apply(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, n)]))
    _, ids = tables.block_table(0, 1)
    stored = [torch.zeros(blocks + 5, 2, SIZE, 16) for _ in range(2)]
    for tensor, x in zip(stored, (k, v), strict=True):
        tensor[torch.tensor(ids)] = x.view(blocks, SIZE, 2, 16).transpose(1, 2)
    rows = [RowRange(1, n, q.shape[0])]
    tables.apply(StepPlan(step=1, ops=[], rows=rows))
    backend = ReferenceAttention(CPU)
    prepared = backend.prepare(row_table(tables, 0, rows, align=CHUNK_TOKENS))
    return backend.attend_stored(op, prepared, LayerCache(*stored), q)


def tokens(n: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n + rows)
    return torch.randn(rows, 4, 16, generator=g), torch.randn(n, 2, 16, generator=g), torch.randn(n, 2, 16, generator=g)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8, 13])
def test_stored_tokens_are_merged_in_the_aligned_tree(chunks: int, rows: int) -> None:
    q, k, v = tokens(chunks * CHUNK_TOKENS, rows)
    nodes = []
    for cut in (range(chunks // 3), range(chunks // 3, chunks)):  # two holders of one chunk after the other
        fold = Fold()
        for i in cut:
            part = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
            fold.push(MergeNode(0, i), attend(q, k[part], v[part]))
        nodes += fold.nodes
    want, got = root(nodes), attend(q, k, v)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("window", [0, 600])
def test_tiles_make_no_difference(monkeypatch: pytest.MonkeyPatch, rows: int, window: int) -> None:
    q, k, v = tokens(11 * CHUNK_TOKENS + 48, rows)
    want = attend(q, k, v, window=window)
    for size in (1, 1 << 17, 1 << 18):
        monkeypatch.setattr(reference_tiles, "TILE_BYTES", size)
        got = attend(q, k, v, window=window)
        assert torch.equal(got.o, want.o)
        assert torch.equal(got.lse, want.lse)
