"""The bytes of a layer's messages. Sizes, offsets, shapes and order are counted here, and nowhere else.

Both sides work a message out for themselves, and make tensors over its bytes. A message is flat, one piece of the layer
behind the other. Of each piece come the tensors of the sequences that its worker finishes alone, then those of the
others (protocol.layout):

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

from .layout import Layout, most_nodes
from .partition import Lanes, Partition
from .placement import Placement
from .plan import LayerShape

FP32_BYTES = 4


class Group(NamedTuple):
    """Pieces of one window length, in tokens, and the same lanes have the same rows in every step. Those of ``sparse``
    layers have blocks of their own.
    """

    window: int
    lanes: Lanes
    sparse: bool = False


class HeldPiece(NamedTuple):
    """One memory worker's part of a layer in one run of heads. ``each``: query heads of a KV head."""

    group: int  # index into the groups
    head_start: int  # KV heads
    head_stop: int
    each: int
    qk_dim: int
    v_dim: int

    @property
    def kv_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.each


def held_pieces(
    layers: Sequence[LayerShape],
    windows: Sequence[int],
    partition: Partition,
    worker: int,
    groups: list[Group],
    sparse: Sequence[bool] = (),
) -> list[tuple[HeldPiece, ...]]:
    """The pieces of ``worker`` by layer, each in the order of heads. ``windows``, ``sparse``: by layer; the rows of
    messages are the same without the latter. ``groups`` grows by those that are new.
    """
    pieces = list[tuple[HeldPiece, ...]]()
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        here = list[HeldPiece]()
        for piece in partition.pieces(index, worker):
            group = Group(window, piece.lanes, bool(sparse) and sparse[index])
            if group not in groups:
                groups.append(group)
            each, dims = layer.q_heads // layer.kv_heads, (layer.qk_dim, layer.v_dim)
            here.append(HeldPiece(groups.index(group), piece.head_start, piece.head_stop, each, *dims))
        pieces.append(tuple(here))
    return pieces


class Counts(NamedTuple):
    """Rows of a group in a step: of sequences that are whole, then of the others; and rows of partial results."""

    whole: int
    q: int = 0
    kv: int = 0
    partial: int = 0


def counts(layout: Layout) -> Counts:
    """The rows of a layout."""
    return Counts(len(layout.whole_rows), len(layout.q_rows), len(layout.kv_rows), layout.num_partial)


class Part(NamedTuple):
    """A tensor of a message: the numbers ``start .. stop``, of all of one dtype there. It may be empty."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def there(self) -> bool:
        return self.start < self.stop


class Messages(NamedTuple):
    """A layer's messages between the compute side and one memory worker, by piece. 0 bytes = no message."""

    q: tuple[tuple[Part, Part], ...]  # of whole sequences, of the others
    kv: tuple[tuple[Part, Part, Part, Part], ...]  # k and v of whole sequences, k and v of the others
    partial: tuple[tuple[Part, Part], ...]  # o and lse; they count the fp32 numbers in front of O
    final: tuple[Part, ...]  # their offsets count from the end of the partial ones
    q_bytes: int
    kv_bytes: int
    partial_bytes: int
    final_bytes: int

    @property
    def o_bytes(self) -> int:
        return self.partial_bytes + self.final_bytes


@lru_cache(maxsize=1024)  # the same for many steps, and for layers that are alike
def messages(pieces: tuple[HeldPiece, ...], groups: tuple[Counts, ...], itemsize: int) -> Messages:
    """The messages of a layer of ``pieces`` in a step. ``groups``: the step's rows, by group; ``itemsize``: bytes of a
    number on the wire.
    """
    q, kv, partial, final = _Flat(), _Flat(), _Flat(), _Flat()
    q_parts, kv_parts = list[tuple[Part, Part]](), list[tuple[Part, Part, Part, Part]]()
    partial_parts, final_parts = list[tuple[Part, Part]](), list[Part]()
    for piece in pieces:
        rows, heads, kv_heads = groups[piece.group], piece.q_heads, piece.kv_heads
        q_parts.append((q.take(rows.whole, heads, piece.qk_dim), q.take(rows.q, heads, piece.qk_dim)))
        whole = kv.take(rows.whole, kv_heads, piece.qk_dim), kv.take(rows.whole, kv_heads, piece.v_dim)
        kv_parts.append((*whole, kv.take(rows.kv, kv_heads, piece.qk_dim), kv.take(rows.kv, kv_heads, piece.v_dim)))
        partial_parts.append((partial.take(rows.partial, heads, piece.v_dim), partial.take(rows.partial, heads)))
        final_parts.append(final.take(rows.whole, heads, piece.v_dim))
    sizes = q.at * itemsize, kv.at * itemsize, partial.at * FP32_BYTES, final.at * itemsize
    return Messages(tuple(q_parts), tuple(kv_parts), tuple(partial_parts), tuple(final_parts), *sizes)


class _Flat:
    def __init__(self) -> None:
        self.at = 0

    def take(self, *shape: int) -> Part:
        """The next tensor."""
        start = self.at
        self.at += prod(shape)
        return Part(start, self.at, shape)


class Most(NamedTuple):
    """Bytes of the largest message of each kind."""

    q: int
    kv: int
    o: int


def most_bytes(
    layers: Sequence[LayerShape], partition: Partition, itemsize: int, *, max_rows: int, stripes: int
) -> Most:
    """The largest messages, by kind, of steps of up to ``max_rows`` rows, over all layers and memory workers.
    ``stripes``: those of the longest sequence.
    """
    most, groups = Most(0, 0, 0), list[Group]()
    for worker in range(partition.num_workers):
        held = held_pieces(layers, [0] * len(layers), partition, worker, groups)
        whole = tuple(Counts(max_rows) for _ in groups)
        cut = tuple(_cut(group.lanes, partition, max_rows, stripes) for group in groups)
        for pieces in set(held):
            each = [messages(pieces, rows, itemsize) for rows in (whole, cut)]
            most = Most(
                max(most.q, *(x.q_bytes for x in each)),
                max(most.kv, *(x.kv_bytes for x in each)),
                max(most.o, *(x.o_bytes for x in each)),
            )
    return most


def _cut(lanes: Lanes, partition: Partition, max_rows: int, stripes: int) -> Counts:
    """The most that comes of ``max_rows`` rows where no sequence is whole, if that can be."""
    if not partition.stripe or lanes.all:
        return Counts(max_rows)
    return Counts(0, max_rows, max_rows, max_rows * most_results(lanes, partition, stripes))


def most_results(lanes: Lanes, partition: Partition, stripes: int) -> int:
    """The most results that ``lanes`` have of one row of a sequence of up to ``stripes`` stripes: one of each node of
    stored tokens, and one of the new rows.
    """
    if not partition.stripe or lanes.all:
        return 1
    return most_nodes(lanes, Placement(partition.num_lanes, 1, partition.stays), stripes) + 1
