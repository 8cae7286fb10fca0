"""Which rows of a step go to a memory worker, and what comes back. Both sides of the wire work it out for themselves.

Where several workers share a sequence's tokens, *home* is the one that keeps the first new row's position. It attends
the new rows among themselves, for which it gets all their K and V. Every worker attends the stored tokens that it
keeps, a *node* of the merge tree for each stripe. Where home has all that is seen, the result is final; else it and the
others return partial results, which are merged where they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .partition import Lanes
from .plan import Rows


class Stripe(NamedTuple):
    """The stored tokens ``low .. high`` of the sequence of ``rows``: its stripe ``number`` as far as it goes."""

    rows: Rows
    number: int
    low: int
    high: int


@dataclass
class Layout:
    """What one group of a memory worker has of a step. Row numbers count the step's rows.

    Partial results come back in this order: of ``stripes``, then of ``new``; each has its sequence's rows.
    """

    whole: list[Rows] = field(default_factory=list)  # sequences that it finishes alone
    whole_rows: list[int] = field(default_factory=list)
    stripes: list[Stripe] = field(default_factory=list)  # each a node of the merge tree
    new: list[Rows] = field(default_factory=list)  # sequences whose new rows it attends for others to merge
    q: list[Rows] = field(default_factory=list)  # sequences whose Q it needs for ``stripes`` and ``new``
    q_rows: list[int] = field(default_factory=list)
    kv: list[Rows] = field(default_factory=list)  # rows whose K and V it needs for ``new``, or only to keep them
    kv_rows: list[int] = field(default_factory=list)

    @property
    def num_partial(self) -> int:
        """Rows of partial results."""
        return sum(s.rows.count for s in self.stripes) + sum(r.count for r in self.new)


def layout(rows: Sequence[Rows], lanes: Lanes, window: int, stripe: int) -> Layout:
    """The layout for the group of ``window`` that keeps ``lanes``. ``stripe``: tokens, 0 = sequences are whole."""
    out, at = Layout(), 0
    for row in rows:
        steps = range(at, at + row.count)
        at += row.count
        if not stripe or lanes.all:
            if row.sequence in lanes:
                out.whole.append(row)
                out.whole_rows += steps
            continue
        seen = max(0, row.first - window + 1) if window else 0
        numbers = range(seen // stripe, -(-row.first // stripe))
        mine = _kept_stripes(lanes, row.sequence % len(lanes.pattern), numbers)
        home = row.sequence + row.first // stripe in lanes
        if home and len(mine) == len(numbers):
            out.whole.append(row)
            out.whole_rows += steps
            continue
        out.stripes += (Stripe(row, n, n * stripe, min(row.first, (n + 1) * stripe)) for n in mine)
        if home:
            out.new.append(row)
        if home or mine:
            out.q.append(row)
            out.q_rows += steps
        for part in [row] if home else kept(row, lanes, stripe):
            out.kv.append(part)
            out.kv_rows += steps[part.first - row.first : part.first - row.first + part.count]
    return out


@lru_cache(maxsize=4096)  # the same for many steps
def _kept_stripes(lanes: Lanes, lane: int, stripes: range) -> list[int]:
    """Those of ``stripes`` of a sequence of ``lane`` that are kept in ``lanes``. Read only."""
    return [n for n in stripes if lane + n in lanes]


def kept(row: Rows, lanes: Lanes, stripe: int) -> list[Rows]:
    """The runs of ``row``'s new tokens that are kept in ``lanes``."""
    if not stripe or lanes.all:
        return [row] if row.sequence in lanes else []
    stop = row.first + row.count
    cuts = [row.first, *range((row.first // stripe + 1) * stripe, stop, stripe), stop]
    return [
        Rows(row.sequence, low, high - low) for low, high in pairwise(cuts) if row.sequence + low // stripe in lanes
    ]


@dataclass
class Merges:
    """How the partial results of all workers that share some heads, one worker's behind the other's, become one.

    ``levels``: in each, the results at the left numbers become their merge with those at the right ones. Then ``roots``
    and ``new`` are closed into the step's ``rows``.
    """

    levels: list[tuple[list[int], list[int]]] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def merges(layouts: Iterable[Layout]) -> Merges:
    """Of the layouts of all workers that share some heads, in their order; the aligned tree of attention.merge."""
    found: dict[Rows, list[tuple[int, int]]] = {}  # sequence -> its nodes: (number, first of its results)
    new: dict[Rows, int] = {}
    places: dict[Rows, int] = {}
    at = 0
    for each in layouts:
        for stripe in each.stripes:
            found.setdefault(stripe.rows, []).append((stripe.number, at))
            at += stripe.rows.count
        for row in each.new:
            new[row] = at
            at += row.count
        row_at = 0
        for row in each.q:
            places[row] = each.q_rows[row_at]
            row_at += row.count
    out = Merges()
    for row, nodes in found.items():
        level, nodes = 0, sorted(nodes)
        while len(nodes) > 1:
            if level == len(out.levels):
                out.levels.append(([], []))
            left, right = out.levels[level]
            above: list[tuple[int, int]] = []
            for number, at in nodes:
                if above and above[-1][0] == number >> 1:
                    left += range(above[-1][1], above[-1][1] + row.count)
                    right += range(at, at + row.count)
                else:
                    above.append((number >> 1, at))
            nodes, level = above, level + 1
        for to, start in ((out.roots, nodes[0][1]), (out.new, new[row]), (out.rows, places[row])):
            to += range(start, start + row.count)
    return out
