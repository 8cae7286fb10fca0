"""Moving KV from one memory worker to another, over channels of its own, while no worker attends it.

All workers move the layers in order, and of each layer the heads and blocks that protocol.reshard lists. Then they move
the states of recurrent layers. A worker discards a layer of its old store once it is sent. So it has its KV, and at
most one layer more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lamina.protocol.reshard import HeadTransfer, HeadTransfers, Reshard, StateTransfer, state_transfers
from lamina.protocol.step_plan import ProtocolError
from lamina.workers.epoch_channels import EpochListener
from lamina.workers.memory.kv_store import KvStore, layer_window

from .block_parts import CopyBlocks, block_parts, gather, scatter
from .state_parts import read_state, state_parts, write_state
from .transfer import TransferPart
from .transfer_link import copy_here
from .transfer_mesh import TransferMesh


class KvReshard:
    """One worker's part in one reshard. ``old``: the store that it sends from. ``new``: the store that it fills."""

    def __init__(self, order: Reshard, old: KvStore | None, new: KvStore | None, mesh: TransferMesh) -> None:
        """Raises ProtocolError if this worker has no KV that it should send."""
        store = old or new
        if store is None or (order.own_index in order.sources and old is None):
            raise ProtocolError("a memory worker without KV cannot send any")
        self._order, self._store, self._old, self._new, self._mesh = order, store, old, new, mesh
        self.num_mixers = len(order.states_after)
        windows = [layer_window(shape) for shape in store.bind_request.layers]
        self.num_layers, block_size = len(windows), store.bind_request.kv.block_size
        self._transfers = HeadTransfers(order.before, order.after, windows, order.surviving, block_size)

    def connect(self, listener: EpochListener) -> None:
        """Connect to all workers to or from which this one sends KV. Raises ChannelError, ProtocolError."""
        own, peers = self._order.own_index, set[int]()
        for layer in range(self.num_layers):
            for source, target, _ in self._of_layer(layer):
                peers |= {source, target} if own in (source, target) else set()
        for mixer in range(self.num_mixers):
            for source, target, _ in self._of_mixer(mixer):
                peers |= {source, target} if own in (source, target) else set()
        self._mesh.connect(peers - {own}, self._store, listener)

    def transfer_layer(self, layer: int) -> None:
        """Send and receive all of this worker's KV of a layer; then the old store's layer is not needed any more.
        Raises ChannelError, ProtocolError.
        """
        own, out, due = (
            self._order.own_index,
            defaultdict[int, list[TransferPart]](list),
            defaultdict[int, list[TransferPart]](list),
        )
        for source, target, heads in self._of_layer(layer):
            if source == own and self._old is not None:
                out[target] += self._parts(self._old, layer, heads.source_piece, heads, gather)
            if target == own and self._new is not None:
                due[source] += self._parts(self._new, layer, heads.target_piece, heads, scatter)
        copy_here(out.pop(own, ()), due.pop(own, ()), self._store.staging)
        self._mesh.exchange(out, due)

    def transfer_states(self, mixer: int) -> None:
        """Send and receive all of this worker's states of a recurrent layer, and free those of the old store. Raises as
        ``transfer_layer``.
        """
        own = self._order.own_index
        out, due = defaultdict[int, list[TransferPart]](list), defaultdict[int, list[TransferPart]](list)
        for source, target, heads in self._of_mixer(mixer):
            if source == own and self._old is not None and self._old.states is not None:
                out[target] += state_parts(self._old.states, mixer, heads, read_state)
            if target == own and self._new is not None and self._new.states is not None:
                due[source] += state_parts(self._new.states, mixer, heads, write_state)
        copy_here(out.pop(own, ()), due.pop(own, ()), self._store.staging)
        self._mesh.exchange(out, due)
        if self._old is not None and self._old.states is not None:
            self._old.states.release(mixer)

    def _of_mixer(self, mixer: int) -> Iterator[tuple[int, int, StateTransfer]]:
        order = self._order
        for heads in state_transfers(order.states_before[mixer], order.states_after[mixer], order.surviving):
            yield order.sources[heads.source], order.targets[heads.target], heads

    def _of_layer(self, layer: int) -> Iterator[tuple[int, int, HeadTransfer]]:
        """Yield the heads that move, with the peers that send and receive them, in the same order on all workers."""
        for heads in self._transfers.of_layer(layer):
            yield self._order.sources[heads.source], self._order.targets[heads.target], heads

    def _parts(
        self, store: KvStore, layer: int, number: int, heads: HeadTransfer, copy: CopyBlocks
    ) -> Iterator[TransferPart]:
        piece = store.pieces[layer][number]
        ids = [
            store.tables.block_ids(piece.group, sequence, n, n + 1)[0]
            for sequence, blocks in heads.blocks.items()
            for n in blocks
        ]
        within = heads.head_start - piece.head_start, heads.head_stop - piece.head_start
        return block_parts(store, layer, number, ids, copy, within)
