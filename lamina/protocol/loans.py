"""Which stripes of a sequence lie on loan where: rooms to runs of stripes. Pure arithmetic.

A sequence fills its home and then, run behind run, the creditors, those with the most room first: so it has few of
them. A run is cut short where it would come back in more partial results than the slots of messages hold
(protocol.layout): the nodes of a run are counted in the merge tree without an end, of which no sequence has more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from .layout import LENT_NODES
from .partition import Lanes
from .placement import MOST_RUNS, Place, Placement, Run


def nodes_of(start: int, stop: int) -> int:
    """The aligned nodes that the stripes ``start .. stop`` are."""
    count = 0
    while start < stop:
        size = 1 << (stop - start).bit_length() - 1
        start += min(size, start & -start) if start else size
        count += 1
    return count


def settled(place: Place, stripes: int) -> Place:
    """The place of the first ``stripes`` of a sequence at ``place``: nothing is on loan behind them."""
    runs = tuple(Run(r.start, min(r.stop, stripes), r.lane) for r in place.moved if r.start < stripes)
    return Place(place.lane, runs)


def lend(place: Place, start: int, stop: int, lane: int) -> Place:
    """``place`` with the stripes ``start .. stop``, behind all that are on loan, put into ``lane``."""
    runs = place.moved
    if lane == place.lane or start >= stop:
        return place
    if runs and runs[-1].stop == start and runs[-1].lane == lane:
        return replace(place, moved=(*runs[:-1], replace(runs[-1], stop=stop)))
    return replace(place, moved=(*runs, Run(start, stop, lane)))


def relocated(place: Place, run: Run, stripes: int) -> Place | None:
    """``place``, of so many stripes, with those of ``run`` in its lane; None where it would lie in more pieces than
    there may be.
    """
    home, runs = place.lane, list[Run]()
    for each in place.moved:
        runs += [
            Run(each.start, min(each.stop, run.start), each.lane),
            Run(max(each.start, run.stop), each.stop, each.lane),
        ]
    runs = sorted((r for r in [*runs, run] if r.start < r.stop and r.lane != home), key=lambda r: r.start)
    joined = list[Run]()
    for each in runs:
        if joined and (joined[-1].stop, joined[-1].lane) == (each.start, each.lane):
            joined[-1] = replace(joined[-1], stop=each.stop)
        else:
            joined.append(each)
    after, stop = Place(home, tuple(joined)), max(stripes, run.stop, *(r.stop for r in place.moved))
    lanes = {home, run.lane, *(r.lane for r in joined)}
    fits = len(joined) <= MOST_RUNS and all(_nodes(after, lane, stop) <= LENT_NODES for lane in lanes)
    return after if fits else None


def fitting(place: Place, lane: int, begin: int, room: int) -> int:
    """How many of the stripes from ``begin`` on, the next of a sequence at ``place``, ``lane`` can take into ``room``
    stripes of room.
    """
    if len(place.moved) >= MOST_RUNS and lane != place.lane and place.moved[-1].lane != lane:
        return 0
    stop = begin + max(0, room)
    while stop > begin and _nodes(lend(place, begin, stop, lane), lane, stop) > LENT_NODES:
        stop &= stop - 1
    return max(0, stop - begin)


def _nodes(place: Place, lane: int, stripes: int) -> int:
    """The nodes of those of the first ``stripes`` that ``lane`` owns."""
    if lane != place.lane:
        return sum(nodes_of(r.start, min(r.stop, stripes)) for r in place.moved if r.lane == lane)
    cuts = [0, *(min(x, stripes) for r in place.moved for x in (r.start, r.stop)), stripes]
    return sum(nodes_of(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True))


def spread(place: Place, begin: int, stripes: int, room: Mapping[int, int]) -> Place | None:
    """Where stripes ``begin .. stripes`` of a sequence go, whose first ones lie at ``place``: home first. ``room``:
    lane -> stripes that its owner can take, one lane of each owner. None where they do not fit.
    """
    new_place, stop = _fill(place, begin, stripes, room)
    return new_place if stop == stripes else None


def longest(room: Mapping[int, int]) -> int:
    """Stripes of the longest sequence that ``room`` holds, by lane as for ``spread``."""
    home = max(room, key=lambda lane: room[lane])
    return _fill(Place(home), 0, sum(room.values()), room)[1]


def _fill(place: Place, begin: int, stripes: int, room: Mapping[int, int]) -> tuple[Place, int]:
    """Where the stripes go as far as they fit, and the first one that does not; arguments as of ``spread``."""
    for lane in sorted(room, key=lambda lane: (lane != place.lane, -room[lane])):
        stop = begin + fitting(place, lane, begin, min(room[lane], stripes - begin))
        place, begin = lend(place, begin, stop, lane), stop
    return place, begin


def rooms(
    placement: Placement, groups: Sequence[Lanes], windows: Sequence[int], blocks: Iterable[int]
) -> dict[int, int]:
    """Lane -> stripes of room, the first lane of each owner: lanes of the same ``groups`` lie with one. ``blocks``:
    that each group has; one with a window counts for nothing, as it keeps little of a sequence. ``placement``: with
    stripes in blocks.
    """
    room, seen, counted = dict[int, int](), set[tuple[bool, ...]](), list(blocks)
    for lane in range(placement.num_lanes):
        owner = tuple(lane in lanes for lanes in groups)
        if owner in seen:
            continue
        seen.add(owner)
        counts = [n for n, here, window in zip(counted, owner, windows, strict=True) if here and not window]
        room[lane] = min(counts) // placement.stripe if counts else 0
    return room
