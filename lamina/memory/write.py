"""Where the K and V of some rows go on a memory worker: what all layers of a group share, and the work of a layer.

The message of a layer is flat, one piece of the layer behind the other. Of each piece come the K and V of the sequences
that it finishes alone, k [R, Hkv, D] and v [R, Hkv, Dv], then those of the others (protocol.layout).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.attention import Operator
from lamina.kv.pool import WriteIndex, write_index
from lamina.kv.stored import StoredRows, as_stored
from lamina.protocol.layout import Layout, kept, layout
from lamina.protocol.plan import Rows
from lamina.workers.staging import NOTHING

from .store import Store, StoredPiece


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

    def _rows(self, layer: int, data: Tensor) -> Iterator[tuple[StoredPiece, list[StoredRows]]]:
        """The message by piece: K and V of whole sequences, then of the others."""
        flat = Flat(data, self._store.dtype)
        for piece in self._store.layers[layer]:
            yield piece, [_take(flat, piece.operator, place.num_rows) for place in self._groups[piece.group]]

    def rows(self, layer: int, data: Tensor) -> list[Written]:
        """The rows' K and V as they will be stored, by piece. They may lie in ``data``."""
        return [
            Written(*(as_stored(x.k, x.v, self._store.kv_dtype) if len(x.k) else x for x in both))
            for _, both in self._rows(layer, data)
        ]

    def write(self, layer: int, rows: list[Written]) -> None:
        """Store them at their positions."""
        for piece, both in zip(self._store.layers[layer], rows, strict=True):
            for place, found in zip(self._groups[piece.group], both, strict=True):
                if place.at is not None:
                    self._store.backend.append(piece.kv, place.at, found.pick(place.kept))


class Written(NamedTuple):
    """A piece's rows as they are stored, those of the sequences that it finishes alone and those of the others."""

    whole: StoredRows
    other: StoredRows


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
    whole = len(here) == count
    return _Place(count, None if whole else torch.tensor(here, dtype=torch.int64, device=store.device), at)


def _take(flat: Flat, op: Operator, num_rows: int) -> StoredRows:
    k, v = (flat.take(num_rows, op.kv_heads, dim) for dim in (op.qk_dim, op.v_dim))
    return StoredRows(k, v)


class Flat:
    """A message, flat bytes, tensor by tensor. What has no rows is nothing."""

    def __init__(self, data: Tensor, dtype: torch.dtype) -> None:
        self._rest = data.view(dtype)

    def take(self, *shape: int) -> Tensor:
        """The next tensor, in place."""
        size = prod(shape)
        if not size:
            return NOTHING
        first, self._rest = self._rest[:size], self._rest[size:]
        return first.view(shape)
