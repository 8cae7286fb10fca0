"""KV of a lost memory worker, rebuilt as the exclusive or of all other workers' KV, of which one is the parity.

Each worker sends its KV of each layer to the worker that takes the lost one's place, as it sends KV that moves
(workers.memory.kv_transfer.reshard); the order of arrival does not matter.
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
    """Of one worker, for one Rebuild. Workers have one piece of each layer, of equal sizes, and as many blocks."""

    def connect(self, fabric: EpochFabric, listener: EpochListener) -> None:
        """All whom this worker gives something, or takes something from: of the first that gives also which blocks
        sequences have. Raises ChannelError, ProtocolError, PlanError.
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
                raise ProtocolError(f"what came from {self._links[giver].peer_name} is damaged, or no tables of blocks")
            data += arrival.data
            self._links[giver].release(arrival)
            part += 1
        ids.frombytes(bytes(data))
        store.tables.restore(keep, ids)

    def transfer_layer(self, layer: int) -> None:
        """All of a layer that is given and taken here. Raises ChannelError, ProtocolError."""
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
        """From each that gives the same blocks, each block once: what comes twice would take itself away. Heads are
        counted from a worker's first one on. Tables are there, of who takes from ``connect`` on.
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
        """Without the blocks that an earlier sequence has, too: all workers share blocks alike."""
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
