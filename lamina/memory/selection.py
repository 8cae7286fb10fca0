"""The rows of a step that attend the best blocks of their sequence only: lone ones, of long sequences.

What they attend lies side by side, as if it were all. It may be other blocks for each KV head: so each head of a row is
a sequence of its own here, with a block table of its own, in a store whose blocks have one head.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina.attention import AttentionBackend, Operator
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.select import best_blocks
from lamina.kv.pool import LayerStore, RowTable
from lamina.kv.sparsity import Budget, free_blocks
from lamina.kv.stored import Scales, bounds_bytes


class _SomeBlocks(NamedTuple):
    """A row of the step, and the blocks of its sequence: those before and behind the free ones stay."""

    row: int
    blocks: Tensor  # [B] ids
    low: int
    high: int
    best: int  # of the free ones, that are attended
    tokens: int  # that are attended


class Selection:
    """Of one group of a step, whose sequences lie here with all their tokens."""

    def __init__(self, backend: AttentionBackend, rows: RowTable, budget: Budget, dense: Collection[int]) -> None:
        """``dense``: sequences of ``rows``, by number, that attend all."""
        self._backend, self._table, self._size = backend, rows, rows.block_size
        self._chosen = list[_SomeBlocks]()
        others = np.ones(len(rows.row), np.bool_)
        for number in np.flatnonzero(rows.count == 1).tolist():
            stop = int(rows.stop[number])
            low, high, count = free_blocks(stop, budget)
            if count < high - low and number not in dense:
                blocks = torch.from_numpy(rows.table[number, : -(-stop // self._size)])
                gone = (high - low - count) * self._size
                self._chosen.append(_SomeBlocks(int(rows.row[number]), blocks, low, high, count, stop - gone))
                others[number] = False
        self._others = rows.select(others)
        left = [range(start, start + n) for start, n in zip(rows.row[others], rows.count[others], strict=True)]
        self._at = torch.tensor([row.row for row in self._chosen], dtype=torch.int64)
        self._others_at = torch.tensor([x for run in left for x in run], dtype=torch.int64)

    def __bool__(self) -> bool:
        return bool(self._chosen)

    def stored_bytes(self, store: LayerStore) -> int:
        """What a layer's attention reads: K and V, and bounds."""
        tokens = int((self._others.stop - self._others.seen).sum()) + sum(row.tokens for row in self._chosen)
        bounds = sum(row.high - row.low for row in self._chosen) * store.k.shape[1]
        return tokens * store.token_bytes + bounds * bounds_bytes(store.k.shape[3], store.k.dtype)

    def attend(self, op: Operator, store: LayerStore, q: Tensor) -> Partial:
        """``AttentionBackend.attend_stored`` of all rows."""
        o = torch.empty(q.shape[0], op.q_heads, op.v_dim)
        out = Partial(o, torch.empty(q.shape[0], op.q_heads))
        if len(self._others_at):
            part = self._backend.attend_stored(op, self._prepared_others, store, q[self._others_at])
            out.o[self._others_at], out.lse[self._others_at] = part
        one = replace(op, q_heads=op.q_heads // op.kv_heads, kv_heads=1, sinks=None, slopes=None)
        queries = q[self._at]
        prepared = self._backend.prepare(self._by_head(op, store, queries))
        part = self._backend.attend_stored(one, prepared, _by_head(store), queries.view(-1, one.q_heads, op.qk_dim))
        shape = len(self._at), op.q_heads
        out.o[self._at], out.lse[self._at] = part.o.reshape(*shape, op.v_dim), part.lse.reshape(shape)
        return out

    @cached_property
    def _prepared_others(self) -> object:
        return self._backend.prepare(self._others)

    def _by_head(self, op: Operator, store: LayerStore, q: Tensor) -> RowTable:
        """Of a store whose blocks have one head."""
        heads, size, most = torch.arange(op.kv_heads)[:, None], self._size, max(row.tokens for row in self._chosen)
        width = -(-most // CHUNK_TOKENS) * (CHUNK_TOKENS // size)
        table = (store.null_block * op.kv_heads + heads).repeat(len(self._chosen), width)
        assert store.bounds is not None
        for number, row in enumerate(self._chosen):
            best = row.low + best_blocks(op, store.bounds, row.blocks[row.low : row.high], q[number], row.best)
            ends = torch.arange(row.low), torch.arange(row.high, len(row.blocks))
            before, behind = (x.expand(op.kv_heads, -1) for x in ends)
            kept = torch.cat([before, best, behind], 1)
            part = slice(number * op.kv_heads, (number + 1) * op.kv_heads)
            table[part, : kept.shape[1]] = row.blocks[kept] * op.kv_heads + heads
        tokens = np.repeat(np.array([row.tokens for row in self._chosen], np.int64), op.kv_heads)
        numbers = np.arange(len(tokens))
        null, nothing = store.null_block * op.kv_heads, np.zeros_like(tokens)
        return RowTable(0, size, null, numbers, tokens, np.ones_like(tokens), nothing, tokens, nothing, table.numpy())


def _by_head(store: LayerStore) -> LayerStore:
    """The same blocks, each head of one as a block of its own."""

    def split(x: Tensor) -> Tensor:
        return x.view(-1, 1, *x.shape[2:])

    return LayerStore(split(store.k), split(store.v), store.scales and Scales(*map(split, store.scales)))
