"""Where the K and V of some rows go on a memory worker: what all layers of a group share, and the work of a layer.

The message of a layer is flat, one piece of the layer behind the other. Of each piece come the K and V of the sequences
that it finishes alone, k [R, Hkv, D] and v [R, Hkv, Dv], then those of the others (kv.layout).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.kv.layout import Layout, kept, layout
from lamina.kv.pool import WriteIndex, write_index

from .buffers import pick, tensor_over
from .memory_store import Store, StoredPiece
from .stepplan import Rows

NOTHING = torch.empty(0)


class Writes:
    """The rows' K and V, for whose positions the store holds blocks. ``layouts`` are of ``rows``, by group."""

    def __init__(self, store: Store, layouts: Sequence[Layout]) -> None:
        self._store = store
        self._groups = [(_place(store, g, x.whole), _place(store, g, x.kv)) for g, x in enumerate(layouts)]

    def num_bytes(self, layer: int) -> int:
        """Of the layer's message; 0 = there is none."""
        count = 0
        for piece in self._store.layers[layer]:
            op, rows = piece.operator, sum(x.num_rows for x in self._groups[piece.group])
            count += rows * op.kv_heads * (op.qk_dim + op.v_dim)
        return count * self._store.dtype.itemsize

    def tensors(self, layer: int, data: memoryview) -> Iterator[tuple[StoredPiece, list[Tensor]]]:
        """The message by piece: k and v of whole sequences, then of the others."""
        flat = Flat(data, self._store.dtype)
        for piece in self._store.layers[layer]:
            op = piece.operator
            counts = [x.num_rows for x in self._groups[piece.group]]
            yield piece, [flat.take(n, op.kv_heads, dim) for n in counts for dim in (op.qk_dim, op.v_dim)]

    def write(self, layer: int, data: memoryview) -> None:
        """Store the rows' K and V at their positions."""
        for piece, (k, v, other_k, other_v) in self.tensors(layer, data):
            whole, other = self._groups[piece.group]
            for place, x, y in ((whole, k, v), (other, other_k, other_v)):
                if place.at is not None:
                    piece.kv.write(place.at, pick(x, place.kept), pick(y, place.kept))


def layouts_of(store: Store, rows: Sequence[Rows]) -> list[Layout]:
    """By group."""
    tables = store.tables
    return [
        layout(rows, lanes, window, store.stripe) for lanes, window in zip(tables.lanes, tables.windows, strict=True)
    ]


class _Place(NamedTuple):
    """Rows of a message's K and V, which of them are kept here (None = all) and where (None = nowhere)."""

    num_rows: int
    kept: Tensor | None
    at: WriteIndex | None


def _place(store: Store, group: int, rows: list[Rows]) -> _Place:
    tables, count, here = store.tables, 0, list[int]()
    parts = list[Rows]()
    for row in rows:
        for part in kept(row, tables.lanes[group], store.stripe):
            parts.append(part)
            here += range(count + part.first - row.first, count + part.first - row.first + part.count)
        count += row.count
    if not parts:
        return _Place(count, None, None)
    at = write_index(tables, group, parts, store.device)
    return _Place(count, None if len(here) == count else torch.tensor(here, dtype=torch.int64), at)


class Flat:
    """A message, tensor by tensor. What has no rows is nothing."""

    def __init__(self, data: memoryview, dtype: torch.dtype) -> None:
        self._rest = tensor_over(data, dtype) if len(data) else NOTHING

    def take(self, *shape: int) -> Tensor:
        """The next tensor, in place."""
        size = prod(shape)
        if not size:
            return NOTHING
        first, self._rest = self._rest[:size], self._rest[size:]
        return first.view(shape)
