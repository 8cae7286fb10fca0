"""The placement of a sequence's stripes on its home and on loan, given free space. Pure arithmetic.

A sequence fills its home and then the creditors, run after run, those with the most space first, so that it has few
creditors. Each run yields partial results, and the slots of messages hold a limited number (protocol.codec). So
runs are cut short by the number of their merge nodes. These are counted in a tree without an end, which has no fewer
than a sequence's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lamina.config.partition import KvShards

from .codec import MAX_NODES_OF_SPILLED_RUN
from .kv_placement import MAX_RUNS, KvLocation, KvPlacement, StripeRun


def nodes_of(start: int, stop: int) -> int:
    """Return the number of aligned nodes that cover the stripes ``start .. stop``."""
    count = 0
    while start < stop:
        size = 1 << (stop - start).bit_length() - 1
        start += min(size, start & -start) if start else size
        count += 1
    return count


def location_of_prefix(location: KvLocation, stripes: int) -> KvLocation:
    """Return the location of the first ``stripes`` of a sequence at ``location``, without runs on loan after them."""
    runs = tuple(StripeRun(r.start, min(r.stop, stripes), r.kv_shard) for r in location.moved_runs if r.start < stripes)
    return KvLocation(location.kv_shard, runs)


def spill_to(location: KvLocation, start: int, stop: int, kv_shard: int) -> KvLocation:
    """Return ``location`` with the stripes ``start .. stop`` put into ``kv_shard``; they follow all stripes on loan."""
    runs = location.moved_runs
    if kv_shard == location.kv_shard or start >= stop:
        return location
    if runs and runs[-1].stop == start and runs[-1].kv_shard == kv_shard:
        return replace(location, moved_runs=(*runs[:-1], replace(runs[-1], stop=stop)))
    return replace(location, moved_runs=(*runs, StripeRun(start, stop, kv_shard)))


def relocated(location: KvLocation, run: StripeRun, stripes: int) -> KvLocation | None:
    """Return ``location`` with the stripes of ``run`` in its KV shard; None if it would have too many runs or nodes.
    ``stripes``: the sequence's number of stripes.
    """
    home, runs = location.kv_shard, list[StripeRun]()
    for each in location.moved_runs:
        runs += [
            StripeRun(each.start, min(each.stop, run.start), each.kv_shard),
            StripeRun(max(each.start, run.stop), each.stop, each.kv_shard),
        ]
    runs = sorted((r for r in [*runs, run] if r.start < r.stop and r.kv_shard != home), key=lambda r: r.start)
    joined = list[StripeRun]()
    for each in runs:
        if joined and (joined[-1].stop, joined[-1].kv_shard) == (each.start, each.kv_shard):
            joined[-1] = replace(joined[-1], stop=each.stop)
        else:
            joined.append(each)
    after, stop = KvLocation(home, tuple(joined)), max(stripes, run.stop, *(r.stop for r in location.moved_runs))
    lanes = {home, run.kv_shard, *(r.kv_shard for r in joined)}
    fits = len(joined) <= MAX_RUNS and all(_nodes(after, lane, stop) <= MAX_NODES_OF_SPILLED_RUN for lane in lanes)
    return after if fits else None


def num_fitting_stripes(location: KvLocation, kv_shard: int, begin: int, room: int) -> int:
    """Return how many of the stripes from ``begin`` on, the next of a sequence at ``location``, fit into ``kv_shard``.
    ``room``: free stripes there.
    """
    if (
        len(location.moved_runs) >= MAX_RUNS
        and kv_shard != location.kv_shard
        and location.moved_runs[-1].kv_shard != kv_shard
    ):
        return 0
    stop = begin + max(0, room)
    while stop > begin and _nodes(spill_to(location, begin, stop, kv_shard), kv_shard, stop) > MAX_NODES_OF_SPILLED_RUN:
        stop &= stop - 1
    return max(0, stop - begin)


def _nodes(location: KvLocation, kv_shard: int, stripes: int) -> int:
    """Return the number of nodes of those of the first ``stripes`` that ``kv_shard`` owns."""
    if kv_shard != location.kv_shard:
        return sum(nodes_of(r.start, min(r.stop, stripes)) for r in location.moved_runs if r.kv_shard == kv_shard)
    cuts = [0, *(min(x, stripes) for r in location.moved_runs for x in (r.start, r.stop)), stripes]
    return sum(nodes_of(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True))


def spill_locations(location: KvLocation, begin: int, stripes: int, room: Mapping[int, int]) -> KvLocation | None:
    """Return the location of a sequence that gets stripes ``begin .. stripes``, its home first; None if they do not
    fit. ``location``: of its first stripes. ``room``: KV shard -> stripes that its owner can take, one KV shard of each
    owner.
    """
    new_place, stop = _fill(location, begin, stripes, room)
    return new_place if stop == stripes else None


def longest_sequence(room: Mapping[int, int]) -> int:
    """Return the stripes of the longest sequence that fits into ``room``; see ``spill_locations``."""
    home = max(room, key=lambda lane: room[lane])
    return _fill(KvLocation(home), 0, sum(room.values()), room)[1]


def _fill(location: KvLocation, begin: int, stripes: int, room: Mapping[int, int]) -> tuple[KvLocation, int]:
    """Place the stripes as far as they fit. Returns the location and the first stripe that does not fit."""
    for lane in sorted(room, key=lambda lane: (lane != location.kv_shard, -room[lane])):
        stop = begin + num_fitting_stripes(location, lane, begin, min(room[lane], stripes - begin))
        location, begin = spill_to(location, begin, stop, lane), stop
    return location, begin


def free_stripes_by_shard(
    placement: KvPlacement, groups: Sequence[KvShards], windows: Sequence[int], blocks: Iterable[int]
) -> dict[int, int]:
    """Return KV shard -> free stripes, for the first KV shard of each owner; KV shards of the same ``groups`` have one
    owner. ``blocks``: free blocks of each group. Groups with a window do not count, as they keep little of a sequence.
    ``placement``: with stripes in blocks.
    """
    room, seen, counted = dict[int, int](), set[tuple[bool, ...]](), list(blocks)
    for lane in range(placement.num_kv_shards):
        owner = tuple(lane in lanes for lanes in groups)
        if owner in seen:
            continue
        seen.add(owner)
        counts = [n for n, here, window in zip(counted, owner, windows, strict=True) if here and not window]
        room[lane] = min(counts) // placement.stripe if counts else 0
    return room
