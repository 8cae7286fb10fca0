"""A layer's messages: the rows of a step that go to a memory worker, the results that come back, and their bytes.

Both sides of the wire compute this, and make tensors over the bytes. Only this module computes sizes, offsets, shapes
and order. Kinds and keys of messages are in ``step_plan``.

If several workers share a sequence's tokens, *home* is the worker that keeps the first new row's position. It attends
the new rows among themselves, for which it gets all their K and V. Every worker attends its stored tokens by *nodes*:
the maximal aligned nodes of the merge tree (ops.attention.merge) whose stored tokens are all its own, each in one
range. If home has all visible tokens, its result is final. Else it and the other workers return partial results, which
are merged where they are gathered.

A message is flat, one piece of the layer after the other. Each piece has the tensors of the sequences that its worker
computes alone, then those of the other sequences:

    Q    q [R, Hq, D], q [R', Hq, D]
    KV   k [R, Hkv, D], v [R, Hkv, Dv], k [R', Hkv, D], v [R', Hkv, Dv]
    O    of all pieces the partial results, o [P, Hq, Dv] and lse [P, Hq] in fp32; then of all pieces o [R, Hq, Dv]

All but partial results have the wire's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from lamina.config.partition import KvShards, Partition

from .kv_placement import KvLocation, KvPlacement
from .step_plan import LayerShape, RowRange

FP32_BYTES = 4
MAX_NODES_OF_SPILLED_RUN = 12  # a run of 64 stripes anywhere has no more


class MergeNodeRange(NamedTuple):
    """The stored tokens ``low .. high`` of the sequence of ``rows`` that one node of the merge tree over stripes
    covers.

    These are all visible tokens of its stripes ``number << level .. (number + 1) << level``.
    """

    rows: RowRange
    level: int
    number: int
    low: int
    high: int


@dataclass
class RowLayout:
    """The rows of a step that one group of a memory worker has. Row numbers count the step's rows.

    Partial results come back in this order: of ``merge_nodes``, then of ``new_rows``; each has its sequence's rows.
    """

    whole_sequences: list[RowRange] = field(default_factory=list)  # sequences that it computes alone
    whole_rows: list[int] = field(default_factory=list)
    merge_nodes: list[MergeNodeRange] = field(default_factory=list)
    # Sequences whose new rows it attends, to be merged elsewhere.
    new_rows: list[RowRange] = field(default_factory=list)
    q: list[RowRange] = field(default_factory=list)  # sequences whose Q it needs for ``merge_nodes`` and ``new_rows``
    q_rows: list[int] = field(default_factory=list)
    # Rows whose K and V it needs for ``new_rows``, or only to store them.
    kv: list[RowRange] = field(default_factory=list)
    kv_rows: list[int] = field(default_factory=list)

    @property
    def num_partial(self) -> int:
        """The number of rows of partial results."""
        return sum(n.rows.count for n in self.merge_nodes) + sum(r.count for r in self.new_rows)


def row_layout(rows: Sequence[RowRange], kv_shards: KvShards, window: int, placement: KvPlacement) -> RowLayout:
    """Return the layout for the group of ``window`` that keeps ``kv_shards``. ``placement``: with stripes in tokens."""
    out, at, stripe = RowLayout(), 0, placement.stripe
    for row in rows:
        steps = range(at, at + row.count)
        at += row.count
        if placement.is_whole(kv_shards, row.location):
            if row.location.kv_shard in kv_shards:
                out.whole_sequences.append(row)
                out.whole_rows += steps
            continue
        seen = max(0, row.first - window + 1) if window else 0
        numbers = range(seen // stripe, -(-row.first // stripe))
        nodes, everything = owned_nodes(kv_shards, placement, row.location, numbers)
        home = placement.kv_shard_of(row.location, row.first // stripe) in kv_shards
        if home and everything:
            out.whole_sequences.append(row)
            out.whole_rows += steps
            continue
        for level, number in nodes:
            low, high = max(number << level, numbers.start) * stripe, ((number + 1) << level) * stripe
            out.merge_nodes.append(MergeNodeRange(row, level, number, low, min(row.first, high)))
        if home:
            out.new_rows.append(row)
        if home or nodes:
            out.q.append(row)
            out.q_rows += steps
        for part in [row] if home else owned_runs(row, kv_shards, placement):
            out.kv.append(part)
            out.kv_rows += steps[part.first - row.first : part.first - row.first + part.count]
    return out


@lru_cache(maxsize=4096)  # the same for many steps
def owned_nodes(
    kv_shards: KvShards, placement: KvPlacement, location: KvLocation, stripes: range
) -> tuple[list[tuple[int, int]], bool]:
    """Return the nodes that ``kv_shards`` keep of a sequence's ``stripes``, and whether these are all. Read only."""
    here = [n for run in placement.owned_runs(kv_shards, location, stripes) for n in run]
    return maximal_nodes(here, stripes), len(here) == len(stripes)


def maximal_nodes(here: Iterable[int], stripes: range) -> list[tuple[int, int]]:
    """Return (level, number) of the largest nodes of the merge tree over ``stripes`` whose leaves are all ``here``, in
    order.

    Only ``stripes`` are leaves; a node without a sibling rises as it is.
    """
    level, nodes, held = 0, list[tuple[int, int]](), sorted(here)
    while held:
        above = range(stripes.start >> 1, (stripes.stop + 1) >> 1)
        leaves = set(held)
        parents = [n for n in above if all(x in leaves for x in (2 * n, 2 * n + 1) if x in stripes)]
        if len(stripes) == 1:
            parents = []  # this is the root
        nodes += ((level, n) for n in held if n >> 1 not in parents)
        level, held, stripes = level + 1, parents, above
    return sorted(nodes, key=lambda node: node[1] << node[0])


@lru_cache(maxsize=256)
def max_nodes(kv_shards: KvShards, placement: KvPlacement, stripes: int) -> int:
    """Return the most nodes that a sequence of up to ``stripes`` stripes has here, placed by rule; seeing fewer stripes
    gives no more. With loans it has at most MAX_NODES_OF_SPILLED_RUN, which bounds the slots of messages.
    """
    if placement.single_shard:
        return min(stripes, MAX_NODES_OF_SPILLED_RUN)
    places = map(KvLocation, range(placement.num_kv_shards))
    return max(len(owned_nodes(kv_shards, placement, place, range(stripes))[0]) for place in places)


def first_rows(rows: Iterable[RowRange]) -> dict[int, int]:
    """Return, for each sequence, its first row in a message."""
    starts, at = dict[int, int](), 0
    for row in rows:
        starts.setdefault(row.sequence, at)
        at += row.count
    return starts


def owned_runs(row: RowRange, kv_shards: KvShards, placement: KvPlacement) -> list[RowRange]:
    """Return the runs of ``row``'s new tokens that lie in ``kv_shards``."""
    stripe, stop = placement.stripe, row.first + row.count
    if placement.is_whole(kv_shards, row.location):
        return [row] if row.location.kv_shard in kv_shards else []
    cuts = [row.first, *range((row.first // stripe + 1) * stripe, stop, stripe), stop]
    return [
        RowRange(row.sequence, low, high - low, row.location)
        for low, high in pairwise(cuts)
        if placement.kv_shard_of(row.location, low // stripe) in kv_shards
    ]


@dataclass
class MergePlan:
    """The merges of partial results of all workers that share some heads; results are numbered worker by worker.

    ``levels``: at each level, the results at the left numbers are replaced by their merge with those at the right ones.
    Then ``roots`` and ``new`` are merged into the step's ``rows``.
    """

    levels: list[tuple[list[int], list[int]]] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def merge_plan(layouts: Iterable[RowLayout]) -> MergePlan:
    """Return the merges for the layouts of all workers that share some heads; see ops.attention.merge for the tree."""
    # By sequence, for each of its nodes: level, number, and the index of its first result.
    nodes_of: dict[RowRange, list[tuple[int, int, int]]] = {}
    new: dict[RowRange, int] = {}
    places: dict[RowRange, int] = {}
    at = 0
    for each in layouts:
        for node in each.merge_nodes:
            nodes_of.setdefault(node.rows, []).append((node.level, node.number, at))
            at += node.rows.count
        for row in each.new_rows:
            new[row] = at
            at += row.count
        row_at = 0
        for row in each.q:
            places[row] = each.q_rows[row_at]
            row_at += row.count
    out, levels = MergePlan(), dict[int, tuple[list[int], list[int]]]()
    for row, nodes in nodes_of.items():
        root = _merge(row.count, nodes, levels)
        for to, start in ((out.roots, root), (out.new, new[row]), (out.rows, places[row])):
            to += range(start, start + row.count)
    out.levels = [levels[level] for level in sorted(levels)]
    return out


def _merge(count: int, nodes: list[tuple[int, int, int]], levels: dict[int, tuple[list[int], list[int]]]) -> int:
    """Add the merges of a sequence of ``count`` rows to ``levels``. Returns the index of its root's first result."""
    waiting = sorted(nodes, reverse=True)  # the lowest level, and in it the lowest number, comes last
    level, here = waiting[-1][0], list[tuple[int, int]]()  # nodes of this level: (number, index of the first result)
    while True:
        while waiting and waiting[-1][0] == level:
            _, number, at = waiting.pop()
            here.append((number, at))
        if len(here) == 1 and not waiting:
            return here[0][1]
        above: list[tuple[int, int]] = []
        for number, at in sorted(here):
            if above and above[-1][0] == number >> 1:
                left, right = levels.setdefault(level, ([], []))
                left += range(above[-1][1], above[-1][1] + count)
                right += range(at, at + count)
            else:
                above.append((number >> 1, at))
        here, level = above, level + 1


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
    if not partition.stripe_chunks or kv_shards.has_all:
        return RowCounts(max_rows)
    return RowCounts(0, max_rows, max_rows, max_rows * max_partial_results(kv_shards, partition, stripes))


def max_partial_results(kv_shards: KvShards, partition: Partition, stripes: int) -> int:
    """Return the most partial results that ``kv_shards`` yield for one row of a sequence of up to ``stripes`` stripes.
    There is one for each node of stored tokens, and one for the new rows.
    """
    if not partition.stripe_chunks or kv_shards.has_all:
        return 1
    return max_nodes(kv_shards, KvPlacement(partition.num_kv_shards, 1, partition.single_shard), stripes) + 1
