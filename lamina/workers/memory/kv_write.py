"""The positions at which K and V of some rows are stored on a memory worker, and the work of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.kv.paged_cache import SlotMapping, slot_mapping
from lamina.kv.stored_format import StoredRows, to_stored_format
from lamina.protocol.codec import LayerMessages, RowLayout, TensorSpan, count_rows, messages, owned_runs, row_layout
from lamina.protocol.step_plan import RowRange
from lamina.utils.tensor_buffers import part_of

from .kv_store import KvStore


class KvWrites:
    """The K and V of rows, for whose positions the store holds blocks. ``layouts``: of the rows, by group."""

    def __init__(self, store: KvStore, layouts: Sequence[RowLayout]) -> None:
        self._store = store
        self._counts = tuple(map(count_rows, layouts))
        self.places = [(_place(store, g, x.whole_sequences), _place(store, g, x.kv)) for g, x in enumerate(layouts)]
        self._messages: dict[int, LayerMessages] = {}  # by layer; equal layers share an entry

    def messages(self, layer: int) -> LayerMessages:
        """Return the layout of a layer's messages that bring the rows."""
        store = self._store
        like = store.equal_pieces[layer]
        of_layer = self._messages.get(like)
        if of_layer is None:
            of_layer = self._messages[like] = messages(store.pieces[like], self._counts, store.dtype.itemsize)
        return of_layer

    def rows(self, layer: int, data: Tensor) -> list[StoredKvRows]:
        """Return K and V of a message, by piece, in the form in which they will be stored. They may share memory with
        ``data``.
        """
        flat = data.view(self._store.dtype)
        return [StoredKvRows(self._stored(flat, *p[:2]), self._stored(flat, *p[2:])) for p in self.messages(layer).kv]

    def _stored(self, flat: Tensor, k: TensorSpan, v: TensorSpan) -> StoredRows:
        rows = part_of(flat, *k), part_of(flat, *v)
        return to_stored_format(*rows, self._store.kv_dtype) if k.is_present else StoredRows(*rows)

    def write(self, layer: int, rows: list[StoredKvRows]) -> None:
        """Store the rows at their positions."""
        for piece, both in zip(self._store.layers[layer], rows, strict=True):
            for place, written in zip(self.places[piece.group], both, strict=True):
                if place.slot_mapping is not None:
                    self._store.backend.write_rows(piece.kv, place.slot_mapping, written.select_rows(place.owned_rows))


class StoredKvRows(NamedTuple):
    """The K and V rows of a piece in stored form: of sequences that this worker finishes alone, and of other ones."""

    whole_sequences: StoredRows
    other_sequences: StoredRows


def row_layouts(store: KvStore, rows: Sequence[RowRange]) -> list[RowLayout]:
    """Return the layout of rows for each group."""
    tables = store.tables
    return [
        row_layout(rows, lanes, window, store.placement)
        for lanes, window in zip(tables.kv_shards, tables.windows, strict=True)
    ]


class WritePositions(NamedTuple):
    """The positions of a message's K and V rows. ``owned_rows``: those stored here, None for all. ``slot_mapping``:
    where they are stored, None if none are.
    """

    num_rows: int
    owned_rows: Tensor | None
    slot_mapping: SlotMapping | None


def _place(store: KvStore, group: int, rows: list[RowRange]) -> WritePositions:
    tables, count, here = store.tables, 0, list[int]()
    parts = list[RowRange]()
    for row in rows:
        for part in owned_runs(row, tables.kv_shards[group], store.placement):
            parts.append(part)
            here += range(count + part.first - row.first, count + part.first - row.first + part.count)
        count += row.count
    if not parts:
        return WritePositions(count, None, None)
    at = slot_mapping(tables, group, parts, store.device)
    whole = len(here) == count
    return WritePositions(count, None if whole else torch.tensor(here, dtype=torch.int64, device=store.device), at)
