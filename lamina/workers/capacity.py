"""What a model and its partition ask of the memory workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.attention.merge import CHUNK_TOKENS
from lamina.kv.blocks import Deal
from lamina.kv.partition import Partition, Piece
from lamina.kv.stored import head_bytes
from lamina.netstack import Geometry

from .stepplan import LayerShape

SLOTS_OF_A_BATCH = 3  # PLAN, Q and KV are in flight together; one more slot so that the next PLAN need not wait
LEAST_SLOT_BYTES = 1 << 20  # a PLAN or a Bind
LEAST_BLOCKS = 2
KV_SLOTS = 8  # layers that a prefill worker may be ahead of a memory worker
STORED_SLOTS = 4  # steps of which a prefill worker has not taken notice yet, and one more
FP32_BYTES = 4


def geometries(
    layers: Sequence[LayerShape],
    partition: Partition,
    itemsize: int,
    *,
    max_rows: int,
    max_len: int,
    num_batches: int = 1,
) -> tuple[Geometry, Geometry]:
    """The inboxes of a memory worker and of the compute worker, for messages of up to ``max_rows`` rows of sequences of
    up to ``max_len`` tokens.
    """
    slots = SLOTS_OF_A_BATCH * num_batches + 1
    out_bytes, in_bytes = LEAST_SLOT_BYTES, LEAST_SLOT_BYTES
    for i, layer in enumerate(layers):
        group = layer.q_heads // layer.kv_heads
        for worker in range(partition.num_workers):
            pieces = partition.pieces(i, worker)
            row = sum(p.num_kv_heads for p in pieces) * itemsize
            out_bytes = max(out_bytes, max_rows * row * max(group * layer.qk_dim, layer.qk_dim + layer.v_dim))
            in_bytes = max(in_bytes, max_rows * sum(_o_bytes(layer, p, partition, itemsize, max_len) for p in pieces))
    return _inbox(slots, out_bytes, max_rows), _inbox(slots, in_bytes, max_rows)


def kv_geometries(
    layers: Sequence[LayerShape], partition: Partition, itemsize: int, *, max_rows: int
) -> tuple[Geometry, Geometry]:
    """The inboxes of a memory worker and of a prefill worker, for the K and V of up to ``max_rows`` rows."""
    out_bytes = LEAST_SLOT_BYTES
    for i, layer in enumerate(layers):
        for worker in range(partition.num_workers):
            heads = sum(p.num_kv_heads for p in partition.pieces(i, worker))
            out_bytes = max(out_bytes, max_rows * heads * (layer.qk_dim + layer.v_dim) * itemsize)
    inbound = Geometry(slots=STORED_SLOTS, slot_bytes=LEAST_SLOT_BYTES)
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
    """Of a store of ``dtype`` for one sequence, the null block included."""
    token = sum(x.kv_heads * head_bytes(x.qk_dim, x.v_dim, dtype) for x in layers)
    return token * block_size * (-(-max_len // block_size) + 1)


def _o_bytes(layer: LayerShape, piece: Piece, partition: Partition, itemsize: int, max_len: int) -> int:
    """What a row brings back from a piece at most: its result, or partial ones of the stripes and of the new rows."""
    heads = piece.num_kv_heads * layer.q_heads // layer.kv_heads
    final = heads * layer.v_dim * itemsize
    if not partition.stripe or piece.lanes.all:
        return final
    stripes = -(-max_len // (partition.stripe * CHUNK_TOKENS))
    deal = Deal(piece.lanes, 1)  # of stripes
    parts = 1 + max(deal.kept(lane, stripes) for lane in range(partition.num_lanes))
    return max(final, parts * heads * (layer.v_dim + 1) * FP32_BYTES)


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
    """Room on ``worker``, in a store of ``dtype``, for its part of ``max_num_seqs`` sequences of ``max_len`` tokens,
    but at most its part of a quarter of the ``free`` bytes; and for one sequence of two blocks at least.
    """
    whole, parts = 0, [0.0] * partition.num_workers  # bytes of a token in all lanes; of one on average, by worker
    for i, layer in enumerate(layers):
        token = head_bytes(layer.qk_dim, layer.v_dim, dtype)
        for each in range(partition.num_workers):
            parts[each] += sum(p.num_kv_heads * p.lanes.portion for p in partition.pieces(i, each)) * token
        whole += sum(p.num_kv_heads for p in partition.pieces(i, worker)) * token
    blocks = -(-max_len // block_size) + 1
    wanted = max(int(parts[worker] * block_size * blocks * max_num_seqs), whole * block_size * blocks)
    return min(wanted, max(int(free / 4 * parts[worker] / sum(parts)), whole * block_size * LEAST_BLOCKS))
