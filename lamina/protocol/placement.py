"""Which memory worker keeps which tokens of a sequence: (sequence, stripe, head) -> memory worker. No other module
computes that.

The scheduler chooses the lane in which a sequence begins, its *first lane*. After each stripe the sequence goes on to
the next lane, or it stays in its lane: the partition's rule. Exceptions are runs of stripes that lie elsewhere, on loan
or because they were moved. The partition names the owner of a lane, head by head (protocol.partition).

The first lane and the exceptions are a *place*. The rows of a plan carry the place of their sequence, so the two always
agree: a refused plan changes no place, and a plan that is sent again names the same one. A place that differs from the
one before tells memory workers to give back the blocks of stripes that have left them, and to hold blocks for stripes
that come. The code that changes a place also moves the tokens before rows read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from .partition import Lanes

MOST_RUNS = 64


class Run(msgspec.Struct, frozen=True, array_like=True):
    """The stripes ``start .. stop`` of a sequence lie in ``lane``."""

    start: int
    stop: int
    lane: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a sequence lies: from ``lane`` on, but for the runs of stripes that have ``moved``, in their order."""

    lane: int = 0  # the first one
    moved: tuple[Run, ...] = ()


FIRST = Place()


class Placement(NamedTuple):
    """The rule by which stripes of sequences lie in lanes. ``stripe``: in tokens, or blocks, as its user counts; 0 = a
    sequence stays whole in its first lane. ``stays``: a sequence stays there but for the runs that have moved.
    """

    num_lanes: int
    stripe: int
    stays: bool = False

    def lane(self, place: Place, number: int) -> int:
        """The lane of the owner of the stripe ``number`` of a sequence."""
        for run in place.moved:
            if run.start <= number < run.stop:
                return run.lane
        return (place.lane + number) % self.num_lanes if self.stripe and not self.stays else place.lane

    def lane_at(self, place: Place, position: int) -> int:
        """The lane of the owner of a token or block, as ``stripe`` counts."""
        return self.lane(place, position // self.stripe if self.stripe else 0)

    def owned(self, lanes: Lanes, place: Place, stripes: range) -> Iterator[range]:
        """The runs of ``stripes`` whose owner ``lanes`` are, in order."""
        ends = (x for run in place.moved for x in (run.start, run.stop)) if self.stays else stripes
        for low, high in pairwise(sorted({*stripes[:1], *(x for x in ends if x in stripes), stripes.stop})):
            if self.lane(place, low) in lanes:
                yield range(low, high)

    def is_whole(self, lanes: Lanes, place: Place) -> bool:
        """Whether all of a sequence at ``place`` has one owner, to whom ``lanes`` belong entirely or not at all."""
        return not self.stripe or lanes.all or (self.stays and not place.moved)

    def alike(self, one: Place, other: Place, stripes: int) -> bool:
        """Whether the first ``stripes`` of a sequence have the same owners at both places."""
        same = one.lane == other.lane and one.moved == other.moved
        return same or (self.stripe > 0 and all(self.lane(one, n) == self.lane(other, n) for n in range(stripes)))

    def check(self, place: Place) -> None:
        """Raises ValueError where there can be no such place."""
        runs = place.moved
        stops = [0, *(run.stop for run in runs)]
        if not 0 <= place.lane < self.num_lanes:
            raise ValueError(f"lane {place.lane} of {self.num_lanes}")
        if runs and (not self.stripe or len(runs) > MOST_RUNS):
            raise ValueError(
                f"{len(runs)} runs of stripes in other lanes, at most {MOST_RUNS if self.stripe else 0} can be"
            )
        for run, before in zip(runs, stops, strict=False):
            if not before <= run.start < run.stop or not 0 <= run.lane < self.num_lanes:
                raise ValueError(
                    f"stripes {run.start}..{run.stop} behind {before} in lane {run.lane} of {self.num_lanes}"
                )


class Deal:
    """How many units of a sequence are kept in some lanes, in the unit of the placement's stripe."""

    def __init__(self, lanes: Lanes, placement: Placement) -> None:
        self._lanes, self._stripe, self._all = lanes, placement.stripe, lanes.all
        self._stays = placement.stays
        self._period = placement.num_lanes
        pattern = lanes.pattern if len(lanes.pattern) == self._period else lanes.pattern * self._period
        self._before = [0, *accumulate(pattern * 2)]  # lanes that are kept, of those below

    def kept(self, place: Place, units: int) -> int:
        """How many of the first ``units`` of a sequence are kept."""
        if self._all:
            return units
        if not self._stripe:
            return units if place.lane in self._lanes else 0
        count = self._by_rule(place.lane, units)
        for run in place.moved:
            low, high = (min(x * self._stripe, units) for x in (run.start, run.stop))
            count += (high - low) * (run.lane in self._lanes)
            count -= self._by_rule(place.lane, high) - self._by_rule(place.lane, low)
        return count

    def _by_rule(self, lane: int, units: int) -> int:
        if self._stays:
            return units if lane in self._lanes else 0
        whole, rest = divmod(units, self._stripe)
        rounds, more = divmod(whole, self._period)
        before = self._before
        stripes = rounds * before[self._period] + before[lane + more] - before[lane]
        return stripes * self._stripe + rest * (before[lane + more + 1] - before[lane + more])
