"""The memory that a model and its partition need on memory workers: inboxes, KV blocks, tensors of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lamina.config.partition import Partition
from lamina.config.sparsity import SparsityOptions
from lamina.kv.stored_format import bounds_bytes, head_bytes, is_scaled
from lamina.netstack import Geometry
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.blocks.block_counts import num_kv_shards, split_memory
from lamina.protocol.capacity import combined_capacity, num_usable_blocks
from lamina.protocol.codec import FP32_BYTES, LayerGroup, max_message_sizes, max_partial_results, worker_pieces
from lamina.protocol.kv_placement import KvPlacement
from lamina.protocol.loan_placement import free_stripes_by_shard, longest_sequence
from lamina.protocol.sparse_layers import max_kept_tokens, selecting_layers, sparse_layers
from lamina.protocol.step_plan import BindReply, LayerShape
from lamina.workers.mixer_messages import MostBytes

SLOTS_PER_BATCH = 3  # PLAN, Q and KV are in flight together; one more slot so that the next PLAN need not wait
LEAST_SLOT_BYTES = 1 << 20  # a PLAN or a Bind
LEAST_BLOCKS = 2
KV_SLOTS = 8  # layers that a prefill worker may be ahead of a memory worker
STORED_SLOTS = 4  # notices of stored K and V that a prefill worker may leave unread, and one more
NO_MIXERS = MostBytes()
STATES_SHARE = 1 / 8  # of a host's free memory for the recurrent states on a memory worker, if no size is named
MAX_CACHED_PROMPTS = 8  # the store of a prefill worker is sized for so many of the longest prompts
PROMPT_CACHE_MEMORY_SHARE = 1 / 8  # share of a host's free memory for all these stores; each holds one prompt at least
OS_PAGE_BYTES = 4096


def inbox_geometries(
    layers: Sequence[LayerShape],
    partition: Partition,
    itemsize: int,
    *,
    max_rows: int,
    max_len: int,
    num_batches: int = 1,
    mixed: MostBytes = NO_MIXERS,
) -> tuple[Geometry, Geometry]:
    """Return the inboxes of a memory worker and of the compute worker. They hold messages of up to ``max_rows`` rows,
    of sequences of up to ``max_len`` tokens. ``mixed``: the largest messages of recurrent layers.
    """
    most = max_message_sizes(layers, partition, itemsize, max_rows=max_rows, stripes=max_stripes(partition, max_len))
    slots = (SLOTS_PER_BATCH + (mixed.sent > 0)) * num_batches + 1
    out_bytes = max(LEAST_SLOT_BYTES, most.q, most.kv, mixed.sent)
    in_bytes = max(LEAST_SLOT_BYTES, most.o, mixed.received)
    return _inbox(slots, out_bytes, max_rows), _inbox(slots, in_bytes, max_rows)


def prefill_inbox_geometries(
    layers: Sequence[LayerShape],
    partition: Partition,
    itemsize: int,
    *,
    max_rows: int,
    stages: int = 1,
    state_bytes: int = 0,
) -> tuple[Geometry, Geometry]:
    """Return the inboxes of a memory worker and of a prefill worker, for K and V of up to ``max_rows`` rows.
    ``stages``: the number of prefill workers in its group. ``state_bytes``: the largest state of a recurrent layer.
    """
    most = max_message_sizes(layers, partition, itemsize, max_rows=max_rows, stripes=1)
    out_bytes = max(LEAST_SLOT_BYTES, most.kv, state_bytes)
    inbound = Geometry(slots=STORED_SLOTS + stages - 1, slot_bytes=LEAST_SLOT_BYTES)
    return _inbox(KV_SLOTS, out_bytes, max_rows), inbound


def _inbox(slots: int, slot_bytes: int, max_rows: int) -> Geometry:
    try:
        return Geometry(slots=slots, slot_bytes=slot_bytes)
    except ValueError:
        raise ValueError(
            f"a message of {max_rows} rows may take {slot_bytes} bytes, and {slots} of them are in flight: lower "
            f"--prefill-chunk, --max-num-seqs or --pipeline"
        ) from None


def store_bytes(layers: Sequence[LayerShape], dtype: torch.dtype, max_len: int, block_size: int) -> int:
    """Return the bytes of a store of ``dtype`` for one sequence, the null block included."""
    token = sum(x.kv_heads * head_bytes(x.qk_dim, x.v_dim, dtype) for x in layers)
    return token * block_size * (-(-max_len // block_size) + 1)


def prompt_cache_bytes(one: int, free: int, workers: int) -> int:
    """Return the default bytes of a prefill worker's store, for some of the longest prompts. ``one``: bytes of one such
    prompt. ``free``: free bytes of the host, which has ``workers`` prefill workers.
    """
    return max(one, min(MAX_CACHED_PROMPTS * one, int(free * PROMPT_CACHE_MEMORY_SHARE / workers)))


def channel_bytes(*inboxes: Geometry) -> int:
    """Return the bytes of memory of a channel with these inboxes, headers included."""
    return sum(inbox.slots * (-(-inbox.slot_bytes // OS_PAGE_BYTES) + 1) * OS_PAGE_BYTES for inbox in inboxes)


class BlockSplit(NamedTuple):
    """The blocks of a worker by layer group; null blocks are not counted."""

    groups: list[LayerGroup]
    block_bytes: list[int]  # bytes of one block in all layers of the group
    num_blocks: list[int]

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks, null blocks included."""
        return sum((n + 1) * size for n, size in zip(self.num_blocks, self.block_bytes, strict=True))


def split_blocks(
    layers: Sequence[LayerShape],
    partition: Partition,
    worker: int,
    dtype: torch.dtype,
    kv_bytes: int,
    *,
    block_size: int,
    max_rows: int,
    max_len: int,
    sparsity: SparsityOptions,
) -> BlockSplit:
    """Split ``kv_bytes`` of ``worker`` into blocks of each layer group, for a store of ``dtype``. Raises ValueError if
    that cannot hold one sequence.
    """
    groups, windows = list[LayerGroup](), [AttentionSpec.decode(layer.spec).window for layer in layers]
    held = worker_pieces(layers, windows, partition, worker, groups, sparse_layers(layers, windows, sparsity))
    sizes = [0] * len(groups)  # bytes of a block, by group
    for pieces, selects in zip(held, selecting_layers(layers, windows, sparsity), strict=True):
        for piece in pieces:
            nbytes = block_size * head_bytes(piece.qk_dim, piece.v_dim, dtype)
            sizes[piece.group] += piece.kv_heads * (nbytes + bounds_bytes(piece.qk_dim, dtype) * selects)
    counts = split_memory(
        kv_bytes,
        sizes,
        [group.window for group in groups],
        [group.kv_shards for group in groups],
        stripe_blocks=partition.stripe_chunks * CHUNK_TOKENS // block_size,
        single_shard=partition.single_shard,
        block_size=block_size,
        max_rows=max_rows,
        max_len=max_len,
        max_kept_tokens=[max_kept_tokens(sparsity) * group.sparse for group in groups],
    )
    return BlockSplit(groups, sizes, counts)


def check_longest_sequence(
    bounds: Sequence[BindReply], max_len: int, block_size: int, kv_bytes: int = 0, more: int = 0
) -> None:
    """Check that memory workers that share stripes can hold one sequence of ``max_len`` tokens together. They have
    ``kv_bytes``, and may borrow ``more`` bytes. Raises ValueError if they cannot.
    """
    if not bounds[0].single_shard or (most := longest_spilled_sequence(bounds, block_size)) >= max_len:
        return
    if more and int(most * (kv_bytes + more) / kv_bytes) >= max_len:
        return
    raise ValueError(
        f"--partition spill: the memory workers hold one sequence of {most} tokens together, not of {max_len}: "
        f"raise --kv-cache-memory-bytes{' or --lending borrow.max' * bool(more)}, or lower --max-model-len to {most}"
    )


def longest_spilled_sequence(bounds: Sequence[BindReply], block_size: int) -> int:
    """Return the tokens of the longest sequence that memory workers hold together, if they share stripes."""
    at = combined_capacity(bounds)
    placement = KvPlacement(num_kv_shards(at.kv_shards), at.stripe_blocks, at.single_shard)
    room = free_stripes_by_shard(placement, at.kv_shards, at.windows, num_usable_blocks(at.num_blocks))
    whole = longest_sequence(room) * at.stripe_blocks * block_size
    return whole if any(w == 0 for w in at.windows) else 1 << 62


def attention_bytes(
    layers: Sequence[LayerShape], partition: Partition, worker: int, dtype: torch.dtype, *, max_rows: int, max_len: int
) -> int:
    """Return the bytes of the tensors that ``worker`` has at once for one layer.

    It has ``max_rows`` rows of sequences of up to ``max_len`` tokens. Counted are results over stored tokens, partial
    ones if other workers have the rest, and K and V as they are converted for a store of 8 bits. Messages and the
    scratch memory of a backend are not counted.
    """
    most, stripes = 0, max_stripes(partition, max_len)
    for i, layer in enumerate(layers):
        row = 0
        for piece in partition.pieces(i, worker):
            heads = piece.num_kv_heads * layer.q_heads // layer.kv_heads
            row += heads * (layer.v_dim + 1) * FP32_BYTES * max_partial_results(piece.kv_shards, partition, stripes)
            if is_scaled(dtype):
                row += piece.num_kv_heads * (layer.qk_dim + layer.v_dim) * (2 * FP32_BYTES + dtype.itemsize)
        most = max(most, max_rows * row)
    return most


def max_stripes(partition: Partition, max_len: int) -> int:
    """Return the stripes of the longest sequence."""
    return -(-max_len // (partition.stripe_chunks * CHUNK_TOKENS)) if partition.stripe_chunks else 1


def choose_kv_bytes(
    layers: Sequence[LayerShape],
    partition: Partition,
    worker: int,
    dtype: torch.dtype,
    *,
    max_len: int,
    max_num_seqs: int,
    block_size: int,
    free: int,
) -> int:
    """Return the bytes on ``worker`` for its part of ``max_num_seqs`` sequences of ``max_len`` tokens. At most it is
    the worker's part of a quarter of the ``free`` bytes; at least it holds one sequence of two blocks. ``dtype``: of
    the store.
    """
    # Bytes of a token in all KV shards; mean bytes of a token, by worker.
    whole, parts = 0, [0.0] * partition.num_workers
    for i, layer in enumerate(layers):
        token = head_bytes(layer.qk_dim, layer.v_dim, dtype)
        for each in range(partition.num_workers):
            parts[each] += sum(p.num_kv_heads * p.kv_shards.portion for p in partition.pieces(i, each)) * token
        whole += sum(p.num_kv_heads for p in partition.pieces(i, worker)) * token
    blocks = -(-max_len // block_size) + 1
    wanted = max(int(parts[worker] * block_size * blocks * max_num_seqs), whole * block_size * blocks)
    return min(wanted, max(int(free / 4 * parts[worker] / sum(parts)), whole * block_size * LEAST_BLOCKS))
