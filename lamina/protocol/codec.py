"""The bytes of a layer's messages. Sizes, offsets, shapes and order are counted here, and nowhere else.

Both sides work a message out for themselves, and make tensors over its bytes. A message is flat, one piece of the layer
behind the other. Of each piece come the tensors of the sequences that its worker finishes alone, then those of the
others (protocol.row_layout):

    Q    q [R, Hq, D], q [R', Hq, D]
    KV   k [R, Hkv, D], v [R, Hkv, Dv], k [R', Hkv, D], v [R', Hkv, Dv]
    O    of all pieces the partial results, o [P, Hq, Dv] and lse [P, Hq] in fp32; then of all pieces o [R, Hq, Dv]

What is not partial is in the wire's dtype.
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
    """Pieces of one window length, in tokens, and the same KV shards have the same rows in every step. Those of
    ``sparse`` layers have blocks of their own.
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
    """The pieces of ``worker`` by layer, each in the order of heads. ``windows``, ``sparse``: by layer; the rows of
    messages are the same without the latter. ``groups`` grows by those that are new.
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
    """Rows of a group in a step: of sequences that are whole, then of the others; and rows of partial results."""

    whole_sequences: int
    q: int = 0
    kv: int = 0
    partial: int = 0


def count_rows(layout: RowLayout) -> RowCounts:
    """The rows of a layout."""
    return RowCounts(len(layout.whole_rows), len(layout.q_rows), len(layout.kv_rows), layout.num_partial)


class TensorSpan(NamedTuple):
    """A tensor of a message: the numbers ``start .. stop``, of all of one dtype there. It may be empty."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def is_present(self) -> bool:
        return self.start < self.stop


class LayerMessages(NamedTuple):
    """A layer's messages between the compute side and one memory worker, by piece. 0 bytes = no message."""

    q: tuple[tuple[TensorSpan, TensorSpan], ...]  # of whole sequences, of the others
    kv: tuple[
        tuple[TensorSpan, TensorSpan, TensorSpan, TensorSpan], ...
    ]  # k and v of whole sequences, k and v of the others
    partial: tuple[tuple[TensorSpan, TensorSpan], ...]  # o and lse; they count the fp32 numbers in front of O
    final: tuple[TensorSpan, ...]  # their offsets count from the end of the partial ones
    q_bytes: int
    kv_bytes: int
    partial_bytes: int
    final_bytes: int

    @property
    def o_bytes(self) -> int:
        return self.partial_bytes + self.final_bytes


@lru_cache(maxsize=1024)  # the same for many steps, and for layers that are alike
def messages(pieces: tuple[WorkerPiece, ...], groups: tuple[RowCounts, ...], itemsize: int) -> LayerMessages:
    """The messages of a layer of ``pieces`` in a step. ``groups``: the step's rows, by group; ``itemsize``: bytes of a
    number on the wire.
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
        """The next tensor."""
        start = self.at
        self.at += prod(shape)
        return TensorSpan(start, self.at, shape)


class MaxMessageSizes(NamedTuple):
    """Bytes of the largest message of each kind."""

    q: int
    kv: int
    o: int


def max_message_sizes(
    layers: Sequence[LayerShape], partition: Partition, itemsize: int, *, max_rows: int, stripes: int
) -> MaxMessageSizes:
    """The largest messages, by kind, of steps of up to ``max_rows`` rows, over all layers and memory workers.
    ``stripes``: those of the longest sequence.
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
    """The most that comes of ``max_rows`` rows where no sequence is whole, if that can be."""
    if not partition.stripe or kv_shards.has_all:
        return RowCounts(max_rows)
    return RowCounts(0, max_rows, max_rows, max_rows * max_partial_results(kv_shards, partition, stripes))


def max_partial_results(kv_shards: KvShards, partition: Partition, stripes: int) -> int:
    """The most results that ``kv_shards`` have of one row of a sequence of up to ``stripes`` stripes: one of each node
    of stored tokens, and one of the new rows.
    """
    if not partition.stripe or kv_shards.has_all:
        return 1
    return max_nodes(kv_shards, KvPlacement(partition.num_kv_shards, 1, partition.single_shard), stripes) + 1
