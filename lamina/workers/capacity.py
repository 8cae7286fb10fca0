"""What a model and its partition ask of the memory workers, and what these have together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamina.attention.merge import CHUNK_TOKENS
from lamina.kv.partition import Lanes, Partition, Piece
from lamina.netstack import Geometry

from .stepplan import Bound, LayerShape

SLOTS_OF_A_BATCH = 3  # PLAN, Q and KV are in flight together; one more slot so that the next PLAN need not wait
LEAST_SLOT_BYTES = 1 << 20  # a PLAN or a Bind
LEAST_BLOCKS = 2


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
            final = sum(p.num_kv_heads * group * layer.v_dim * itemsize for p in pieces)
            parts = sum(p.num_kv_heads * group * (layer.v_dim + 1) * 4 * _nodes(p, partition, max_len) for p in pieces)
            in_bytes = max(in_bytes, max_rows * max(final, parts))
    return Geometry(slots=slots, slot_bytes=out_bytes), Geometry(slots=slots, slot_bytes=in_bytes)


def _nodes(piece: Piece, partition: Partition, max_len: int) -> int:
    """Partial results of a row at most: of the stripes that are kept, and of the new rows."""
    if not partition.stripe or piece.lanes.all:
        return 0
    stripes = -(-max_len // (partition.stripe * CHUNK_TOKENS))
    return 1 + max(piece.lanes.count(lane, stripes) for lane in range(partition.num_lanes))


def choose_kv_bytes(
    layers: Sequence[LayerShape],
    partition: Partition,
    worker: int,
    itemsize: int,
    *,
    max_len: int,
    max_num_seqs: int,
    block_size: int,
    free: int,
) -> int:
    """Room on ``worker`` for its part of ``max_num_seqs`` sequences of ``max_len`` tokens, but at most a quarter of the
    ``free`` bytes over all memory workers.
    """
    whole, part = 0, 0.0  # bytes of a token that is in all of its lanes, and of a token on average
    for i, layer in enumerate(layers):
        for piece in partition.pieces(i, worker):
            nbytes = piece.num_kv_heads * (layer.qk_dim + layer.v_dim) * itemsize
            whole += nbytes
            part += nbytes * piece.lanes.portion
    blocks = -(-max_len // block_size) + 1
    wanted = max(int(part * block_size * blocks * max_num_seqs), whole * block_size * blocks)
    return min(wanted, max(free // 4 // partition.num_workers, whole * block_size * LEAST_BLOCKS))


class Capacity(NamedTuple):
    """The groups of all memory workers. Where several have the same one, that with the fewest blocks stands for all: a
    sequence takes as many from each.
    """

    windows: list[int]
    lanes: list[Lanes]
    stripe: int
    num_blocks: list[int]
    holders: list[list[int]]  # group -> memory workers


def together(bounds: Sequence[Bound]) -> Capacity:
    """What the memory workers, in their order, have said."""
    blocks: dict[tuple[int, Lanes], dict[int, int]] = {}
    for worker, bound in enumerate(bounds):
        for window, lanes, count in zip(bound.windows, bound.lanes, bound.num_blocks, strict=True):
            blocks.setdefault((window, lanes), {})[worker] = count
    return Capacity(
        [window for window, _ in blocks],
        [lanes for _, lanes in blocks],
        bounds[0].stripe,
        [min(of.values()) for of in blocks.values()],
        [list(of) for of in blocks.values()],
    )
