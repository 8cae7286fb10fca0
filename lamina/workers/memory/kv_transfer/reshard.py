"""Moving KV from one memory worker to another, over channels of its own, while no worker attends it.

All workers move the layers in order, and of each layer the strips that protocol.reshard lists. A message has some
blocks of a strip: K and V of its heads, and their scales if there are any. Its tag names it, and has a checksum. After
a worker has received its whole part of a layer from another one, it confirms that. Only then does the sender discard
its own layer. So a worker has its KV, and at most one layer more.
"""

from __future__ import annotations

import enum
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.kv.stored_format import INTEGERS, is_scaled
from lamina.netstack import Channel, ChannelTimeout, Geometry, NoResource, Terms
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.protocol.reshard import HeadTransfer, HeadTransfers, RebuildKv, Reshard
from lamina.protocol.step_plan import ProtocolError
from lamina.utils.tensor_buffers import tensor_over
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore, layer_window

SLOTS = 8
SLOT_BYTES = 1 << 20
POLL_S = 0.0005  # seconds of a wait at one channel, while other channels may have messages, too
_TAG = struct.Struct(f"<IIII{CHECKSUM_BYTES}s")


class TransferKind(enum.IntEnum):
    BLOCKS = 1
    STORED = 2  # all blocks of a layer have arrived
    TABLES = 3  # the blocks of sequences; see workers.memory.kv_transfer.parity_rebuild


class TransferTag(NamedTuple):
    """The name of a message: the ``part``-th run of blocks of a strip of a layer."""

    kind: int
    layer: int
    strip: int = 0
    part: int = 0
    checksum: bytes = bytes(CHECKSUM_BYTES)  # checksum of the message's bytes

    def pack(self) -> bytes:
        return _TAG.pack(*self)


class TransferPart(NamedTuple):
    """The blocks of one strip that form one message, or one copy."""

    tag: TransferTag
    strip: HeadTransfer
    low: int
    high: int


class KvTransfer:
    """One worker's part in one reshard. ``old``: the store that it sends from. ``new``: the store that it fills."""

    def __init__(
        self,
        order: Reshard | RebuildKv,
        old: KvStore | None,
        new: KvStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ProtocolError if this worker has no KV that it should send."""
        store = old or new
        if store is None or (order.own_index in order.sources and old is None):
            raise ProtocolError("a memory worker without KV cannot send any")
        self._order, self._store, self._old, self._new = order, store, old, new
        self._clock = clock
        self._of_layer = self._strips([layer_window(shape) for shape in store.bind_request.layers])
        self._links: dict[int, Channel] = {}
        self._ids: dict[tuple[int, bool], Tensor] = {}  # (id of a strip, if in the new store) -> its blocks
        self.nbytes = 0  # received

    @property
    def num_layers(self) -> int:
        """The number of layers, which are moved one after another."""
        return len(self._store.bind_request.layers)

    def connect(self, fabric: EpochFabric, listener: EpochListener) -> None:
        """Connect to all workers to or from which this one sends KV. Raises ChannelError, ProtocolError."""
        order, peers = self._order, self._peers()
        name = order.peers[order.own_index].name
        inbox = Geometry(slots=SLOTS, slot_bytes=max(SLOT_BYTES, self._largest_block()))
        for peer in sorted(p for p in peers if p < order.own_index):
            there = order.peers[peer]
            terms = Terms(outbound=inbox, inbound=inbox, name=name, peer=there.name, key=there.key)
            self._links[peer] = fabric.connect(there.url, terms, timeout_s=order.timeout_s)
        due = {order.peers[p].name: p for p in peers if p > order.own_index}
        while due:
            channel = fabric.accept(listener, order.timeout_s)
            if channel.peer_name not in due:
                raise ProtocolError(f"{channel.peer_name!r} has connected, and sends and receives nothing")
            self._links[due.pop(channel.peer_name)] = channel

    def transfer_layer(self, layer: int) -> None:
        """Send and receive all of this worker's KV of a layer; then the old store's layer is not needed any more.
        Raises ChannelError, ProtocolError.
        """
        own_parts, out, due = (
            list[TransferPart](),
            dict[int, deque[TransferPart | TransferTag]](),
            dict[int, deque[TransferPart | TransferTag]](),
        )
        for peer in self._links:
            out[peer], due[peer] = deque(), deque()
        for number, strip in enumerate(self._of_layer(layer)):
            giver, taker = self._order.sources[strip.source], self._order.targets[strip.target]
            runs = self._runs(layer, number, strip)
            if giver == taker == self._order.own_index:
                own_parts += runs
            elif giver == self._order.own_index:
                out[taker] += runs
            elif taker == self._order.own_index:
                due[giver] += runs
        for run in own_parts:
            self._put(run, self._gather(run, [None] * len(list(self._shapes(layer)))))
        self._exchange(layer, out, due)

    def _strips(self, windows: Sequence[int]) -> Callable[[int], Sequence[HeadTransfer]]:
        """Return a function that lists the transfers of a layer, in the same order on all workers. ``windows``:
        attention windows of the layers.
        """
        order, size = self._order, self._store.bind_request.kv.block_size
        assert isinstance(order, Reshard)
        return HeadTransfers(order.before, order.after, windows, order.surviving, size).of_layer

    def _exchange(
        self,
        layer: int,
        out: Mapping[int, deque[TransferPart | TransferTag]],
        due: Mapping[int, deque[TransferPart | TransferTag]],
    ) -> None:
        """Send and receive until nothing is due, including confirmations that sent blocks are stored."""
        stored = TransferTag(TransferKind.STORED, layer)
        confirm = {peer for peer, runs in due.items() if runs}
        for peer, runs in out.items():
            if runs:
                due[peer].append(stored)
        moved_at, moved = self._clock(), True
        while any(out.values()) or any(due.values()):
            wait_s, moved = 0.0 if moved else POLL_S, False
            for peer, channel in self._links.items():
                moved |= self._send_next(channel, out[peer])
                moved |= self._take_next(channel, due[peer], wait_s)
                if peer in confirm and not any(isinstance(x, TransferPart) for x in due[peer]):
                    confirm.discard(peer)
                    out[peer].append(stored)
            now = self._clock()
            moved_at = now if moved else moved_at
            if now - moved_at > self._order.timeout_s:
                silent = [self._order.peers[p].name for p in self._links if due[p] or out[p]]
                raise ChannelTimeout(f"layer {layer}: no KV goes between here and {', '.join(silent)}")

    def _send_next(self, channel: Channel, out: deque[TransferPart | TransferTag]) -> bool:
        if not out:
            return False
        nbytes = self._nbytes(out[0]) if isinstance(out[0], TransferPart) else 0
        try:
            slot = channel.reserve(nbytes)
        except NoResource:
            return False
        item = out.popleft()
        if isinstance(item, TransferPart):
            self._gather(item, self._views(item, slot.data))
            channel.put_signal(slot, item.tag._replace(checksum=checksum(slot.data)).pack())
        else:
            channel.put_signal(slot, item.pack())
        return True

    def _take_next(self, channel: Channel, due: deque[TransferPart | TransferTag], wait_s: float) -> bool:
        if not due:
            return False
        try:
            arrival = channel.wait_signal(timeout_s=wait_s)
        except ChannelTimeout:
            return False
        item = due.popleft()
        tag = item.tag if isinstance(item, TransferPart) else item
        try:
            nbytes = self._nbytes(item) if isinstance(item, TransferPart) else 0
            expected = tag._replace(checksum=checksum(arrival.data)) if nbytes else tag
            if bytes(arrival.tag[: _TAG.size]) != expected.pack() or arrival.data.nbytes != nbytes:
                raise ProtocolError(f"the message of {channel.peer_name} is damaged, or is not {tag} of {nbytes} bytes")
            if isinstance(item, TransferPart):
                self._put(item, self._views(item, arrival.data))
                self.nbytes += nbytes
        finally:
            channel.release(arrival)
        return True

    # The blocks of a strip, in stores and in messages.
    def _runs(self, layer: int, number: int, strip: HeadTransfer) -> list[TransferPart]:
        blocks = sum(map(len, strip.blocks.values()))
        step = max(1, SLOT_BYTES // self._block_bytes(layer, strip.head_stop - strip.head_start))
        lows = range(0, blocks, step)
        return [
            TransferPart(TransferTag(TransferKind.BLOCKS, layer, number, part), strip, low, min(low + step, blocks))
            for part, low in enumerate(lows)
        ]

    def _shapes(self, layer: int) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Yield the shape and dtype of K, V and their scales in a block of one head."""
        shape, store = self._store.bind_request.layers[layer], self._store
        size, kind = store.bind_request.kv.block_size, INTEGERS[store.kv_dtype.itemsize]
        yield (size, shape.qk_dim), kind
        yield (size, shape.v_dim), kind
        if is_scaled(store.kv_dtype):
            yield (size,), torch.int32
            yield (size,), torch.int32

    def _block_bytes(self, layer: int, heads: int) -> int:
        return heads * sum(kind.itemsize * prod(shape) for shape, kind in self._shapes(layer))

    def _largest_block(self) -> int:
        return max(self._block_bytes(i, shape.kv_heads) for i, shape in enumerate(self._store.bind_request.layers))

    def _nbytes(self, run: TransferPart) -> int:
        return (run.high - run.low) * self._block_bytes(run.tag.layer, run.strip.head_stop - run.strip.head_start)

    def _views(self, run: TransferPart, data: memoryview) -> list[Tensor]:
        """Return a message as tensors: [B, H, block_size, D], and so on."""
        flat, at, tensors = tensor_over(data, torch.uint8), 0, list[Tensor]()
        lead = run.high - run.low, run.strip.head_stop - run.strip.head_start
        for shape, kind in self._shapes(run.tag.layer):
            nbytes = prod((*lead, *shape)) * kind.itemsize
            tensors.append(flat[at : at + nbytes].view(kind).view(*lead, *shape))
            at += nbytes
        return tensors

    def _gather(self, run: TransferPart, into: Sequence[Tensor | None]) -> list[Tensor]:
        assert self._old is not None
        stored, ids = (
            self._place(self._old, run, run.strip.source_piece),
            self._block_ids(self._old, run, run.strip.source_piece),
        )
        return [torch.index_select(x, 0, ids, out=out) for x, out in zip(stored, into, strict=True)]

    def _put(self, run: TransferPart, blocks: Sequence[Tensor]) -> None:
        assert self._new is not None
        stored, ids = (
            self._place(self._new, run, run.strip.target_piece),
            self._block_ids(self._new, run, run.strip.target_piece),
        )
        for part, came in zip(stored, blocks, strict=True):
            part.numpy()[ids.numpy()] = came.numpy()  # ten times as fast as torch, which copies number by number

    def _block_ids(self, store: KvStore, run: TransferPart, piece: int) -> Tensor:
        """Return the block ids [B] int64. Equal layers have the same strips, and so the same blocks."""
        key = id(run.strip), store is self._new
        if key not in self._ids:
            tables, group = store.tables, store.pieces[run.tag.layer][piece].group
            ids = [tables.block_ids(group, s, n, n + 1)[0] for s, of in run.strip.blocks.items() for n in of]
            self._ids[key] = torch.tensor(ids, dtype=torch.int64)
        return self._ids[key][run.low : run.high]

    def _peers(self) -> set[int]:
        me, peers = self._order.own_index, set[int]()
        for layer in range(len(self._store.bind_request.layers)):
            for strip in self._of_layer(layer):
                pair = {self._order.sources[strip.source], self._order.targets[strip.target]}
                peers |= pair if me in pair else set()
        return peers - {me}

    def _place(self, store: KvStore, run: TransferPart, piece: int) -> list[Tensor]:
        """Return the strip's heads in all blocks of a piece, as integers: [N + 1, H, block_size, D], and so on."""
        first = store.pieces[run.tag.layer][piece].head_start
        return as_integers(store, run.tag.layer, piece, run.strip.head_start - first, run.strip.head_stop - first)


def as_integers(store: KvStore, layer: int, piece: int, start: int, stop: int) -> list[Tensor]:
    """Return the heads ``start .. stop`` of all blocks of a piece, as integers: [N + 1, H, block_size, D], and so
    on.
    """
    kv = store.layers[layer][piece].kv
    return [x.view(INTEGERS[x.itemsize]).narrow(1, start, stop - start) for x in (kv.k, kv.v, *(kv.scales or ()))]
