"""All memory workers as one, for the compute worker: scatters Q, K, V by the partition, gathers O. Hosts send."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.attention import AttentionBackend
from lamina.attention.merge import CHUNK_TOKENS, Partial
from lamina.attention.spec import AttentionSpec
from lamina.buffers import part_of, pick, tensor_over
from lamina.kv.stored import INTEGERS
from lamina.protocol.codec import Group, HeldPiece, Messages, Part, counts, held_pieces, messages
from lamina.protocol.layout import Layout, layout, merges
from lamina.protocol.partition import Partition
from lamina.protocol.placement import Placement
from lamina.protocol.plan import Key, Kind, LayerShape, ProtocolError, StepPlan, encode
from lamina.workers.devices import CPU
from lamina.workers.staging import HostStaging, Staging

from .links import MemoryLink

FP32 = torch.float32
Index = Tensor | None  # rows of a step; None = all of them


class MemoryPool:
    """Attention of memory workers, by messages of the host. A message is on the host before ``q`` or ``kv`` returns:
    its tensors may be overwritten then.
    """

    def __init__(
        self,
        links: list[MemoryLink],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        staging: Staging | None = None,
        parity: MemoryLink | None = None,
    ) -> None:
        """``backend``: of the same name as the memory workers'; it merges partial results. ``staging``: of the device
        where tensors come from and go to; None for the CPU. ``parity``: to who keeps that of all others, which have
        equal runs of heads.
        """
        self._silent = [] if parity is None else [parity]  # links from which no O is due
        self.links = [*links, *self._silent]
        specs = [AttentionSpec.decode(shape.spec) for shape in layers]
        windows = [spec.window for spec in specs]
        groups = list[Group]()
        held = [held_pieces(layers, windows, partition, link.worker, groups) for link in links]
        pieces = list(zip(*held, strict=True)) if links else [()] * len(layers)
        self.layers = [PoolLayer(*x, pieces.index(x[-1])) for x in zip(layers, specs, pieces, strict=True)]
        self._backend, self._staging = backend, staging or HostStaging(CPU)
        self._groups = groups
        self._placement = Placement(partition.num_lanes, partition.stripe * CHUNK_TOKENS, partition.stays)
        self._steps: dict[int, PoolStep] = {}  # of every batch, its last one
        self._ahead: dict[tuple[int, int], PoolStep] = {}  # by batch and step, of those to come
        self._step = PoolStep(StepPlan(step=0, ops=[], rows=[]), self._groups, self._placement)
        self._send_s = 0.0
        self._wait_s = 0.0

    @property
    def send_s(self) -> float:
        """Seconds spent sending plans, Q, K and V."""
        return self._send_s

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for O."""
        return self._wait_s

    def prepare(self, plan: StepPlan) -> None:
        """Lay out the messages of a step that is to be selected."""
        self._ahead[plan.batch, plan.step] = self._laid_out(plan)

    def select(self, plan: StepPlan) -> None:
        """The messages that follow belong to this step."""
        step = self._steps.get(plan.batch)
        if step is None or step.plan is not plan:
            step = self._ahead.pop((plan.batch, plan.step), None)
            if step is None or step.plan is not plan:
                step = self._laid_out(plan)
            self._steps[plan.batch] = step
        self._step = step

    def _laid_out(self, plan: StepPlan) -> PoolStep:
        return PoolStep(plan, self._groups, self._placement, guarded=bool(self._silent))

    def announce(self, plan: StepPlan) -> None:
        """Tell all memory workers of a step to come."""
        key, data = Key.of(Kind.PLAN, plan), encode(plan)
        for link in self.links:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        (q,) = self._staging.down(q)  # waits while the device computes it
        start, step = time.perf_counter(), self._step
        for link, share in zip(self.links, step.shares(self.layers[layer], q.dtype), strict=True):
            if share.q:
                parts = [(pick(q[:, heads, 0], rows), part) for heads, rows, part in share.q]
                link.send_tensors(step.key(Kind.Q, layer), share.messages.q_bytes, parts)
        self._send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        k, v = self._staging.down(k, v)
        start, step = time.perf_counter(), self._step
        for link, share in zip(self.links, step.shares(self.layers[layer], k.dtype), strict=True):
            if share.kv:
                parts = [
                    (pick(x[:, heads, 0], rows), part)
                    for heads, rows, both in share.kv
                    for x, part in zip((k, v), both, strict=True)
                ]
                link.send_tensors(step.key(Kind.KV, layer), share.messages.kv_bytes, folded(parts, share.runs))
        self._send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Gather [R, 1, Hq, Dv] from all memory workers."""
        start, of = time.perf_counter(), self.layers[layer]
        out = self._staging.empty(num_rows, of.num_q_heads, of.v_dim, dtype=dtype)
        cut = self._step.cut_heads(of)
        parts = [x.room(of.v_dim) for x in cut]
        self._gather(layer, out, parts)
        for each, merged in zip(cut, parts, strict=True):
            self._merge(of, each, merged, out)
        self._wait_s += time.perf_counter() - start
        return self._staging.up(out.unsqueeze(1))

    def _gather(self, layer: int, out: Tensor, parts: list[Partial]) -> None:
        """Of each worker what is final to ``out`` [R, Hq, Dv], and what is partial to ``parts``, by cut heads."""
        for link in range(len(self.links)):
            self._receive(link, layer, out, parts)

    def _receive(self, link: int, layer: int, out: Tensor, parts: list[Partial]) -> None:
        share = self._step.shares(self.layers[layer], out.dtype)[link]
        if share.messages.o_bytes:
            fill = partial(_take, share, out, parts)
            self.links[link].receive(self._step.key(Kind.O, layer), fill, share.messages.o_bytes)

    def settle(self) -> None:
        """Raise the refusal of a memory worker from which no O is due; every O that is due has come. Raises
        RefusedError, ProtocolError.
        """
        for link in self._silent:
            if (key := link.poll(0.0)) is not None:
                raise ProtocolError(f"memory worker {link.number}: {key}, of which nothing is due")

    def _merge(self, of: PoolLayer, cut: _CutHeads, parts: Partial, out: Tensor) -> None:
        """Fill in the rows that several memory workers have returned in parts."""
        for left, right in cut.levels:
            self._backend.merge(parts, left, right)
        stored, new = (Partial(parts.o[at], parts.lse[at]) for at in (cut.roots, cut.new))
        closed = torch.empty(stored.o.shape, dtype=out.dtype)
        self._backend.close(stored, new, None if of.sinks is None else of.sinks[cut.heads], closed)
        out[cut.rows, cut.heads] = closed


class PoolLayer:
    """A layer, and the pieces of it that each memory worker has."""

    def __init__(
        self, shape: LayerShape, spec: AttentionSpec, pieces: tuple[tuple[HeldPiece, ...], ...], like: int
    ) -> None:
        """``pieces``: by link; ``like``: the first layer that has the same."""
        self.shape, self.num_q_heads, self.v_dim = shape, shape.q_heads, shape.v_dim
        self.sinks = torch.frombuffer(bytearray(shape.sinks), dtype=FP32) if spec.sinks else None
        self.pieces, self.like = pieces, like


class _GroupRows(NamedTuple):
    """protocol.layout.Layout as indices."""

    whole: Index
    q: Index
    kv: Index


class PoolShare(NamedTuple):
    """A memory worker's share of a layer in a step. Of what has no rows there is nothing."""

    messages: Messages
    q: list[tuple[slice, Index, Part]]  # query heads, rows
    kv: list[tuple[slice, Index, tuple[Part, Part]]]  # KV heads, rows, of K and of V
    partial: list[tuple[int, slice, Part, Part]]  # index of the cut heads, which of their results, o and lse
    final: list[tuple[slice, Index, Part]]  # query heads, rows
    runs: int = 1  # of heads in ``kv``, one behind the other, of which the message has the exclusive or


class _CutHeads(NamedTuple):
    """Query heads of a layer of which several memory workers return parts: protocol.layout.Merges as indices."""

    heads: slice
    shape: tuple[int, int]  # results, heads
    levels: list[tuple[Tensor, Tensor]]
    roots: Tensor
    new: Tensor
    rows: Tensor

    def room(self, v_dim: int) -> Partial:
        """For the results of all workers."""
        return Partial(torch.empty(*self.shape, v_dim, dtype=FP32), torch.empty(self.shape, dtype=FP32))


class PoolStep:
    """The step that messages belong to, and whose rows are whose."""

    def __init__(self, plan: StepPlan, groups: list[Group], placement: Placement, *, guarded: bool = False) -> None:
        """``guarded``: whether somebody keeps the parity of all others."""
        self.plan, self._groups, self._placement, self._guarded = plan, groups, placement, guarded
        self.num_rows = plan.num_rows
        self._layouts: dict[int, Layout] = {}
        self._rows: dict[int, _GroupRows] = {}
        self._shares: dict[int, list[PoolShare]] = {}  # by layer; layers that are alike share one
        self._cut: dict[int, list[_CutHeads]] = {}

    def key(self, kind: Kind, layer: int) -> Key:
        return Key.of(kind, self.plan, layer)

    def shares(self, layer: PoolLayer, dtype: torch.dtype) -> list[PoolShare]:
        """By link."""
        shares = self._shares.get(layer.like)
        if shares is None:
            rows = tuple(counts(self._layout(g)) for g in range(len(self._groups)))
            starts = [0] * len(self.cut_heads(layer))  # of the results of the next worker
            shares = [self._share(layer, x, messages(x, rows, dtype.itemsize), starts) for x in layer.pieces]
            if self._guarded:
                shares.append(_parity_of(shares))
            self._shares[layer.like] = shares
        return shares

    def cut_heads(self, layer: PoolLayer) -> list[_CutHeads]:
        cut = self._cut.get(layer.like)
        if cut is None:
            cut = self._cut[layer.like] = [self._cut_heads(x) for x in self._cut_pieces(layer)]
        return cut

    def _share(self, layer: PoolLayer, pieces: tuple[HeldPiece, ...], x: Messages, starts: list[int]) -> PoolShare:
        share, cut = PoolShare(x, [], [], [], []), [c.heads for c in self.cut_heads(layer)]
        for piece, q, kv, (o, lse), final in zip(pieces, x.q, x.kv, x.partial, x.final, strict=True):
            rows, (q_heads, kv_heads) = self._group_rows(piece.group), _heads(piece)
            of_kv = (rows.whole, (kv[0], kv[1])), (rows.kv, (kv[2], kv[3]))
            share.q.extend((q_heads, at, part) for at, part in zip((rows.whole, rows.q), q, strict=True) if part.there)
            share.kv.extend((kv_heads, at, both) for at, both in of_kv if both[0].there)
            if final.there:
                share.final.append((q_heads, rows.whole, final))
            if o.there:
                index = cut.index(q_heads)
                start, starts[index] = starts[index], starts[index] + o.shape[0]
                share.partial.append((index, slice(start, starts[index]), o, lse))
        return share

    def _cut_pieces(self, layer: PoolLayer) -> Iterable[list[HeldPiece]]:
        """Pieces of the same heads of which something comes back in parts, each list in the order of links."""
        by_head: dict[int, list[HeldPiece]] = {}
        for piece in (p for pieces in layer.pieces for p in pieces):
            if self._layout(piece.group).num_partial:
                by_head.setdefault(piece.head_start, []).append(piece)
        return by_head.values()

    def _cut_heads(self, pieces: list[HeldPiece]) -> _CutHeads:
        layouts = [self._layout(p.group) for p in pieces]
        x, shape = merges(layouts), (sum(each.num_partial for each in layouts), pieces[0].q_heads)
        levels = [(_tensor(left), _tensor(right)) for left, right in x.levels]
        return _CutHeads(_heads(pieces[0])[0], shape, levels, *map(_tensor, (x.roots, x.new, x.rows)))

    def _group_rows(self, group: int) -> _GroupRows:
        rows = self._rows.get(group)
        if rows is None:
            x = self._layout(group)
            rows = self._rows[group] = _GroupRows(*map(self._index, (x.whole_rows, x.q_rows, x.kv_rows)))
        return rows

    def _layout(self, group: int) -> Layout:
        if group not in self._layouts:
            at = self._groups[group]
            self._layouts[group] = layout(self.plan.rows, at.lanes, at.window, self._placement)
        return self._layouts[group]

    def _index(self, rows: list[int]) -> Index:
        return None if len(rows) == self.num_rows else _tensor(rows)


def _parity_of(shares: Sequence[PoolShare]) -> PoolShare:
    """Their K and V one over the other, which lie alike in all their messages; nothing else."""
    only = shares[0].messages._replace(q_bytes=0, partial_bytes=0, final_bytes=0)
    return PoolShare(only, [], [each for share in shares for each in share.kv], [], [], len(shares))


def _heads(piece: HeldPiece) -> tuple[slice, slice]:
    """Query heads and KV heads."""
    start, stop, each = piece.head_start, piece.head_stop, piece.each
    return slice(start * each, stop * each), slice(start, stop)


def _tensor(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _take(share: PoolShare, out: Tensor, parts: list[Partial], data: memoryview) -> None:
    """An O: partial results to ``parts``, by cut heads; final ones to ``out`` [R, Hq, Dv]."""
    cut = share.messages.partial_bytes
    if cut:
        partials = tensor_over(data[:cut], FP32)
        for index, at, o, lse in share.partial:
            parts[index].o[at] = part_of(partials, *o)
            parts[index].lse[at] = part_of(partials, *lse)
    if share.final:
        finals = tensor_over(data[cut:], out.dtype)
        for heads, rows, part in share.final:
            final = part_of(finals, *part)
            if rows is None:
                out[:, heads] = final
            else:
                out[rows, heads] = final


def folded(parts: Sequence[tuple[Tensor, Part]], runs: int) -> Sequence[tuple[Tensor, Part]]:
    """Tensors of so many runs of heads, one run behind the other, and their parts of a message, which are the same for
    each run -> the exclusive or of all runs, in bits of the same dtype.
    """
    if runs == 1:
        return parts
    each = len(parts) // runs
    return [(reduce(_both, (x for x, _ in parts[i::each])), part) for i, (_, part) in enumerate(parts[:each])]


def _both(one: Tensor, other: Tensor) -> Tensor:
    of = INTEGERS[one.itemsize]
    return (one.view(of) ^ other.view(of)).view(one.dtype)
