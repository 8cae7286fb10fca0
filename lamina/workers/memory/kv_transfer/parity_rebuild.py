"""Rebuilding the KV of a lost memory worker as the exclusive or of all other workers' KV, one of which is the parity.

Each worker sends its KV of each layer to the worker that replaces the lost one, like KV of a reshard
(workers.memory.kv_transfer.reshard). The order of arrival does not matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from lamina.config.partition import by_head
from lamina.netstack.checksum import checksum
from lamina.protocol.reshard import HeadTransfer, HeadTransfers
from lamina.protocol.step_plan import ProtocolError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore

from .reshard import SLOT_BYTES, KvTransfer, TransferKind, TransferPart, TransferTag, as_integers


class ParityRebuilder(KvTransfer):
    """The part of one worker in one RebuildKv. Workers have one piece of each layer, of equal sizes, and equally many
    blocks.
    """

    def connect(self, fabric: EpochFabric, listener: EpochListener) -> None:
        """Connect to all workers to or from which this one sends KV. The first sender also sends the sequences' block
        tables. Raises ChannelError, ProtocolError, PlanError.
        """
        super().connect(fabric, listener)
        (first, *_), (taker,) = self._order.sources, self._order.targets
        if self._order.own_index == first and self._old is not None and taker in self._links:
            self._send_tables(taker, self._old)
        if self._new is not None:
            self._take_tables(first, self._new)

    def _send_tables(self, taker: int, store: KvStore) -> None:
        data, channel = store.tables.surviving_block_ids(self._order.surviving).tobytes(), self._links[taker]
        for part, low in enumerate(range(0, len(data), SLOT_BYTES)):
            some = data[low : low + SLOT_BYTES]
            slot = channel.reserve(len(some), timeout_s=self._order.timeout_s)
            slot.data[:] = some
            channel.put_signal(slot, TransferTag(TransferKind.TABLES, 0, 0, part, checksum(slot.data)).pack())

    def _take_tables(self, giver: int, store: KvStore) -> None:
        ids, keep = array("q"), self._order.surviving
        nbytes, part, data = store.tables.num_surviving_blocks(keep) * ids.itemsize, 0, bytearray()
        while len(data) < nbytes:
            arrival = self._links[giver].wait_signal(timeout_s=self._order.timeout_s)
            tag = TransferTag(TransferKind.TABLES, 0, 0, part, checksum(arrival.data)).pack()
            if bytes(arrival.tag[: len(tag)]) != tag or arrival.data.nbytes != min(SLOT_BYTES, nbytes - len(data)):
                raise ProtocolError(f"the message of {self._links[giver].peer_name} is damaged, or is no block table")
            data += arrival.data
            self._links[giver].release(arrival)
            part += 1
        ids.frombytes(bytes(data))
        store.tables.restore(keep, ids)

    def transfer_layer(self, layer: int) -> None:
        """Send and receive all of this worker's KV of a layer. Raises ChannelError, ProtocolError."""
        strips = self._of_layer(layer)
        for run in self._runs(layer, 0, strips[0]) if self._new is not None and strips else []:
            assert self._new is not None
            ids = self._block_ids(self._new, run, 0).numpy()
            for part in self._place(self._new, run, 0):
                part.numpy()[ids] = 0
        super().transfer_layer(layer)

    def _peers(self) -> set[int]:
        (taker,) = self._order.targets
        return set(self._order.sources) if self._order.own_index == taker else {taker}

    def _strips(self, windows: Sequence[int]) -> Callable[[int], Sequence[HeadTransfer]]:
        """Return a function that lists the transfers of a layer: the same blocks from each sender, each block once. A
        block sent twice would cancel itself. Heads are counted from a worker's first one. The receiver has its block
        tables after ``connect``.
        """
        heads = [piece.kv_heads for (piece,) in self._store.pieces]
        whole = by_head(heads, [1.0], 0)
        ours = HeadTransfers(whole, whole, windows, self._order.surviving, self._store.bind_request.kv.block_size)
        known = dict[int, list[HeadTransfer]]()

        def of_layer(layer: int) -> list[HeadTransfer]:
            own = ours.of_layer(layer)
            if id(own) not in known:
                once, givers = [self._transfer_strip(layer, strip) for strip in own], range(len(self._order.sources))
                known[id(own)] = [strip._replace(source=giver) for giver in givers for strip in once]
            return known[id(own)]

        return of_layer

    def _transfer_strip(self, layer: int, strip: HeadTransfer) -> HeadTransfer:
        """Return the transfer without blocks that an earlier sequence also has: all workers share the same blocks."""
        store = self._store
        (piece,), tables, seen = store.pieces[layer], store.tables, set[int]()
        blocks = dict[int, list[int]]()
        for sequence, numbers in strip.blocks.items():
            ids = {n: tables.block_ids(piece.group, sequence, n, n + 1)[0] for n in numbers}
            blocks[sequence] = [n for n in numbers if ids[n] not in seen]
            seen |= {*ids.values()}
        return strip._replace(blocks=blocks)

    def _put(self, run: TransferPart, blocks: Sequence[Tensor]) -> None:
        assert self._new is not None
        ids = self._block_ids(self._new, run, run.strip.target_piece).numpy()
        for part, came in zip(self._place(self._new, run, run.strip.target_piece), blocks, strict=True):
            part.numpy()[ids] ^= came.numpy()

    def _place(self, store: KvStore, run: TransferPart, piece: int) -> list[Tensor]:
        return as_integers(store, run.tag.layer, piece, 0, store.pieces[run.tag.layer][piece].kv_heads)
