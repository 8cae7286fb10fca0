"""The bytes of a layer's messages. Only this module computes sizes, offsets, shapes and order.

Both sides compute a message's layout, and make tensors over its bytes. A message is flat, one piece of the layer after
the other. Each piece has the tensors of the sequences that its worker computes alone, then those of the other sequences
(protocol.row_layout):

    Q    q [R, Hq, D], q [R', Hq, D]
    KV   k [R, Hkv, D], v [R, Hkv, Dv], k [R', Hkv, D], v [R', Hkv, Dv]
    O    of all pieces the partial results, o [P, Hq, Dv] and lse [P, Hq] in fp32; then of all pieces o [R, Hq, Dv]

All but partial results have the wire's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from lamina.config.partition import KvShards, Partition

from .kv_placement import KvPlacement
from .row_layout import RowLayout, max_nodes
from .step_plan import LayerShape

FP32_BYTES = 4


class LayerGroup(NamedTuple):
    """The pieces of one window length, in tokens, and the same KV shards; they have the same rows in every step. Pieces
    of ``sparse`` layers form groups of their own.
    """

    window: int
    kv_shards: KvShards
    sparse: bool = False


class WorkerPiece(NamedTuple):
    """One memory worker's part of a layer in one run of heads. ``q_heads_per_kv_head``: query heads of a KV head."""

    group: int  # index into the groups
    head_start: int  # KV heads
    head_stop: int
    q_heads_per_kv_head: int
    qk_dim: int
    v_dim: int

    @property
    def kv_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.q_heads_per_kv_head


def worker_pieces(
    layers: Sequence[LayerShape],
    windows: Sequence[int],
    partition: Partition,
    worker: int,
    groups: list[LayerGroup],
    sparse: Sequence[bool] = (),
) -> list[tuple[WorkerPiece, ...]]:
    """Return the pieces of ``worker`` by layer, each in the order of heads. New groups are appended to ``groups``.

    ``windows``, ``sparse``: by layer. Without ``sparse`` the rows of messages are the same.
    """
    pieces = list[tuple[WorkerPiece, ...]]()
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        here = list[WorkerPiece]()
        for piece in partition.pieces(index, worker):
            group = LayerGroup(window, piece.kv_shards, bool(sparse) and sparse[index])
            if group not in groups:
                groups.append(group)
            each, dims = layer.q_heads // layer.kv_heads, (layer.qk_dim, layer.v_dim)
            here.append(WorkerPiece(groups.index(group), piece.head_start, piece.head_stop, each, *dims))
        pieces.append(tuple(here))
    return pieces


class RowCounts(NamedTuple):
    """The rows of a group in a step: of whole sequences, of the others (Q, KV), and of partial results."""

    whole_sequences: int
    q: int = 0
    kv: int = 0
    partial: int = 0


def count_rows(layout: RowLayout) -> RowCounts:
    """Return the numbers of rows of a layout."""
    return RowCounts(len(layout.whole_rows), len(layout.q_rows), len(layout.kv_rows), layout.num_partial)


class TensorSpan(NamedTuple):
    """A tensor of a message: elements ``start .. stop``, counted in its own dtype. It may be empty."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def is_present(self) -> bool:
        return self.start < self.stop


class LayerMessages(NamedTuple):
    """The messages of a layer between the compute side and one memory worker, by piece. 0 bytes: no message."""

    q: tuple[tuple[TensorSpan, TensorSpan], ...]  # of whole sequences, of the others
    # k and v of whole sequences, k and v of the others.
    kv: tuple[tuple[TensorSpan, TensorSpan, TensorSpan, TensorSpan], ...]
    partial: tuple[tuple[TensorSpan, TensorSpan], ...]  # o and lse, at the beginning of O; offsets count fp32 numbers
    final: tuple[TensorSpan, ...]  # offsets count from the end of the partial results
    q_bytes: int
    kv_bytes: int
    partial_bytes: int
    final_bytes: int

    @property
    def o_bytes(self) -> int:
        return self.partial_bytes + self.final_bytes


@lru_cache(maxsize=1024)  # the same for many steps, and for layers that are alike
def messages(pieces: tuple[WorkerPiece, ...], groups: tuple[RowCounts, ...], itemsize: int) -> LayerMessages:
    """Return the messages of a layer with these ``pieces`` in a step. ``groups``: the step's rows, by group;
    ``itemsize``: bytes of a number on the wire.
    """
    q, kv, partial, final = _Flat(), _Flat(), _Flat(), _Flat()
    q_parts, kv_parts = (
        list[tuple[TensorSpan, TensorSpan]](),
        list[tuple[TensorSpan, TensorSpan, TensorSpan, TensorSpan]](),
    )
    partial_parts, final_parts = list[tuple[TensorSpan, TensorSpan]](), list[TensorSpan]()
    for piece in pieces:
        rows, heads, kv_heads = groups[piece.group], piece.q_heads, piece.kv_heads
        q_parts.append((q.take(rows.whole_sequences, heads, piece.qk_dim), q.take(rows.q, heads, piece.qk_dim)))
        whole = (
            kv.take(rows.whole_sequences, kv_heads, piece.qk_dim),
            kv.take(rows.whole_sequences, kv_heads, piece.v_dim),
        )
        kv_parts.append((*whole, kv.take(rows.kv, kv_heads, piece.qk_dim), kv.take(rows.kv, kv_heads, piece.v_dim)))
        partial_parts.append((partial.take(rows.partial, heads, piece.v_dim), partial.take(rows.partial, heads)))
        final_parts.append(final.take(rows.whole_sequences, heads, piece.v_dim))
    sizes = q.at * itemsize, kv.at * itemsize, partial.at * FP32_BYTES, final.at * itemsize
    return LayerMessages(tuple(q_parts), tuple(kv_parts), tuple(partial_parts), tuple(final_parts), *sizes)


class _Flat:
    def __init__(self) -> None:
        self.at = 0

    def take(self, *shape: int) -> TensorSpan:
        """Return the next tensor, of this shape."""
        start = self.at
        self.at += prod(shape)
        return TensorSpan(start, self.at, shape)


class MaxMessageSizes(NamedTuple):
    """The bytes of the largest message of each kind."""

    q: int
    kv: int
    o: int


def max_message_sizes(
    layers: Sequence[LayerShape], partition: Partition, itemsize: int, *, max_rows: int, stripes: int
) -> MaxMessageSizes:
    """Return the largest messages of steps of up to ``max_rows`` rows, over all layers and memory workers. ``stripes``:
    of the longest sequence.
    """
    most, groups = MaxMessageSizes(0, 0, 0), list[LayerGroup]()
    for worker in range(partition.num_workers):
        held = worker_pieces(layers, [0] * len(layers), partition, worker, groups)
        whole = tuple(RowCounts(max_rows) for _ in groups)
        cut = tuple(_cut(group.kv_shards, partition, max_rows, stripes) for group in groups)
        for pieces in set(held):
            each = [messages(pieces, rows, itemsize) for rows in (whole, cut)]
            most = MaxMessageSizes(
                max(most.q, *(x.q_bytes for x in each)),
                max(most.kv, *(x.kv_bytes for x in each)),
                max(most.o, *(x.o_bytes for x in each)),
            )
    return most


def _cut(kv_shards: KvShards, partition: Partition, max_rows: int, stripes: int) -> RowCounts:
    """Return the most rows that result from ``max_rows`` rows if no sequence is whole, if that is possible."""
    if not partition.stripe or kv_shards.has_all:
        return RowCounts(max_rows)
    return RowCounts(0, max_rows, max_rows, max_rows * max_partial_results(kv_shards, partition, stripes))


def max_partial_results(kv_shards: KvShards, partition: Partition, stripes: int) -> int:
    """Return the most partial results that ``kv_shards`` yield for one row of a sequence of up to ``stripes`` stripes.
    There is one for each node of stored tokens, and one for the new rows.
    """
    if not partition.stripe or kv_shards.has_all:
        return 1
    return max_nodes(kv_shards, KvPlacement(partition.num_kv_shards, 1, partition.single_shard), stripes) + 1
