"""One step on a memory worker: the positions of its K and V, what the layers of a group share, and their attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.kv.paged_cache import SlotMapping, row_table, slot_mapping
from lamina.kv.sparsity import kv_budget
from lamina.kv.stored_format import StoredRows, to_stored_format
from lamina.ops.attention.merge import CHUNK_TOKENS, Partial
from lamina.protocol.codec import (
    LayerMessages,
    RowLayout,
    TensorSpan,
    count_rows,
    first_rows,
    messages,
    owned_runs,
    row_layout,
)
from lamina.protocol.step_plan import RowRange, ScoreBlocks, SelectBlocks, StepPlan
from lamina.utils.tensor_buffers import part_of, pick

from .kv_store import KvStore, StoredPiece
from .sparse.scoring import BlockScoring
from .sparse.selection import SparseRows


class StoredKvRows(NamedTuple):
    """The K and V rows of a piece in stored form: of sequences that this worker finishes alone, and of other ones."""

    whole_sequences: StoredRows
    other_sequences: StoredRows


class WritePositions(NamedTuple):
    """The positions of a message's K and V rows. ``owned_rows``: those stored here, None for all. ``slot_mapping``:
    where they are stored, None if none are.
    """

    num_rows: int
    owned_rows: Tensor | None
    slot_mapping: SlotMapping | None


class KvWrites:
    """The K and V of rows, for whose positions the store holds blocks."""

    def __init__(self, store: KvStore, layouts: Sequence[RowLayout]) -> None:
        """``layouts``: of the rows, by group. ``write_positions``: of K and V, by group: those of whole sequences, and
        those of other ones.
        """
        self._store = store
        self._counts = tuple(map(count_rows, layouts))
        self.write_positions = [
            (_place(store, g, x.whole_sequences), _place(store, g, x.kv)) for g, x in enumerate(layouts)
        ]
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
        rows, store = (part_of(flat, *k), part_of(flat, *v)), self._store
        return to_stored_format(*rows, store.kv_dtype) if store.is_scaled and k.is_present else StoredRows(*rows)

    def write(self, layer: int, rows: list[StoredKvRows]) -> None:
        """Store the rows at their positions."""
        for piece, both in zip(self._store.layers[layer], rows, strict=True):
            for place, written in zip(self.write_positions[piece.group], both, strict=True):
                if place.slot_mapping is not None:
                    own = written if place.owned_rows is None else written.select_rows(place.owned_rows)
                    self._store.backend.write_rows(piece.kv, place.slot_mapping, own)


def row_layouts(store: KvStore, rows: Sequence[RowRange]) -> list[RowLayout]:
    """Return the layout of rows for each group."""
    tables = store.tables
    return [
        row_layout(rows, lanes, window, store.placement)
        for lanes, window in zip(tables.kv_shards, tables.windows, strict=True)
    ]


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


@dataclass
class StoredAttention:
    """Attention of one piece over stored tokens: for sequences that this worker finishes alone, and for nodes of other
    ones.
    """

    whole_sequences: Partial | None
    nodes: Partial | None


class AttentionStep(KvWrites):
    """The step of one applied plan. ``scoring``: of blocks; None: the plan requests no scores."""

    def __init__(self, store: KvStore, plan: StepPlan) -> None:
        layouts = row_layouts(store, plan.rows)
        super().__init__(store, layouts)
        self.plan = plan
        budgets = {op.sequence: op.tokens for op in plan.ops if isinstance(op, SelectBlocks)}
        attended = [] if store.bind_request.parity else layouts
        self.groups = [GroupAttentionStep(store, g, x, budgets) for g, x in enumerate(attended)]
        self.scoring = BlockScoring(store, plan) if any(isinstance(op, ScoreBlocks) for op in plan.ops) else None
        self._stored_bytes: dict[tuple[int, bool], int] = {}  # by layer; equal layers share an entry

    def prepared(self) -> tuple[Any, ...]:
        """Return what the backend has prepared for each group. This is for whole sequences, nodes, new rows, and rows
        of whole sequences that do not select blocks although others do; None where there are no such rows.
        """
        each = (
            (g.whole_sequences.prepared, g.nodes.prepared, g.new_rows.prepared, g.prepared_dense_rows)
            for g in self.groups
        )
        return tuple(chain.from_iterable(each))

    @cached_property
    def graph_key(self) -> tuple[int, ...] | None:
        """A key that steps share if they launch the same work on the device; only the content of their tensors differs.
        None if no other step can be the same. Only a step has one whose sequences have one row each, lie here whole,
        and attend all their tokens.
        """
        lone = bool(self.groups) and all(rows.count == 1 for rows in self.plan.rows) and self.scoring is None
        whole = all(g.selection is None and not g.nodes.num_rows and not g.new_rows.num_rows for g in self.groups)
        kept = all(
            place.slot_mapping and place.owned_rows is None and not other.num_rows
            for place, other in self.write_positions
        )
        if not (lone and whole and kept and all(g.whole_sequences.num_rows == self.plan.num_rows for g in self.groups)):
            return None
        keys = [self._store.backend.graph_key(group.whole_sequences.prepared) for group in self.groups]
        return None if None in keys else (self.plan.num_rows, *chain.from_iterable(k for k in keys if k))

    def copy_inputs_from(self, other: AttentionStep) -> None:
        """Copy the inputs of ``other``, which has the same ``graph_key``, to this step's addresses, which a graph
        reads.
        """
        for own, new in zip(self.groups, other.groups, strict=True):
            self._store.backend.update_prepared(own.whole_sequences.prepared, new.whole_sequences.prepared)
        for (place, _), (there, _) in zip(self.write_positions, other.write_positions, strict=True):
            assert place.slot_mapping is not None
            assert there.slot_mapping is not None
            place.slot_mapping.blocks.copy_(there.slot_mapping.blocks)
            place.slot_mapping.offsets.copy_(there.slot_mapping.offsets)

    def relaunched(self) -> AttentionStep:
        """Return the same step again, with nothing launched yet."""
        return AttentionStep(self._store, self.plan)

    def stored_bytes(self, layer: int) -> int:
        """Return the bytes of K and V that the layer's attention reads."""
        like = self._store.equal_pieces[layer], self._store.selects_blocks[layer]
        if like not in self._stored_bytes:
            self._stored_bytes[like] = sum(group.stored_bytes(piece) for piece, group in self._pieces(layer))
        return self._stored_bytes[like]

    @property
    def remote_bytes(self) -> int:
        """The bytes of K and V that attention reads here, in all layers, for sequences whose home is another worker."""
        if not any(group.remote_tokens for group in self.groups):
            return 0
        each = (x for layer in range(len(self._store.layers)) for x in self._pieces(layer))
        return sum(group.remote_tokens * piece.kv.token_bytes for piece, group in each)

    def attend_stored(self, layer: int, q: Tensor) -> list[StoredAttention]:
        """Attend the stored tokens with the Q of a message. Returns a result for each piece; see
        ``AttentionBackend``.
        """
        attend, stored = self._store.backend.attend_stored, list[StoredAttention]()
        for piece, group, (whole, other) in self._q(layer, q):
            if group.selection and piece.kv.bounds is not None:
                stored.append(StoredAttention(group.selection.attend(piece.operator, piece.kv, whole), None))
                continue
            results = [
                attend(piece.operator, x.prepared, piece.kv, pick(q, x.rows)) if x.num_rows else None
                for x, q in ((group.whole_sequences, whole), (group.nodes, other))
            ]
            stored.append(StoredAttention(*results))
        return stored

    def add_scores(self, layer: int, q: Tensor) -> None:
        """Add the layer's block scores to the sums that the plan requests, after its rows are written. ``q``: a
        message's bytes.
        """
        if self.scoring is not None:
            self.scoring.add([(piece, whole) for piece, _, (whole, _) in self._q(layer, q)])

    def finish(
        self,
        layer: int,
        stored: list[StoredAttention],
        q: Tensor,
        kv: list[StoredKvRows],
        partial: Tensor,
        final: Tensor,
    ) -> None:
        """Attend the new rows as they are stored, and fill both parts of O: ``partial`` and ``final``, flat bytes."""
        backend, messages = self._store.backend, self.messages(layer)
        partials, finals = partial.view(torch.float32), final.view(self._store.dtype)
        pieces = zip(self._q(layer, q), kv, stored, messages.partial, messages.final, strict=True)
        for (piece, group, (whole, other)), written, part, (o_part, lse_part), final_part in pieces:
            op, new = piece.operator, group.new_rows
            parts = [] if part.nodes is None else [part.nodes]
            if new.num_rows:
                parts.append(
                    backend.attend_new(
                        op, new.prepared, pick(other, new.rows), written.other_sequences.select_rows(group.new_kv)
                    )
                )
            if parts:
                torch.cat([x.o for x in parts], out=part_of(partials, *o_part))
                torch.cat([x.lse for x in parts], out=part_of(partials, *lse_part))
            if part.whole_sequences is not None:
                o = part_of(finals, *final_part)
                backend.finish(
                    op, group.whole_sequences.prepared, part.whole_sequences, whole, written.whole_sequences, o
                )

    def _pieces(self, layer: int) -> Iterator[tuple[StoredPiece, GroupAttentionStep]]:
        for piece in self._store.layers[layer]:
            yield piece, self.groups[piece.group]

    def _q(self, layer: int, data: Tensor) -> Iterator[tuple[StoredPiece, GroupAttentionStep, tuple[Tensor, Tensor]]]:
        flat = data.view(self._store.dtype)
        for (piece, group), (whole, other) in zip(self._pieces(layer), self.messages(layer).q, strict=True):
            yield piece, group, (part_of(flat, *whole), part_of(flat, *other))


class _AttendedRows(NamedTuple):
    """The rows of a message's Q that one call of the backend attends. ``rows``: None for all."""

    num_rows: int
    rows: Tensor | None
    prepared: Any


class GroupAttentionStep:
    """The index tensors of one layer group in a step."""

    def __init__(self, store: KvStore, group: int, layout: RowLayout, budgets: Mapping[int, int]) -> None:
        """``budgets``: by sequence, the tokens that a single row attends, instead of the engine's budget; 0 for all."""
        self._store, self._group = store, group
        q_at, kv_at = first_rows(layout.q), first_rows(layout.kv)
        self.stored_tokens = 0
        self.selection: SparseRows | None = None
        self.whole_sequences = self._attended(layout.whole_sequences, None, None)
        if any(store.selects_blocks) and layout.whole_sequences and not store.tables.windows[group]:
            table = row_table(store.tables, group, layout.whole_sequences, align=CHUNK_TOKENS)
            budget = kv_budget(store.bind_request.kv, store.tables.block_size)
            tokens = [budgets.get(rows.sequence, budget.tokens) for rows in layout.whole_sequences]
            self.selection = SparseRows(store.backend, table, budget, tokens)
        rows, ranges = [n.rows for n in layout.merge_nodes], [(n.low, n.high) for n in layout.merge_nodes]
        lanes, stays = store.tables.kv_shards[group], store.placement.single_shard
        remote = (n for n in layout.merge_nodes if stays and n.rows.location.kv_shard not in lanes)
        self.remote_tokens = sum(max(0, min(n.high, n.rows.first) - n.low) for n in remote)
        self.nodes = self._attended(rows, ranges, _index(rows, q_at, store.device) if rows else None)
        at = _index(layout.new_rows, q_at, store.device) if layout.new_rows else None
        self.new_rows = self._attended(layout.new_rows, [(r.first, r.first) for r in layout.new_rows], at)
        self.new_kv = _index(layout.new_rows, kv_at, store.device) if layout.new_rows else None

    @property
    def prepared_dense_rows(self) -> Any:
        """The backend's prepared form of rows that attend all blocks although others select; None if there are
        none.
        """
        return self.selection.prepared_dense_rows if self.selection and self.selection.others else None

    def stored_bytes(self, piece: StoredPiece) -> int:
        """Return the bytes of K and V that a layer's attention reads for a piece."""
        if self.selection and piece.kv.bounds is not None:
            return self.selection.stored_bytes(piece.kv)
        return self.stored_tokens * piece.kv.token_bytes

    def _attended(
        self, rows: list[RowRange], ranges: list[tuple[int, int]] | None, index: Tensor | None
    ) -> _AttendedRows:
        if not rows:
            return _AttendedRows(0, index, None)
        table = row_table(self._store.tables, self._group, rows, align=CHUNK_TOKENS, ranges=ranges)
        self.stored_tokens += int((table.stop - table.seen).sum())
        return _AttendedRows(table.num_rows, index, self._store.backend.prepare(table))


def _index(rows: Iterable[RowRange], starts: dict[int, int], device: torch.device) -> Tensor:
    """Return the indices, in a message, of the rows of sequences."""
    at = [starts[r.sequence] + i for r in rows for i in range(r.count)]
    return torch.tensor(at, dtype=torch.int64, device=device)
