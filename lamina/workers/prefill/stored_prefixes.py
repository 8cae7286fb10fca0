"""The memory workers as the source of prefix fetches: each sends its heads and tokens of stored KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lamina.config.partition import Partition
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.protocol.control import TransferPeer
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.prefix_fetch import ConnectPrefillPeers, owned_blocks
from lamina.protocol.step_plan import FetchPrefix
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.block_parts import block_parts, max_block_bytes, scatter
from lamina.workers.memory.kv_transfer.transfer import TransferPart
from lamina.workers.memory.kv_transfer.transfer_link import inbox

from .prefix_fetch import PrefixSource


def stored_prefixes(
    store: KvStore, order: ConnectPrefillPeers, partition: Partition, first_layer: int, name: str
) -> PrefixSource:
    """Return the memory workers. ``store``: of the layers from ``first_layer`` on. ``partition``: of these workers.
    ``name``: that this worker proves to them.
    """
    peers = [TransferPeer(there.name, connects=True, url=there.url, key=there.key) for there in order.memory]
    placement = KvPlacement(partition.num_kv_shards, partition.stripe_chunks * CHUNK_TOKENS, partition.single_shard)
    size, each = store.tables.block_size, inbox(max_block_bytes(store))

    def parts(op: FetchPrefix, ids: Sequence[Sequence[int]], worker: int) -> Iterator[TransferPart]:
        """Yield the parts of a memory worker: its heads of the blocks that lie there."""
        low, high = op.first // size, -(-(op.first + op.count) // size)
        for layer, (own,) in enumerate(store.layers):
            for piece in partition.pieces(first_layer + layer, worker):
                there = owned_blocks(placement, piece.kv_shards, op.source_location, range(low, high), size)
                blocks = [ids[own.group][n - low] for n in there]
                yield from block_parts(store, layer, 0, blocks, scatter, (piece.head_start, piece.head_stop))

    reader = TransferPeer(name, is_receiver=True)
    return PrefixSource([*peers, reader], (each, each), parts, is_memory=True)
