"""Where the K and V of some rows go on a memory worker: what all layers of a group share, and the work of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.buffers import part_of
from lamina.kv.pool import WriteIndex, write_index
from lamina.kv.stored import StoredRows, as_stored
from lamina.protocol.codec import Messages, Part, counts, messages
from lamina.protocol.layout import Layout, kept, layout
from lamina.protocol.plan import Rows

from .store import Store


class Writes:
    """The rows' K and V, for whose positions the store holds blocks. ``layouts`` are of ``rows``, by group."""

    def __init__(self, store: Store, layouts: Sequence[Layout]) -> None:
        self._store = store
        self._counts = tuple(map(counts, layouts))
        self.places = [(_place(store, g, x.whole), _place(store, g, x.kv)) for g, x in enumerate(layouts)]
        self._messages: dict[int, Messages] = {}  # by layer; layers that are alike share one

    def messages(self, layer: int) -> Messages:
        """The messages of a layer in which the rows come."""
        store = self._store
        like = store.alike[layer]
        of_layer = self._messages.get(like)
        if of_layer is None:
            of_layer = self._messages[like] = messages(store.pieces[like], self._counts, store.dtype.itemsize)
        return of_layer

    def rows(self, layer: int, data: Tensor) -> list[Written]:
        """The K and V of a message as they will be stored, by piece. They may lie in ``data``."""
        flat = data.view(self._store.dtype)
        return [Written(self._stored(flat, *p[:2]), self._stored(flat, *p[2:])) for p in self.messages(layer).kv]

    def _stored(self, flat: Tensor, k: Part, v: Part) -> StoredRows:
        rows = part_of(flat, *k), part_of(flat, *v)
        return as_stored(*rows, self._store.kv_dtype) if k.there else StoredRows(*rows)

    def write(self, layer: int, rows: list[Written]) -> None:
        """Store them at their positions."""
        for piece, both in zip(self._store.layers[layer], rows, strict=True):
            for place, written in zip(self.places[piece.group], both, strict=True):
                if place.at is not None:
                    self._store.backend.append(piece.kv, place.at, written.pick(place.kept))


class Written(NamedTuple):
    """K and V rows of a piece, as they are stored: of sequences that this worker finishes alone (``whole``), and of the
    ``other`` ones.
    """

    whole: StoredRows
    other: StoredRows


def layouts_of(store: Store, rows: Sequence[Rows]) -> list[Layout]:
    """By group."""
    tables = store.tables
    return [
        layout(rows, lanes, window, store.placement) for lanes, window in zip(tables.lanes, tables.windows, strict=True)
    ]


class WritePlace(NamedTuple):
    """Rows of a message's K and V, which of them are kept here (None = all) and where (None = nowhere)."""

    num_rows: int
    kept: Tensor | None
    at: WriteIndex | None


def _place(store: Store, group: int, rows: list[Rows]) -> WritePlace:
    tables, count, here = store.tables, 0, list[int]()
    parts = list[Rows]()
    for row in rows:
        for part in kept(row, tables.lanes[group], store.placement):
            parts.append(part)
            here += range(count + part.first - row.first, count + part.first - row.first + part.count)
        count += row.count
    if not parts:
        return WritePlace(count, None, None)
    at = write_index(tables, group, parts, store.device)
    whole = len(here) == count
    return WritePlace(count, None if whole else torch.tensor(here, dtype=torch.int64, device=store.device), at)
