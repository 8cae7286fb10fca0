"""The rows of a step that go to a memory worker, and the results that come back. Both sides of the wire compute this.

If several workers share a sequence's tokens, *home* is the worker that keeps the first new row's position. It attends
the new rows among themselves, for which it gets all their K and V. Every worker attends its stored tokens by *nodes*:
the maximal aligned nodes of the merge tree (ops.attention.merge) whose stored tokens are all its own, each in one
range. If home has all visible tokens, its result is final. Else it and the other workers return partial results, which
are merged where they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from lamina.config.partition import KvShards

from .kv_placement import KvLocation, KvPlacement
from .step_plan import RowRange

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
