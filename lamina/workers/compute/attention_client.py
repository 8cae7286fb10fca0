"""The compute worker's channels to memory workers, by host messages: Q, K, V go out by the partition, O comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.config.partition import Partition
from lamina.kv.stored_format import INTEGERS
from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.ops.attention import AttentionBackend
from lamina.ops.attention.merge import CHUNK_TOKENS, Partial
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.codec import (
    LayerGroup,
    LayerMessages,
    RowLayout,
    TensorSpan,
    WorkerPiece,
    count_rows,
    merge_plan,
    messages,
    row_layout,
    worker_pieces,
)
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.step_plan import (
    BindReply,
    BindRequest,
    DevicePathRequest,
    JoinRequest,
    LayerShape,
    MessageKey,
    MessageKind,
    ProtocolError,
    StepPlan,
    decode_bind_reply,
    encode,
)
from lamina.utils.tensor_buffers import part_of, pick, tensor_over
from lamina.workers.device_selection import CPU
from lamina.workers.staging import HostStaging, Staging

FP32 = torch.float32
Index = Tensor | None  # rows of a step; None = all of them


class RefusedError(Exception):
    """A memory worker refused a Bind or a step; the text is its reason."""


class MissingKvError(ChannelError):
    """A peer is alive, but lacks KV that the driver expects there."""


def next_of_epoch(channel: Channel, epoch: int, timeout_s: float) -> Arrival:
    """Return the next message, dropping those of older epochs. Raises ChannelError."""
    while True:
        arrival = channel.wait_signal(timeout_s=timeout_s)
        if MessageKey.unpack(arrival.tag).epoch >= epoch:
            return arrival
        channel.release(arrival)


class MemoryWorkerClient:
    """The channel to one memory worker, and the messages that go over it."""

    def __init__(
        self,
        channel: Channel,
        worker: int,
        timeout_s: float,
        trace: Recorder = NULL_RECORDER,
        number: int | None = None,
    ) -> None:
        """``worker``: its number in the partition. ``number``: its number among all memory workers, if that differs."""
        self.channel = channel
        self.worker = worker
        self.number = worker if number is None else number
        self.timeout_s = timeout_s
        self.trace = trace

    def bind(self, bind: BindRequest) -> BindReply:
        """Send a Bind and return the reply. Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.BIND), encode(bind))

    def join(self, join: JoinRequest) -> BindReply:
        """Send a join and return the reply. Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.JOIN), encode(join))

    def set_device_path(self, direct: DevicePathRequest) -> BindReply:
        """Notify the memory worker if kernels use the channel of the Bind. Raises RefusedError with its reason."""
        return self._request(MessageKey(MessageKind.DIRECT), encode(direct))

    def _request(self, key: MessageKey, data: bytes) -> BindReply:
        self.send(key, data)
        arrival = self.channel.wait_signal(timeout_s=self.timeout_s)
        got, data = MessageKey.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if got.kind == MessageKind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return decode_bind_reply(data)

    def poll(self, timeout_s: float) -> MessageKey | None:
        """Return the key of the next message, whose data is dropped; None if none arrives in time. Raises RefusedError,
        ChannelError.
        """
        try:
            arrival = self.channel.wait_signal(timeout_s=timeout_s)
        except ChannelTimeout:
            return None
        key, data = MessageKey.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if key.kind == MessageKind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return key

    def send(self, key: MessageKey, data: bytes) -> None:
        """Copy ``data`` into the peer's inbox."""
        self.put(key, len(data), lambda message: message.__setitem__(slice(None), data))

    def put(self, key: MessageKey, nbytes: int, fill: Callable[[memoryview], object]) -> None:
        """Send a message of ``nbytes``, which ``fill`` writes into the peer's inbox."""
        slot = self.channel.reserve(nbytes, timeout_s=self.timeout_s)
        fill(slot.data)
        self.channel.put_signal(slot, key.pack())

    def send_plan(self, key: MessageKey, data: bytes) -> None:
        """Send a plan, and record the time as a part of its step."""
        start = self.trace.now()
        self.send(key, data)
        self.trace.add(Event.SEND_PLAN, start, key, -1, self.number, len(data))

    def send_tensors(self, key: MessageKey, nbytes: int, parts: Sequence[tuple[Tensor, TensorSpan]]) -> None:
        """Write tensors directly into the peer's inbox, at their places in the message; they may be strided."""
        start = self.trace.now()

        def fill(data: memoryview) -> None:
            self.trace.add(Event.RESERVE, start, key, key.layer, self.number)
            flat = tensor_over(data, parts[0][0].dtype)
            for tensor, part in parts:
                part_of(flat, *part).copy_(tensor)

        self.put(key, nbytes, fill)
        event = Event.SEND_Q if key.kind == MessageKind.Q else Event.SEND_KV
        self.trace.add(event, start, key, key.layer, self.number, nbytes)

    def receive(self, key: MessageKey, consume: Callable[[memoryview], None], nbytes: int) -> None:
        """Wait for the O that ``key`` names, and pass its bytes to ``consume``. Raises RefusedError, ProtocolError."""
        start = self.trace.now()
        arrival = next_of_epoch(self.channel, key.epoch, self.timeout_s)
        came = self.trace.add(Event.WAIT_O, start, key, key.layer, self.number)
        try:
            got = MessageKey.unpack(arrival.tag)
            if got.kind == MessageKind.REFUSED:
                raise RefusedError(bytes(arrival.data).decode(errors="replace"))
            if got != key or arrival.data.nbytes != nbytes:
                raise ProtocolError(f"memory worker {self.number}: {got} of {arrival.data.nbytes} B in place of {key}")
            consume(arrival.data)
            self.trace.add(Event.RECEIVE_O, came, key, key.layer, self.number, nbytes)
        finally:
            self.channel.release(arrival)


class AttentionClient:
    """The attention on memory workers, by messages in host memory. ``q`` and ``kv`` copy their tensors before they
    return, so the caller may overwrite them.
    """

    def __init__(
        self,
        links: Sequence[MemoryWorkerClient],
        partition: Partition,
        layers: Sequence[LayerShape],
        backend: AttentionBackend,
        staging: Staging | None = None,
        parity: Sequence[MemoryWorkerClient] = (),
    ) -> None:
        """``backend``: merges partial results; it has the same name as the memory workers'. ``staging``: of the device
        that the tensors are on; None for the CPU. ``parity``: the clients of the parity workers of all ranks that
        ``links`` belong to. All workers of a rank have equal runs of heads.
        """
        self._parity_links = [*parity]  # clients of workers that send no O
        self.clients = [*links, *self._parity_links]
        specs = [AttentionSpec.decode(shape.spec) for shape in layers]
        windows = [spec.window for spec in specs]
        groups = list[LayerGroup]()
        held = [worker_pieces(layers, windows, partition, link.worker, groups) for link in links]
        pieces = list(zip(*held, strict=True)) if links else [()] * len(layers)
        self.layers = [ClientLayer(*x, pieces.index(x[-1])) for x in zip(layers, specs, pieces, strict=True)]
        self.backend, self._staging = backend, staging or HostStaging(CPU)
        self._groups = groups
        self.placement = KvPlacement(
            partition.num_kv_shards, partition.stripe_chunks * CHUNK_TOKENS, partition.single_shard
        )
        self._steps: dict[int, ClientStep] = {}  # batch -> its last step
        self._prepared: dict[tuple[int, int], ClientStep] = {}  # (batch, step) -> a step that is still to begin
        self.step = ClientStep(StepPlan(step=0, ops=[], rows=[]), self._groups, self.placement)
        self._send_s = 0.0
        self._wait_s = 0.0

    @property
    def send_s(self) -> float:
        """The seconds spent sending plans, Q, K and V."""
        return self._send_s

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for O."""
        return self._wait_s

    def prepare(self, plan: StepPlan) -> None:
        """Lay out the messages of a step before it begins, while memory workers attend."""
        self._prepared[plan.batch, plan.step] = self._laid_out(plan)

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step that the next messages belong to."""
        step = self._steps.get(plan.batch)
        if step is None or step.plan is not plan:
            step = self._prepared.pop((plan.batch, plan.step), None)
            if step is None or step.plan is not plan:
                step = self._laid_out(plan)
            self._steps[plan.batch] = step
        self.step = step

    def _laid_out(self, plan: StepPlan) -> ClientStep:
        return ClientStep(plan, self._groups, self.placement, num_parity=len(self._parity_links))

    def send_plan(self, plan: StepPlan) -> None:
        """Send the plan of a coming step to all memory workers."""
        key, data = MessageKey.for_step(MessageKind.PLAN, plan), encode(plan)
        for link in self.clients:
            link.send_plan(key, data)

    def q(self, layer: int, q: Tensor) -> None:
        """Send q [R, Hq, 1, D]: to each memory worker the query heads of its KV heads."""
        (q,) = self._staging.to_host(q)  # waits while the device computes it
        start, step = time.perf_counter(), self.step
        for link, share in zip(self.clients, step.shares(self.layers[layer], q.dtype), strict=True):
            if share.q:
                parts = [(pick(q[:, heads, 0], rows), part) for heads, rows, part in share.q]
                link.send_tensors(step.key(MessageKind.Q, layer), share.messages.q_bytes, parts)
        self._send_s += time.perf_counter() - start

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]: to each memory worker its KV heads."""
        k, v = self._staging.to_host(k, v)
        start, step = time.perf_counter(), self.step
        for link, share in zip(self.clients, step.shares(self.layers[layer], k.dtype), strict=True):
            if share.kv:
                parts = [
                    (pick(x[:, heads, 0], rows), part)
                    for heads, rows, both in share.kv
                    for x, part in zip((k, v), both, strict=True)
                ]
                link.send_tensors(
                    step.key(MessageKind.KV, layer), share.messages.kv_bytes, fold_runs(parts, share.runs)
                )
        self._send_s += time.perf_counter() - start

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Receive O [R, 1, Hq, Dv] from all memory workers."""
        start, of = time.perf_counter(), self.layers[layer]
        out = self._staging.empty_host(num_rows, of.num_q_heads, of.v_dim, dtype=dtype)
        cut = self.step.split_heads(of)
        parts = [x.empty_partials(of.v_dim) for x in cut]
        self._gather(layer, out, parts)
        for each, merged in zip(cut, parts, strict=True):
            self._merge(of, each, merged, out)
        self._wait_s += time.perf_counter() - start
        return self._staging.to_device(out.unsqueeze(1))

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Receive O, the only output of an exchange."""
        return (self.o(exchange, num_rows, dtype),)

    def _gather(self, layer: int, out: Tensor, parts: list[Partial]) -> None:
        """Receive every worker's results: final ones go to ``out`` [R, Hq, Dv], partial ones to ``parts``, by split
        heads.
        """
        for link in range(len(self.clients)):
            self._receive(link, layer, out, parts)

    def _receive(self, link: int, layer: int, out: Tensor, parts: list[Partial]) -> None:
        share = self.step.shares(self.layers[layer], out.dtype)[link]
        if share.messages.o_bytes:
            fill = partial(_take, share, out, parts)
            self.clients[link].receive(self.step.key(MessageKind.O, layer), fill, share.messages.o_bytes)

    def check_errors(self) -> None:
        """Raise the refusal of a memory worker that sends no O; all expected O have arrived before. Raises
        RefusedError, ProtocolError.
        """
        for link in self._parity_links:
            if (key := link.poll(0.0)) is not None:
                raise ProtocolError(f"memory worker {link.number}: {key}, which should send nothing")

    def _merge(self, of: ClientLayer, cut: _SplitHeads, parts: Partial, out: Tensor) -> None:
        """Merge the partial results of several memory workers and write these rows of ``out``."""
        for left, right in cut.levels:
            self.backend.merge(parts, left, right)
        stored, new = (Partial(parts.o[at], parts.lse[at]) for at in (cut.roots, cut.new))
        closed = torch.empty(stored.o.shape, dtype=out.dtype)
        self.backend.merge_output(stored, new, None if of.sinks is None else of.sinks[cut.heads], closed)
        out[cut.rows, cut.heads] = closed


class ClientLayer:
    """A layer, and the pieces of it that each memory worker has."""

    def __init__(
        self, shape: LayerShape, spec: AttentionSpec, pieces: tuple[tuple[WorkerPiece, ...], ...], equal_layer: int
    ) -> None:
        """``pieces``: by memory worker. ``equal_layer``: the first layer that has the same pieces."""
        self.shape, self.num_q_heads, self.v_dim = shape, shape.q_heads, shape.v_dim
        self.sinks = torch.frombuffer(bytearray(shape.sinks), dtype=FP32) if spec.sinks else None
        self.pieces, self.equal_layer = pieces, equal_layer


class _GroupIndices(NamedTuple):
    """A RowLayout of protocol.codec as indices."""

    whole: Index
    q: Index
    kv: Index


class WorkerShare(NamedTuple):
    """A memory worker's share of a layer in a step. Parts without rows are left out."""

    messages: LayerMessages
    q: list[tuple[slice, Index, TensorSpan]]  # query heads, rows
    kv: list[tuple[slice, Index, tuple[TensorSpan, TensorSpan]]]  # KV heads, rows, of K and of V
    partial: list[
        tuple[int, slice, TensorSpan, TensorSpan]
    ]  # index of the cut heads, which of their results, o and lse
    final: list[tuple[slice, Index, TensorSpan]]  # query heads, rows
    runs: int = 1  # runs of heads in ``kv``, one after another, whose exclusive or is sent


class _SplitHeads(NamedTuple):
    """The query heads of which several memory workers return partial results: a MergePlan as indices."""

    heads: slice
    shape: tuple[int, int]  # results, heads
    levels: list[tuple[Tensor, Tensor]]
    roots: Tensor
    new: Tensor
    rows: Tensor

    def empty_partials(self, v_dim: int) -> Partial:
        """Allocate the partial results of all workers."""
        return Partial(torch.empty(*self.shape, v_dim, dtype=FP32), torch.empty(self.shape, dtype=FP32))


class ClientStep:
    """The step that messages belong to, and the rows of each memory worker."""

    def __init__(
        self, plan: StepPlan, groups: list[LayerGroup], placement: KvPlacement, *, num_parity: int = 0
    ) -> None:
        """``num_parity``: parity workers. One of several keeps the K and V of every ``num_parity``-th worker."""
        self.plan, self._groups, self.placement, self._num_parity = plan, groups, placement, num_parity
        self.num_rows = plan.num_rows
        self._layouts: dict[int, RowLayout] = {}
        self._rows: dict[int, _GroupIndices] = {}
        self._shares: dict[int, list[WorkerShare]] = {}  # by layer; equal layers share an entry
        self._cut: dict[int, list[_SplitHeads]] = {}

    def key(self, kind: MessageKind, layer: int) -> MessageKey:
        return MessageKey.for_step(kind, self.plan, layer)

    def shares(self, layer: ClientLayer, dtype: torch.dtype) -> list[WorkerShare]:
        """Return the layer's share of each memory worker, in order; those of parity workers are last."""
        shares = self._shares.get(layer.equal_layer)
        if shares is None:
            rows = tuple(count_rows(self._layout(g)) for g in range(len(self._groups)))
            starts = [0] * len(self.split_heads(layer))  # the start of the next worker's results
            shares = [self._share(layer, x, messages(x, rows, dtype.itemsize), starts) for x in layer.pieces]
            shares += [_parity_of(shares[rank :: self._num_parity]) for rank in range(self._num_parity)]
            self._shares[layer.equal_layer] = shares
        return shares

    def split_heads(self, layer: ClientLayer) -> list[_SplitHeads]:
        cut = self._cut.get(layer.equal_layer)
        if cut is None:
            cut = self._cut[layer.equal_layer] = [self._cut_heads(x) for x in self._cut_pieces(layer)]
        return cut

    def _share(
        self, layer: ClientLayer, pieces: tuple[WorkerPiece, ...], x: LayerMessages, starts: list[int]
    ) -> WorkerShare:
        share, cut = WorkerShare(x, [], [], [], []), [c.heads for c in self.split_heads(layer)]
        for piece, q, kv, (o, lse), final in zip(pieces, x.q, x.kv, x.partial, x.final, strict=True):
            rows, (q_heads, kv_heads) = self._group_rows(piece.group), _heads(piece)
            of_kv = (rows.whole, (kv[0], kv[1])), (rows.kv, (kv[2], kv[3]))
            share.q.extend(
                (q_heads, at, part) for at, part in zip((rows.whole, rows.q), q, strict=True) if part.is_present
            )
            share.kv.extend((kv_heads, at, both) for at, both in of_kv if both[0].is_present)
            if final.is_present:
                share.final.append((q_heads, rows.whole, final))
            if o.is_present:
                index = cut.index(q_heads)
                start, starts[index] = starts[index], starts[index] + o.shape[0]
                share.partial.append((index, slice(start, starts[index]), o, lse))
        return share

    def _cut_pieces(self, layer: ClientLayer) -> Iterable[list[WorkerPiece]]:
        """Yield pieces of the same heads that return partial results, each list in the order of memory workers."""
        by_head: dict[int, list[WorkerPiece]] = {}
        for piece in (p for pieces in layer.pieces for p in pieces):
            if self._layout(piece.group).num_partial:
                by_head.setdefault(piece.head_start, []).append(piece)
        return by_head.values()

    def _cut_heads(self, pieces: list[WorkerPiece]) -> _SplitHeads:
        layouts = [self._layout(p.group) for p in pieces]
        x, shape = merge_plan(layouts), (sum(each.num_partial for each in layouts), pieces[0].q_heads)
        levels = [(_tensor(left), _tensor(right)) for left, right in x.levels]
        return _SplitHeads(_heads(pieces[0])[0], shape, levels, *map(_tensor, (x.roots, x.new, x.rows)))

    def _group_rows(self, group: int) -> _GroupIndices:
        rows = self._rows.get(group)
        if rows is None:
            x = self._layout(group)
            rows = self._rows[group] = _GroupIndices(*map(self._index, (x.whole_rows, x.q_rows, x.kv_rows)))
        return rows

    def _layout(self, group: int) -> RowLayout:
        if group not in self._layouts:
            at = self._groups[group]
            self._layouts[group] = row_layout(self.plan.rows, at.kv_shards, at.window, self.placement)
        return self._layouts[group]

    def _index(self, rows: list[int]) -> Index:
        return None if len(rows) == self.num_rows else _tensor(rows)


def _parity_of(shares: Sequence[WorkerShare]) -> WorkerShare:
    """Return the parity worker's share: K and V of all workers, which have the same layout in their messages, combined
    in one.
    """
    only = shares[0].messages._replace(q_bytes=0, partial_bytes=0, final_bytes=0)
    return WorkerShare(only, [], [each for share in shares for each in share.kv], [], [], len(shares))


def _heads(piece: WorkerPiece) -> tuple[slice, slice]:
    """Return the query heads and the KV heads of a piece."""
    start, stop, each = piece.head_start, piece.head_stop, piece.q_heads_per_kv_head
    return slice(start * each, stop * each), slice(start, stop)


def _tensor(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _take(share: WorkerShare, out: Tensor, parts: list[Partial], data: memoryview) -> None:
    """Copy an O: partial results to ``parts``, by split heads, final ones to ``out`` [R, Hq, Dv]."""
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


def fold_runs(parts: Sequence[tuple[Tensor, TensorSpan]], runs: int) -> Sequence[tuple[Tensor, TensorSpan]]:
    """Return the exclusive or of ``runs`` runs of heads, bit by bit, in the same dtype. ``parts``: tensors with their
    places in a message, one run after another; the places are the same in each run.
    """
    if runs == 1:
        return parts
    each = len(parts) // runs
    return [(reduce(_both, (x for x, _ in parts[i::each])), part) for i, (_, part) in enumerate(parts[:each])]


def _both(one: Tensor, other: Tensor) -> Tensor:
    of = INTEGERS[one.itemsize]
    return (one.view(of) ^ other.view(of)).view(one.dtype)
