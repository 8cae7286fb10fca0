"""Rows of a step that attend only the best blocks of their sequence: single rows of long sequences.

The selected blocks are attended as if they were the whole sequence. They may differ by KV head. So each head of a row
is treated as a sequence with its own block table, in a store whose blocks have one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lamina.kv.paged_cache import Ints, LayerCache, RowTable
from lamina.kv.sparsity import KvBudget, droppable_blocks
from lamina.kv.stored_format import Scales, bounds_bytes
from lamina.ops.attention import AttentionBackend, Operator
from lamina.ops.attention.block_selection import BlockChoices
from lamina.ops.attention.merge import CHUNK_TOKENS, Partial


class SparseRows:
    """The selecting rows of one group of a step, whose sequences lie here with all their tokens."""

    def __init__(self, backend: AttentionBackend, rows: RowTable, budget: KvBudget, tokens: Sequence[int]) -> None:
        """``tokens``: that each sequence of ``rows`` attends, instead of the budget's; 0 for all."""
        self._backend, self._table, self._size = backend, rows, rows.block_size
        numbers, blocks, attended = list[tuple[int, ...]](), list[Ints](), list[int]()
        others = np.ones(len(rows.row), np.bool_)
        for number in np.flatnonzero(rows.count == 1).tolist():
            stop = int(rows.stop[number])
            low, high, best = droppable_blocks(stop, budget._replace(tokens=tokens[number]))
            if tokens[number] and best < high - low:
                best = max(best, 0)
                total = -(-stop // self._size)
                numbers.append((int(rows.row[number]), low, high, total, best, sum(map(len, blocks))))
                blocks.append(rows.table[number, :total])
                attended.append(stop - (high - low - best) * self._size)
                others[number] = False
        self._choices = BlockChoices(
            np.array(numbers, np.int64).reshape(-1, 6), np.concatenate([*blocks, rows.row[:0]])
        )
        self._tokens = np.array(attended, np.int64)  # tokens that each selecting row attends
        self._others = rows.select_sequences(others)
        left = [range(start, start + n) for start, n in zip(rows.row[others], rows.count[others], strict=True)]
        self._at = torch.from_numpy(self._choices.numbers[:, 0].copy())
        self.others = [x for run in left for x in run]  # rows that attend all blocks
        self._others_at = torch.tensor(self.others, dtype=torch.int64)

    def __bool__(self) -> bool:
        return len(self._tokens) > 0

    @property
    def table(self) -> tuple[Sequence[int], ...]:
        """The tables for the native loop: choices and their blocks, tokens that each attends, and rows that attend
        all.
        """
        choices = self._choices
        return choices.numbers.ravel().tolist(), choices.blocks.tolist(), self._tokens.tolist(), self.others

    def stored_bytes(self, store: LayerCache) -> int:
        """Return the bytes that a layer's attention reads: K and V, and bounds."""
        tokens = int((self._others.stop - self._others.seen).sum() + self._tokens.sum())
        free = int((self._choices.numbers[:, 2] - self._choices.numbers[:, 1]).sum()) * store.k.shape[1]
        return tokens * store.token_bytes + free * bounds_bytes(store.k.shape[3], store.k.dtype)

    def attend(self, op: Operator, store: LayerCache, q: Tensor) -> Partial:
        """Attend the stored tokens for all rows; see ``AttentionBackend.attend_stored``."""
        one = replace(op, q_heads=op.q_heads // op.kv_heads, kv_heads=1, sinks=None, slopes=None)
        prepared = self._backend.prepare(self._by_head(op, store, q))
        queries = q[self._at] if len(self._others_at) else q
        part = self._backend.attend_stored(one, prepared, _by_head(store), queries.view(-1, one.q_heads, op.qk_dim))
        shape = len(self._at), op.q_heads
        part = Partial(part.o.reshape(*shape, op.v_dim), part.lse.reshape(shape))
        if not len(self._others_at):
            return part
        out = Partial(torch.empty(q.shape[0], op.q_heads, op.v_dim), torch.empty(q.shape[0], op.q_heads))
        out.o[self._at], out.lse[self._at] = part
        rest = self._backend.attend_stored(op, self.prepared_dense_rows, store, q[self._others_at])
        out.o[self._others_at], out.lse[self._others_at] = rest
        return out

    @cached_property
    def prepared_dense_rows(self) -> object:
        """The backend's prepared form of rows that attend all blocks."""
        return self._backend.prepare(self._others)

    def _by_head(self, op: Operator, store: LayerCache, q: Tensor) -> RowTable:
        """Return the selected rows as a table for a store whose blocks have one head."""
        width = -(-int(self._tokens.max()) // CHUNK_TOKENS) * (CHUNK_TOKENS // self._size)
        null = store.null_block * op.kv_heads
        table = torch.full((len(self._tokens), op.kv_heads, width), null, dtype=torch.int64)
        self._backend.select_blocks(op, store, self._choices, q, table)
        tokens = np.repeat(self._tokens, op.kv_heads)
        each, one, nothing = np.arange(len(tokens)), np.ones_like(tokens), np.zeros_like(tokens)
        flat = table.view(-1, width).numpy()
        return RowTable(0, self._size, null, each, tokens, one, nothing, tokens, nothing, flat)


def _by_head(store: LayerCache) -> LayerCache:
    """Return the same store with each head of a block as a block of its own."""

    def split(x: Tensor) -> Tensor:
        return x.view(-1, 1, *x.shape[2:])

    return LayerCache(split(store.k), split(store.v), store.scales and Scales(*map(split, store.scales)))
