"""A step on a memory worker: what all layers of a group share, and the work of a layer.

The messages of a layer are flat, one piece of the layer behind the other. Of each piece come the tensors of the
sequences that it finishes alone, then those of the others (kv.layout):

    Q    q [R, Hq, D], q [R', Hq, D]
    KV   k [R, Hkv, D], v [R, Hkv, Dv], k [R", Hkv, D], v [R", Hkv, Dv]
    O    of all pieces the partial results, o [P, Hq, Dv] and lse [P, Hq] in fp32; then of all pieces o [R, Hq, Dv]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.kv.layout import kept, layout
from lamina.kv.pool import WriteIndex, row_table, write_index

from .buffers import pick, tensor_over
from .memory_store import Store, StoredPiece
from .stepplan import Rows, StepPlan


class Sizes(NamedTuple):
    """Bytes of a layer's messages; 0 = there is none."""

    q: int
    kv: int
    partial: int  # the part of O in front
    final: int
    stored: int  # K and V that its attention reads

    @property
    def o(self) -> int:
        return self.partial + self.final


@dataclass
class Stored:
    """What a piece's attention over stored tokens has found: for sequences that are whole here, and for the others."""

    whole: Partial | None
    nodes: Partial | None


class Step:
    """One applied plan."""

    def __init__(self, store: Store, plan: StepPlan) -> None:
        self.plan = plan
        self._store = store
        self._groups = [_GroupStep(store, g, plan.rows) for g in range(len(store.tables.windows))]
        self._sizes: dict[int, Sizes] = {}

    def sizes(self, layer: int) -> Sizes:
        """Of this worker's messages."""
        like = self._store.alike[layer]
        if like not in self._sizes:
            self._sizes[like] = self._count(like)
        return self._sizes[like]

    def _count(self, layer: int) -> Sizes:
        q = kv = partial = final = stored = 0
        for piece, group in self._pieces(layer):
            op, whole = piece.operator, group.whole.num_rows
            q += (whole + group.other_q) * op.q_heads * op.qk_dim
            kv += (whole + group.other_kv.num_rows) * op.kv_heads * (op.qk_dim + op.v_dim)
            partial += group.num_partial * op.q_heads * (op.v_dim + 1)
            final += whole * op.q_heads * op.v_dim
            stored += group.stored_tokens * op.kv_heads * (op.qk_dim + op.v_dim)
        itemsize = self._store.dtype.itemsize
        return Sizes(q * itemsize, kv * itemsize, partial * torch.float32.itemsize, final * itemsize, stored * itemsize)

    def attend_stored(self, layer: int, q: memoryview) -> list[Stored]:
        """By piece; see ``AttentionBackend.attend_stored``."""
        attend, found = self._store.backend.attend_stored, list[Stored]()
        for piece, group, (whole, other) in self._q(layer, q):
            results = [
                attend(piece.operator, x.prepared, piece.kv, pick(q, x.of)) if x.num_rows else None
                for x, q in ((group.whole, whole), (group.nodes, other))
            ]
            found.append(Stored(*results))
        return found

    def write(self, layer: int, kv: memoryview) -> None:
        """Store the rows' K and V at their positions."""
        for piece, group, (k, v, other_k, other_v) in self._kv(layer, kv):
            for rows, x, y in ((group.whole_kv, k, v), (group.other_kv, other_k, other_v)):
                if rows.at is not None:
                    piece.kv.write(rows.at, pick(x, rows.kept), pick(y, rows.kept))

    def finish(self, layer: int, stored: list[Stored], q: memoryview, kv: memoryview, out: memoryview) -> None:
        """Attend the new rows, and fill O."""
        backend, upto = self._store.backend, self.sizes(layer).partial
        partial, final = _Flat(out[:upto], torch.float32), _Flat(out[upto:], self._store.dtype)
        for (piece, group, (whole, other)), (_, _, (k, v, other_k, other_v)), part in zip(
            self._q(layer, q), self._kv(layer, kv), stored, strict=True
        ):
            op, new = piece.operator, group.new
            parts = [] if part.nodes is None else [part.nodes]
            if new.num_rows:
                new_k, new_v = pick(other_k, group.new_kv), pick(other_v, group.new_kv)
                parts.append(backend.attend_new(op, new.prepared, pick(other, new.of), new_k, new_v))
            if parts:
                torch.cat([x.o for x in parts], out=partial.take(group.num_partial, op.q_heads, op.v_dim))
                torch.cat([x.lse for x in parts], out=partial.take(group.num_partial, op.q_heads))
            if part.whole is not None:
                o = final.take(group.whole.num_rows, op.q_heads, op.v_dim)
                backend.finish(op, group.whole.prepared, part.whole, whole, k, v, o)

    def _pieces(self, layer: int) -> Iterator[tuple[StoredPiece, _GroupStep]]:
        for piece in self._store.layers[layer]:
            yield piece, self._groups[piece.group]

    def _q(self, layer: int, data: memoryview) -> Iterator[tuple[StoredPiece, _GroupStep, list[Tensor]]]:
        flat = _Flat(data, self._store.dtype)
        for piece, group in self._pieces(layer):
            op = piece.operator
            yield piece, group, [flat.take(n, op.q_heads, op.qk_dim) for n in (group.whole.num_rows, group.other_q)]

    def _kv(self, layer: int, data: memoryview) -> Iterator[tuple[StoredPiece, _GroupStep, list[Tensor]]]:
        flat = _Flat(data, self._store.dtype)
        for piece, group in self._pieces(layer):
            op = piece.operator
            counts = group.whole.num_rows, group.other_kv.num_rows
            yield piece, group, [flat.take(n, op.kv_heads, dim) for n in counts for dim in (op.qk_dim, op.v_dim)]


class _Attended(NamedTuple):
    """Rows of a message's Q that the backend takes at once; ``of`` None = all."""

    num_rows: int
    of: Tensor | None
    prepared: Any


class _Written(NamedTuple):
    """Rows of a message's K and V, which of them are kept here (None = all) and where (None = nowhere)."""

    num_rows: int
    kept: Tensor | None
    at: WriteIndex | None


class _GroupStep:
    """What one group has of a step: index tensors."""

    def __init__(self, store: Store, group: int, rows: Sequence[Rows]) -> None:
        tables, self._store, self._group = store.tables, store, group
        found = layout(rows, tables.lanes[group], tables.windows[group], store.stripe)
        q_at, kv_at = _starts(found.q), _starts(found.kv)
        self.stored_tokens = 0
        self.num_partial = found.num_partial
        self.whole = self._attended(found.whole, None, None)
        self.whole_kv = self._written(found.whole)
        self.other_q = len(found.q_rows)
        self.other_kv = self._written(found.kv)
        node_rows, ranges = [n.rows for n in found.nodes], [(n.low, n.high) for n in found.nodes]
        self.nodes = self._attended(node_rows, ranges, _index(node_rows, q_at))
        self.new = self._attended(found.new, [(r.first, r.first) for r in found.new], _index(found.new, q_at))
        self.new_kv = _index(found.new, kv_at)

    def _attended(self, rows: list[Rows], ranges: list[tuple[int, int]] | None, index: Tensor | None) -> _Attended:
        if not rows:
            return _Attended(0, index, None)
        table = row_table(self._store.tables, self._group, rows, align=CHUNK_TOKENS, ranges=ranges)
        self.stored_tokens += int((table.stop - table.seen).sum())
        return _Attended(table.num_rows, index, self._store.backend.prepare(table))

    def _written(self, rows: list[Rows]) -> _Written:
        tables, count, here = self._store.tables, 0, list[int]()
        parts = list[Rows]()
        for row in rows:
            for part in kept(row, tables.lanes[self._group], self._store.stripe):
                parts.append(part)
                here += range(count + part.first - row.first, count + part.first - row.first + part.count)
            count += row.count
        if not parts:
            return _Written(count, None, None)
        at = write_index(tables, self._group, parts, self._store.device)
        return _Written(count, None if len(here) == count else torch.tensor(here, dtype=torch.int64), at)


def _starts(rows: Iterable[Rows]) -> dict[int, int]:
    """Sequence -> its first row in a message."""
    found, at = dict[int, int](), 0
    for row in rows:
        found.setdefault(row.sequence, at)
        at += row.count
    return found


def _index(rows: Iterable[Rows], starts: dict[int, int]) -> Tensor:
    """The rows of sequences in a message."""
    return torch.tensor([starts[r.sequence] + i for r in rows for i in range(r.count)], dtype=torch.int64)


NOTHING = torch.empty(0)


class _Flat:
    """A message, tensor by tensor. What has no rows is nothing."""

    def __init__(self, data: memoryview, dtype: torch.dtype) -> None:
        self._rest = tensor_over(data, dtype) if len(data) else NOTHING

    def take(self, *shape: int) -> Tensor:
        size = prod(shape)
        if not size:
            return NOTHING
        first, self._rest = self._rest[:size], self._rest[size:]
        return first.view(shape)
