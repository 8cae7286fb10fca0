"""All memory workers as one, for the compute worker: scatters Q, K, V by the partition, gathers O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.spec import AttentionSpec
from lamina.kv.layout import Merges, layout, merges
from lamina.kv.partition import Lanes, Partition, Piece

from .buffers import tensor_over
from .links import MemoryLink
from .stepplan import Key, Kind, LayerShape, StepPlan, encode

Index = Tensor | slice  # rows of a step


class MemoryPool:
    """What slices send with: ``send.q(layer, q)`` and ``send.kv(layer, k, v)``; and what they go on with, ``o``."""

    def __init__(
        self,
        links: list[MemoryLink],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
    ) -> None:
        """``backend``: of the memory workers' name; it merges what they return in parts."""
        self.links = links
        self._layers = [_Layer(shape, i, partition, links) for i, shape in enumerate(layers)]
        self._backend = backend
        self._stripe = partition.stripe * CHUNK_TOKENS
        self._step = _Selected(StepPlan(step=0, ops=[], rows=[]), self._stripe)
        self.send_s = 0.0
        self.wait_s = 0.0

    def select(self, plan: StepPlan) -> None:
        """The messages that follow belong to this step."""
        if plan is not self._step.plan:
            self._step = _Selected(plan, self._stripe)

    def announce(self, plan: StepPlan) -> None:
        """Tell all memory workers of a step to come."""
        key, data = Key(Kind.PLAN, plan.step, plan.batch, plan.view), encode(plan)
        for link in self.links:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        start, key, of = time.perf_counter(), self._step.key(Kind.Q, layer), self._layers[layer]
        for link, pieces in of.pieces:
            parts = list[Tensor]()
            for piece in pieces:
                rows, mine = self._step.rows(piece.lanes, of.window), q[:, of.q_heads(piece), 0]
                parts += (mine[index] for index in (rows.whole, rows.q))
            _send(link, key, parts)
        self.send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        start, key, of = time.perf_counter(), self._step.key(Kind.KV, layer), self._layers[layer]
        for link, pieces in of.pieces:
            parts = list[Tensor]()
            for piece in pieces:
                rows, heads = self._step.rows(piece.lanes, of.window), slice(piece.head_start, piece.head_stop)
                parts += (x[:, heads, 0][index] for index in (rows.whole, rows.kv) for x in (k, v))
            _send(link, key, parts)
        self.send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Gather [R, 1, Hq, Dv] from all memory workers."""
        start, key, of = time.perf_counter(), self._step.key(Kind.O, layer), self._layers[layer]
        out = torch.empty(num_rows, of.shape.q_heads, of.shape.v_dim, dtype=dtype)
        found: dict[int, list[Partial]] = {}  # first head of a share -> partial results, by worker
        for link, pieces in of.pieces:
            rows = [(p, self._step.rows(p.lanes, of.window)) for p in pieces]
            numbers = sum(r.num_partial * of.num_q_heads(p) * (of.shape.v_dim + 1) for p, r in rows)
            final = sum(r.num_whole * of.num_q_heads(p) * of.shape.v_dim for p, r in rows)
            if nbytes := numbers * torch.float32.itemsize + final * dtype.itemsize:
                link.receive(key, partial(_take, of, rows, numbers, out, found), nbytes)
        for share in of.shares:
            if share.head_start in found:
                self._merge(of, share, found[share.head_start], out)
        self.wait_s += time.perf_counter() - start
        return out.unsqueeze(1)

    def _merge(self, of: _Layer, share: _SharedHeads, parts: list[Partial], out: Tensor) -> None:
        """Fill in the rows that several memory workers have returned in parts."""
        plan, backend = self._step.merges(share.lanes, of.window), self._backend
        o, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        for left, right in plan.levels:
            o[left], lse[left] = backend.merge(Partial(o[left], lse[left]), Partial(o[right], lse[right]))
        stored, new = (Partial(o[index], lse[index]) for index in (plan.roots, plan.new))
        closed = torch.empty(stored.o.shape, dtype=out.dtype)
        sinks = None if of.sinks is None else of.sinks[share.heads].contiguous()
        backend.close(stored, new, sinks, closed)
        out[plan.rows, share.heads] = closed


class _SharedHeads(NamedTuple):
    """Heads whose tokens several memory workers have."""

    head_start: int
    heads: slice  # query heads
    lanes: tuple[Lanes, ...]  # of the workers, in order


class _Layer:
    """A layer, and who does what of it."""

    def __init__(self, shape: LayerShape, index: int, partition: Partition, links: list[MemoryLink]) -> None:
        spec = AttentionSpec.decode(shape.spec)
        self.shape = shape
        self.window = spec.window
        self.sinks = torch.frombuffer(bytearray(shape.sinks), dtype=torch.float32) if spec.sinks else None
        self._group = shape.q_heads // shape.kv_heads
        self.pieces = [(x, partition.pieces(index, x.worker)) for x in links]
        shared: dict[int, list[Piece]] = {}
        for piece in (p for _, pieces in self.pieces for p in pieces):
            shared.setdefault(piece.head_start, []).append(piece)
        self.shares = [
            _SharedHeads(start, self.q_heads(of[0]), tuple(p.lanes for p in of)) for start, of in shared.items()
        ]

    def q_heads(self, piece: Piece) -> slice:
        return slice(piece.head_start * self._group, piece.head_stop * self._group)

    def num_q_heads(self, piece: Piece) -> int:
        return piece.num_kv_heads * self._group


class _GroupRows(NamedTuple):
    """kv.layout.Layout as indices."""

    num_whole: int
    num_partial: int
    whole: Index
    q: Index
    kv: Index


class _MergeIndex(NamedTuple):
    """kv.layout.Merges as indices."""

    levels: list[tuple[Tensor, Tensor]]
    roots: Tensor
    new: Tensor
    rows: Tensor


class _Selected:
    """The step that messages belong to, and whose rows are whose. Groups of one window and lanes have the same."""

    def __init__(self, plan: StepPlan, stripe: int) -> None:
        self.plan = plan
        self._stripe = stripe
        self._rows: dict[tuple[Lanes, int], _GroupRows] = {}
        self._merges: dict[tuple[tuple[Lanes, ...], int], _MergeIndex] = {}

    def key(self, kind: Kind, layer: int) -> Key:
        return Key(kind, self.plan.step, self.plan.batch, self.plan.view, layer)

    def rows(self, lanes: Lanes, window: int) -> _GroupRows:
        if (lanes, window) not in self._rows:
            found, every = layout(self.plan.rows, lanes, window, self._stripe), self.plan.num_rows
            indices = (_index(x, every) for x in (found.whole_rows, found.q_rows, found.kv_rows))
            self._rows[lanes, window] = _GroupRows(len(found.whole_rows), found.num_partial, *indices)
        return self._rows[lanes, window]

    def merges(self, lanes: tuple[Lanes, ...], window: int) -> _MergeIndex:
        if (lanes, window) not in self._merges:
            found: Merges = merges(layout(self.plan.rows, x, window, self._stripe) for x in lanes)
            levels = [(torch.tensor(left), torch.tensor(right)) for left, right in found.levels]
            ends = (torch.tensor(x) for x in (found.roots, found.new, found.rows))
            self._merges[lanes, window] = _MergeIndex(levels, *ends)
        return self._merges[lanes, window]


def _index(rows: list[int], every: int) -> Index:
    """``every``: the step's number of rows. Slices give views: most often it is all rows, or none."""
    if len(rows) in (0, every):
        return slice(0, len(rows))
    return torch.tensor(rows)


def _send(link: MemoryLink, key: Key, parts: list[Tensor]) -> None:
    parts = [p for p in parts if p.numel()]
    if parts:
        link.send_tensors(key, parts)


def _take(
    of: _Layer,
    rows: list[tuple[Piece, _GroupRows]],
    numbers: int,
    out: Tensor,
    found: dict[int, list[Partial]],
    data: memoryview,
) -> None:
    """An O, from its bytes: final results to ``out`` [R, Hq, Dv], the ``numbers`` of partial ones to ``found``."""
    cut = numbers * torch.float32.itemsize
    partials, finals = _tensor(data[:cut], torch.float32), _tensor(data[cut:], out.dtype)
    for piece, group in rows:
        heads, dim = of.num_q_heads(piece), of.shape.v_dim
        if group.num_partial:
            lses = group.num_partial * heads
            o, lse, partials = torch.split(partials, [lses * dim, lses, len(partials) - lses * (dim + 1)])
            part = Partial(o.view(-1, heads, dim).clone(), lse.view(-1, heads).clone())
            found.setdefault(piece.head_start, []).append(part)
        if group.num_whole:
            size = group.num_whole * heads * dim
            final, finals = finals[:size], finals[size:]
            out[group.whole, of.q_heads(piece)] = final.view(-1, heads, dim)


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    return tensor_over(data, dtype) if len(data) else torch.empty(0, dtype=dtype)
