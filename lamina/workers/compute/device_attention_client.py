"""The compute worker's side of layer messages that go from device to device (workers.device_transport)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.config.partition import Partition
from lamina.config.resolve import LayerPath
from lamina.netstack import Channel, ChannelError
from lamina.protocol.codec import RowCounts, WorkerPiece, messages, worker_pieces
from lamina.protocol.step_plan import BindReply, DevicePathRequest, LayerShape, MessageKey, MessageKind, StepPlan
from lamina.workers.device_transport import DESCRIPTOR_WORDS, DeviceTransport, FusedMessages, message_descriptors
from lamina.workers.staging import Staging

from .attention_client import AttentionClient, MemoryWorkerClient

DESCRIPTORS_PER_SHARE = 3  # one each for Q, for K and V, and for O


class _DeviceShare(NamedTuple):
    """One memory worker's share of a layer. ``descriptor``: the index of Q's descriptor; those of K and V, and of O,
    follow.
    """

    transport: DeviceTransport
    descriptor: int
    piece: WorkerPiece
    q_heads: slice
    kv_heads: slice


class _FusedLayer(NamedTuple):
    """The launches of a layer, for all memory workers."""

    q: FusedMessages
    kv: FusedMessages
    o: FusedMessages


class DeviceAttentionClient:
    """The attention on memory workers whose devices exchange messages with this one. Their partition has whole heads.
    If its transports are ``recordable``, so are ``q`` and ``kv``: what differs between steps is in the descriptors.
    """

    def __init__(
        self,
        pool: AttentionClient,
        wires: Sequence[DeviceTransport],
        partition: Partition,
        layers: Sequence[LayerShape],
        itemsize: int,
        staging: Staging,
    ) -> None:
        """``pool``: sends plans to the memory workers of ``wires``. ``itemsize``: bytes of an element in messages."""
        self._pool, self.transports, self._staging = pool, wires, staging
        self.recordable = all(wire.recordable for wire in wires)
        self._layers, self._itemsize = layers, itemsize
        windows = [0] * len(layers)  # every worker has all rows, whatever their windows
        held = [worker_pieces(layers, windows, partition, link.worker, []) for link in pool.clients]
        self._shares, num_lines = [list[_DeviceShare]() for _ in layers], 0
        for shares, by_link in zip(self._shares, zip(*held, strict=True), strict=True):
            for wire, pieces in zip(wires, by_link, strict=True):
                for piece in pieces:
                    shares.append(_share(piece, wire, num_lines))
                    num_lines += DESCRIPTORS_PER_SHARE
        self._descriptors = torch.zeros(num_lines, DESCRIPTOR_WORDS, dtype=torch.int64, device=staging.device)
        fuse = {wire.fuses_with for wire in wires}
        self._fused = list[_FusedLayer]()  # by layer; none if each message is a launch of its own
        one_each = all(len({share.transport for share in shares}) == len(shares) for shares in self._shares)
        if len(fuse) == 1 and None not in fuse and one_each:
            self._fused += map(self._fused_layer, layers, self._shares)
        self._plan: StepPlan | None = None  # the plan of these descriptors
        # Batch -> its last plan, and its descriptors on the host.
        self._announced: dict[int, tuple[StepPlan, Tensor]] = {}
        self.wait_s = 0.0  # always 0: the host waits for no message, only for its device

    @property
    def send_s(self) -> float:
        """The seconds spent sending plans. Devices send the rest."""
        return self._pool.send_s

    def send_plan(self, plan: StepPlan) -> None:
        """Send the plan of a coming step."""
        self._pool.send_plan(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Do nothing: descriptors count the messages of all earlier steps."""

    def begin_step(self, plan: StepPlan) -> None:
        """Copy this step's descriptors to the device: the next messages belong to it."""
        if plan is self._plan:
            return
        self._plan = plan
        known = self._announced.get(plan.batch)
        if known is None or known[0] is not plan:
            known = self._announced[plan.batch] = plan, message_descriptors(self._staging, self._messages(plan))
        self._descriptors.copy_(self._staging.to_device(known[1]))

    def q(self, layer: int, q: Tensor) -> None:
        """Send q [R, Hq, 1, D]. R may be more than the step's rows; the rest is not sent."""
        if self._fused:
            self._fused[layer].q.send(_rows(q))
            return
        for share in self._shares[layer]:
            share.transport.send(
                MessageKind.Q, self._descriptors[share.descriptor], q[:, share.q_heads, 0].contiguous()
            )

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]. R may be more than the step's rows; the rest is not sent."""
        if self._fused:
            self._fused[layer].kv.send(_rows(k), _rows(v))
            return
        for share in self._shares[layer]:
            parts = (x[:, share.kv_heads, 0].contiguous() for x in (k, v))
            share.transport.send(MessageKind.KV, self._descriptors[share.descriptor + 1], *parts)

    @contextmanager
    def launching(self) -> Iterator[bool]:
        """Surround the launch of a graph that holds ``q`` or ``kv``. Yields False if it must not be launched."""
        with ExitStack() as held:
            yield all(held.enter_context(wire.launching()) for wire in self.transports)

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return O [R, 1, Hq, Dv]. The device receives it before later work; the host does not wait."""
        shape = self._layers[layer]
        out = torch.empty(num_rows, 1, shape.q_heads, shape.v_dim, dtype=dtype, device=self._staging.device)
        if self._fused:
            self._fused[layer].o.receive(out)
            return out
        for share in self._shares[layer]:
            part = out[:, :, share.q_heads]
            target = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            share.transport.receive(MessageKind.O, self._descriptors[share.descriptor + 2], target)
            if target is not part:
                part.copy_(target)
        return out

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Receive O, the only output of an exchange."""
        return (self.o(exchange, num_rows, dtype),)

    def check_errors(self) -> None:
        """Raise errors of messages; RefusedError if a memory worker closed its channel because it refused a plan."""
        try:
            for wire in self.transports:
                wire.check_errors()
        except ChannelError:
            for link in self._pool.clients:
                with suppress(ChannelError):
                    link.poll(0.0)
            raise

    def _fused_layer(self, shape: LayerShape, shares: Sequence[_DeviceShare]) -> _FusedLayer:
        """Return the layer's messages, each of which is a launch for all memory workers."""
        q_bytes, k_bytes, v_bytes = (n * self._itemsize for n in (shape.qk_dim, shape.qk_dim, shape.v_dim))
        heads = [(x.q_heads, x.kv_heads) for x in shares]
        spans = {
            MessageKind.Q: [[_span(q, q_bytes)] for q, _ in heads],
            MessageKind.KV: [[_span(kv, k_bytes), _span(kv, v_bytes)] for _, kv in heads],
            MessageKind.O: [[_span(q, v_bytes)] for q, _ in heads],
        }
        fused = list[FusedMessages]()
        for more, (kind, each) in enumerate(spans.items()):
            lines = (self._descriptors[share.descriptor + more] for share in shares)
            table = [(share.transport, line, x) for share, line, x in zip(shares, lines, each, strict=True)]
            fused.append(FusedMessages(kind, table, self._staging))
        return _FusedLayer(*fused)

    def _messages(self, plan: StepPlan) -> list[tuple[MessageKey, int, int]]:
        rows, sizes = (RowCounts(plan.num_rows),), list[tuple[MessageKey, int, int]]()
        for layer, shares in enumerate(self._shares):
            key = MessageKey.for_step(MessageKind.Q, plan, layer)
            for share in shares:
                x = messages((share.piece,), rows, self._itemsize)
                _, v, *_ = x.kv[0]
                k_bytes = v.start * self._itemsize
                sizes.append((key, x.q_bytes, 0))
                sizes.append((key._replace(kind=MessageKind.KV), k_bytes, x.kv_bytes - k_bytes))
                sizes.append((key._replace(kind=MessageKind.O), x.o_bytes, 0))
        return sizes


def _rows(x: Tensor) -> Tensor:
    """Return x [R, H, 1, D] as [R, H, D] whose rows are contiguous, though not one after another."""
    rows = x[:, :, 0]
    dense = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if dense else rows.contiguous()


def _span(heads: slice, head_bytes: int) -> range:
    """Return the bytes of these heads in a row."""
    return range(heads.start * head_bytes, heads.stop * head_bytes)


def _share(piece: WorkerPiece, transport: DeviceTransport, line: int) -> _DeviceShare:
    q_heads = slice(piece.head_start * piece.q_heads_per_kv_head, piece.head_stop * piece.q_heads_per_kv_head)
    return _DeviceShare(transport, line, piece, q_heads, slice(piece.head_start, piece.head_stop))


class Connector(Protocol):
    """Opens a channel to one memory worker: for kernels to send on if they can, or for hosts."""

    def __call__(self, *, kernels: bool) -> Channel: ...


def open_transports(
    links: Sequence[MemoryWorkerClient],
    connects: Sequence[Connector],
    bounds: Sequence[BindReply],
    staging: Staging,
    wait_s: float,
    path: LayerPath,
    *,
    graphs: bool,
) -> list[DeviceTransport]:
    """Open the device transports to memory workers over the channels of ``links``; none if ``path`` is another one.

    Each worker whose reply in ``bounds`` offers the device path gets a second channel by ``connects``, for messages of
    hosts; its link uses that from now on. The first channel then serves kernels, or is closed. ``graphs``: if memory
    workers are to record their rounds. Raises ChannelError, RefusedError.
    """
    wires, wanted = list[DeviceTransport](), path is LayerPath.DEVICE
    for link, connect, bound in zip(links, connects, bounds, strict=True):
        if bound.device_path:
            first, link.channel = link.channel, connect(kernels=False)
            link.set_device_path(DevicePathRequest(wait_s=wait_s if wanted else 0.0, graphs=graphs))
            if wanted:
                wires.append(DeviceTransport(first, staging, wait_s))
            else:
                first.close()
    return wires
