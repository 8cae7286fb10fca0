"""All memory workers as one, for the compute worker: scatters Q, K, V by the partition, gathers O.

The layouts of the messages are those of memory.step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.spec import AttentionSpec
from lamina.buffers import pick, tensor_over
from lamina.protocol.layout import Layout, layout, merges
from lamina.protocol.partition import Lanes, Partition
from lamina.protocol.plan import Key, Kind, LayerShape, StepPlan, encode

from .links import MemoryLink

FP32 = torch.float32
Index = Tensor | None  # rows of a step; None = all of them
Group = tuple[Lanes, int]  # lanes and window: pieces of one group have the same rows


class MemoryPool:
    """What slices send with, ``q`` and ``kv``; and what they go on with, ``o``."""

    def __init__(
        self,
        links: list[MemoryLink],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        """``backend``: of the memory workers' name; it merges what they return in parts. ``empty``: makes what ``o``
        gives.
        """
        self.links = links
        self._groups: list[Group] = []
        self._layers = [_Layer(shape, i, partition, links, self._groups) for i, shape in enumerate(layers)]
        self._backend, self._empty = backend, empty
        self._stripe = partition.stripe * CHUNK_TOKENS
        self._steps: dict[int, _Step] = {}  # of every batch, its last one
        self.select(StepPlan(step=0, ops=[], rows=[]))
        self.send_s = 0.0
        self.wait_s = 0.0

    def select(self, plan: StepPlan) -> None:
        """The messages that follow belong to this step."""
        step = self._steps.get(plan.batch)
        if step is None or step.plan is not plan:
            step = self._steps[plan.batch] = _Step(plan, self._groups, self._stripe)
        self._step = step

    def announce(self, plan: StepPlan) -> None:
        """Tell all memory workers of a step to come."""
        key, data = Key(Kind.PLAN, plan.step, plan.batch, plan.view), encode(plan)
        for link in self.links:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        start, rows = time.perf_counter(), self._step.rows
        for link, pieces in self._layers[layer].pieces:
            parts = [pick(q[:, p.q_heads, 0], index) for p in pieces for index in rows(p.group).q]
            if parts:
                link.send_tensors(self._step.key(Kind.Q, layer), parts)
        self.send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        start, rows = time.perf_counter(), self._step.rows
        for link, pieces in self._layers[layer].pieces:
            parts = [pick(x[:, p.kv_heads, 0], index) for p in pieces for index in rows(p.group).kv for x in (k, v)]
            if parts:
                link.send_tensors(self._step.key(Kind.KV, layer), parts)
        self.send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Gather [R, 1, Hq, Dv] from all memory workers."""
        start, of = time.perf_counter(), self._layers[layer]
        out = self._empty(num_rows, of.num_q_heads, of.v_dim, dtype=dtype)
        found: dict[int, list[Partial]] = {}  # first head -> partial results, in the order of workers
        for link, pieces in of.pieces:
            groups = [(p, self._step.rows(p.group)) for p in pieces]
            cut = sum(g.num_partial * p.num_q_heads for p, g in groups) * (of.v_dim + 1) * FP32.itemsize
            final = sum(g.num_whole * p.num_q_heads for p, g in groups) * of.v_dim * dtype.itemsize
            if cut + final:
                link.receive(self._step.key(Kind.O, layer), partial(_take, groups, cut, out, found), cut + final)
        for first_head, parts in found.items():
            self._merge(of, first_head, parts, out)
        self.wait_s += time.perf_counter() - start
        return out.unsqueeze(1)

    def settle(self) -> None:
        """See Attention: every O was waited for."""

    def _merge(self, of: _Layer, first_head: int, parts: list[Partial], out: Tensor) -> None:
        """Fill in the rows that several memory workers have returned in parts."""
        pieces = [p for _, pieces in of.pieces for p in pieces if p.q_heads.start == first_head]
        plan, heads = self._step.merges(tuple(p.group for p in pieces)), pieces[0].q_heads
        all_parts = Partial(*(torch.cat(x) for x in zip(*parts, strict=True)))
        for left, right in plan.levels:
            self._backend.merge(all_parts, left, right)
        stored, new = (Partial(all_parts.o[at], all_parts.lse[at]) for at in (plan.roots, plan.new))
        closed = torch.empty(stored.o.shape, dtype=out.dtype)
        self._backend.close(stored, new, None if of.sinks is None else of.sinks[heads], closed)
        out[plan.rows, heads] = closed


class _Piece(NamedTuple):
    """A memory worker's piece of a layer."""

    group: int
    q_heads: slice
    kv_heads: slice

    @property
    def num_q_heads(self) -> int:
        heads: int = self.q_heads.stop - self.q_heads.start
        return heads


class _Layer:
    """A layer, and who does what of it. New groups are added to ``groups``."""

    def __init__(
        self, shape: LayerShape, index: int, partition: Partition, links: list[MemoryLink], groups: list[Group]
    ) -> None:
        spec, each = AttentionSpec.decode(shape.spec), shape.q_heads // shape.kv_heads
        self.num_q_heads, self.v_dim = shape.q_heads, shape.v_dim
        self.sinks = torch.frombuffer(bytearray(shape.sinks), dtype=FP32) if spec.sinks else None
        self.pieces: list[tuple[MemoryLink, list[_Piece]]] = []
        for link in links:
            mine = list[_Piece]()
            for p in partition.pieces(index, link.worker):
                group = (p.lanes, spec.window)
                if group not in groups:
                    groups.append(group)
                heads = slice(p.head_start * each, p.head_stop * each)
                mine.append(_Piece(groups.index(group), heads, slice(p.head_start, p.head_stop)))
            self.pieces.append((link, mine))


class _GroupRows(NamedTuple):
    """protocol.layout.Layout as indices; nothing of what is empty."""

    num_whole: int
    num_partial: int
    whole: Index
    q: list[Index]
    kv: list[Index]


class _MergeIndex(NamedTuple):
    """protocol.layout.Merges as indices."""

    levels: list[tuple[Tensor, Tensor]]
    roots: Tensor
    new: Tensor
    rows: Tensor


class _Step:
    """The step that messages belong to, and whose rows are whose."""

    def __init__(self, plan: StepPlan, groups: list[Group], stripe: int) -> None:
        self.plan, self._groups, self._stripe = plan, groups, stripe
        self._num_rows = plan.num_rows
        self._layouts: dict[int, Layout] = {}
        self._rows: list[_GroupRows | None] = [None] * len(groups)
        self._merges: dict[tuple[int, ...], _MergeIndex] = {}

    def key(self, kind: Kind, layer: int) -> Key:
        return Key(kind, self.plan.step, self.plan.batch, self.plan.view, layer)

    def rows(self, group: int) -> _GroupRows:
        found = self._rows[group]
        if found is None:
            x = self._layout(group)
            q, kv = ([self._index(n) for n in (x.whole_rows, mine) if n] for mine in (x.q_rows, x.kv_rows))
            whole = self._index(x.whole_rows)
            found = self._rows[group] = _GroupRows(len(x.whole_rows), x.num_partial, whole, q, kv)
        return found

    def merges(self, groups: tuple[int, ...]) -> _MergeIndex:
        if groups not in self._merges:
            x = merges(map(self._layout, groups))
            levels = [(_tensor(left), _tensor(right)) for left, right in x.levels]
            self._merges[groups] = _MergeIndex(levels, *map(_tensor, (x.roots, x.new, x.rows)))
        return self._merges[groups]

    def _layout(self, group: int) -> Layout:
        if group not in self._layouts:
            self._layouts[group] = layout(self.plan.rows, *self._groups[group], self._stripe)
        return self._layouts[group]

    def _index(self, rows: list[int]) -> Index:
        return None if len(rows) == self._num_rows else _tensor(rows)


def _tensor(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _take(
    groups: list[tuple[_Piece, _GroupRows]], cut: int, out: Tensor, found: dict[int, list[Partial]], data: memoryview
) -> None:
    """An O: partial results, up to byte ``cut``, to ``found``; final ones to ``out`` [R, Hq, Dv]."""
    at, dim = 0, out.shape[2]
    partials = tensor_over(data[:cut], FP32) if cut else out
    for piece, rows in groups:
        if rows.num_partial:
            size = rows.num_partial * piece.num_q_heads
            o, lse = partials[at : at + size * dim], partials[at + size * dim : at + size * (dim + 1)]
            at += size * (dim + 1)
            shape = rows.num_partial, piece.num_q_heads
            part = Partial(o.clone().view(*shape, dim), lse.clone().view(shape))
            found.setdefault(piece.q_heads.start, []).append(part)
    at = 0
    finals = tensor_over(data[cut:], out.dtype) if len(data) > cut else out
    for piece, rows in groups:
        if rows.num_whole:
            size = rows.num_whole * piece.num_q_heads * dim
            final, at = finals[at : at + size].view(-1, piece.num_q_heads, dim), at + size
            if rows.whole is None:
                out[:, piece.q_heads] = final
            else:
                out[rows.whole, piece.q_heads] = final
