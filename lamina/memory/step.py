"""A step on a memory worker: what all layers of a group share, and the work of a layer.

The messages of a layer are flat, one piece of the layer behind the other. Of each piece come the tensors of the
sequences that it finishes alone, then those of the others (protocol.layout):

    Q    q [R, Hq, D], q [R', Hq, D]
    KV   as in memory.write
    O    of all pieces the partial results, o [P, Hq, Dv] and lse [P, Hq] in fp32; then of all pieces o [R, Hq, Dv]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.buffers import pick
from lamina.kv.pool import row_table
from lamina.kv.stored import head_bytes
from lamina.protocol.layout import Layout
from lamina.protocol.plan import Rows, StepPlan

from .store import Store, StoredPiece
from .write import Flat, Writes, Written, layouts_of


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
    stripes: Partial | None


class Step:
    """One applied plan."""

    def __init__(self, store: Store, plan: StepPlan) -> None:
        self.plan = plan
        self._store = store
        layouts = layouts_of(store, plan.rows)
        self._writes = Writes(store, layouts)
        self._groups = [_GroupStep(store, g, x) for g, x in enumerate(layouts)]
        self._sizes: dict[int, Sizes] = {}

    def sizes(self, layer: int) -> Sizes:
        """Of this worker's messages."""
        like = self._store.alike[layer]
        if like not in self._sizes:
            self._sizes[like] = self._count(like)
        return self._sizes[like]

    def _count(self, layer: int) -> Sizes:
        q = partial = final = stored = 0
        for piece, group in self._pieces(layer):
            op, whole = piece.operator, group.whole.num_rows
            q += (whole + group.other_q) * op.q_heads * op.qk_dim
            partial += group.num_partial * op.q_heads * (op.v_dim + 1)
            final += whole * op.q_heads * op.v_dim
            stored += group.stored_tokens * op.kv_heads * head_bytes(op.qk_dim, op.v_dim, self._store.kv_dtype)
        size, kv = self._store.dtype.itemsize, self._writes.num_bytes(layer)
        return Sizes(q * size, kv, partial * torch.float32.itemsize, final * size, stored)

    def attend_stored(self, layer: int, q: Tensor) -> list[Stored]:
        """By piece, of a message; see ``AttentionBackend.attend_stored``."""
        attend, found = self._store.backend.attend_stored, list[Stored]()
        for piece, group, (whole, other) in self._q(layer, q):
            results = [
                attend(piece.operator, x.prepared, piece.kv, pick(q, x.of)) if x.num_rows else None
                for x, q in ((group.whole, whole), (group.stripes, other))
            ]
            found.append(Stored(*results))
        return found

    def rows(self, layer: int, kv: Tensor) -> list[Written]:
        """The K and V of a message, as they will be stored. They may lie in ``kv``."""
        return self._writes.rows(layer, kv)

    def write(self, layer: int, rows: list[Written]) -> None:
        """Store them at their positions."""
        self._writes.write(layer, rows)

    def finish(
        self, layer: int, stored: list[Stored], q: Tensor, kv: list[Written], partial: Tensor, final: Tensor
    ) -> None:
        """Attend the new rows as they are stored, and fill the two parts of O, flat bytes."""
        backend = self._store.backend
        partials, finals = Flat(partial, torch.float32), Flat(final, self._store.dtype)
        for (piece, group, (whole, other)), written, part in zip(self._q(layer, q), kv, stored, strict=True):
            op, new = piece.operator, group.new
            parts = [] if part.stripes is None else [part.stripes]
            if new.num_rows:
                parts.append(
                    backend.attend_new(op, new.prepared, pick(other, new.of), written.other.pick(group.new_kv))
                )
            if parts:
                torch.cat([x.o for x in parts], out=partials.take(group.num_partial, op.q_heads, op.v_dim))
                torch.cat([x.lse for x in parts], out=partials.take(group.num_partial, op.q_heads))
            if part.whole is not None:
                o = finals.take(group.whole.num_rows, op.q_heads, op.v_dim)
                backend.finish(op, group.whole.prepared, part.whole, whole, written.whole, o)

    def _pieces(self, layer: int) -> Iterator[tuple[StoredPiece, _GroupStep]]:
        for piece in self._store.layers[layer]:
            yield piece, self._groups[piece.group]

    def _q(self, layer: int, data: Tensor) -> Iterator[tuple[StoredPiece, _GroupStep, list[Tensor]]]:
        flat = Flat(data, self._store.dtype)
        for piece, group in self._pieces(layer):
            op = piece.operator
            yield piece, group, [flat.take(n, op.q_heads, op.qk_dim) for n in (group.whole.num_rows, group.other_q)]


class _Attended(NamedTuple):
    """Rows of a message's Q that the backend takes at once; ``of`` None = all."""

    num_rows: int
    of: Tensor | None
    prepared: Any


class _GroupStep:
    """What one group has of a step: index tensors."""

    def __init__(self, store: Store, group: int, found: Layout) -> None:
        self._store, self._group = store, group
        q_at, kv_at = _starts(found.q), _starts(found.kv)
        self.stored_tokens = 0
        self.num_partial = found.num_partial
        self.whole = self._attended(found.whole, None, None)
        self.other_q = len(found.q_rows)
        rows, ranges = [s.rows for s in found.stripes], [(s.low, s.high) for s in found.stripes]
        self.stripes = self._attended(rows, ranges, _index(rows, q_at, store.device))
        at = _index(found.new, q_at, store.device)
        self.new = self._attended(found.new, [(r.first, r.first) for r in found.new], at)
        self.new_kv = _index(found.new, kv_at, store.device)

    def _attended(self, rows: list[Rows], ranges: list[tuple[int, int]] | None, index: Tensor | None) -> _Attended:
        if not rows:
            return _Attended(0, index, None)
        table = row_table(self._store.tables, self._group, rows, align=CHUNK_TOKENS, ranges=ranges)
        self.stored_tokens += int((table.stop - table.seen).sum())
        return _Attended(table.num_rows, index, self._store.backend.prepare(table))


def _starts(rows: Iterable[Rows]) -> dict[int, int]:
    """Sequence -> its first row in a message."""
    found, at = dict[int, int](), 0
    for row in rows:
        found.setdefault(row.sequence, at)
        at += row.count
    return found


def _index(rows: Iterable[Rows], starts: dict[int, int], device: torch.device) -> Tensor:
    """The rows of sequences in a message."""
    at = [starts[r.sequence] + i for r in rows for i in range(r.count)]
    return torch.tensor(at, dtype=torch.int64, device=device)
