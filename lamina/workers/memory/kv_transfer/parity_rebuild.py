"""Rebuilding the KV of a lost memory worker as the exclusive or of all other workers' KV, one of which is the parity.

The first worker sends the sequences' block tables. Then each one sends its KV of each layer to the worker that replaces
the lost one. The order of arrival does not matter.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

from torch import Tensor

from lamina.protocol.reshard import RebuildKv
from lamina.protocol.step_plan import ProtocolError, SurvivingKv
from lamina.workers.epoch_channels import EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.staging import Staging

from .block_parts import block_parts, gather, integers
from .transfer_link import parts_from, parts_into
from .transfer_mesh import TransferMesh


class ParityRebuilder:
    """The part of one worker in one RebuildKv. Workers have one piece of each layer, of equal sizes, and equally many
    blocks. ``store``: the worker's own, or the new one to fill. Raises ProtocolError if there is none.
    """

    def __init__(self, order: RebuildKv, store: KvStore | None, mesh: TransferMesh) -> None:
        if store is None:
            raise ProtocolError("a memory worker without KV cannot send any")
        self._order, self._store, self._mesh = order, store, mesh
        (self._target,) = order.targets
        self._receives = order.own_index == self._target
        self._adding = threading.Lock()  # several workers' KV arrives at a time

    def run(self, listener: EpochListener) -> None:
        """Send this worker's KV, or receive that of all others. Raises ChannelError, ProtocolError, PlanError."""
        order, tables = self._order, self._store.tables
        first = order.sources[0]
        self._mesh.connect(order.sources if self._receives else [self._target], self._store, listener)
        if self._receives:
            ids = bytearray(array("q").itemsize * tables.num_surviving_blocks(order.surviving))
            self._mesh.exchange({}, {first: parts_into(ids)})
            tables.restore(order.surviving, array("q", bytes(ids)))
        else:
            sent = tables.surviving_block_ids(order.surviving).tobytes() if order.own_index == first else b""
            self._mesh.exchange({self._target: parts_from(sent)}, {})
        for layer in range(len(self._store.layers)):
            self._transfer_layer(layer)
        self._mesh.finish()

    def _transfer_layer(self, layer: int) -> None:
        store = self._store
        (piece,) = store.pieces[layer]
        blocks = distinct_blocks(store, piece.group, self._order.surviving)
        if not self._receives:
            self._mesh.exchange({self._target: block_parts(store, layer, 0, blocks, gather)}, {})
            return
        for stored in integers(store, layer, 0):
            stored.numpy()[blocks] = 0
        parts = {source: block_parts(store, layer, 0, blocks, self._add) for source in self._order.sources}
        self._mesh.exchange({}, parts)

    def _add(self, stored: Tensor, ids: Sequence[int], message: Tensor, staging: Staging) -> None:
        with self._adding:
            stored.numpy()[list(ids)] ^= message.numpy()


def distinct_blocks(store: KvStore, group: int, keep: Sequence[SurvivingKv]) -> list[int]:
    """Return the blocks of ``keep``, those that sequences share only once: sent twice, a block would cancel itself."""
    return list(dict.fromkeys(block for each in keep for block in store.tables.block_table(group, each.sequence)[1]))
