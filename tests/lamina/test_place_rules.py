"""Where each stripe lies, by rule and by exception, and which places cannot be: stripe by stripe, word for word."""

from __future__ import annotations

import pytest

from lamina.protocol.partition import Lanes
from lamina.protocol.placement import MOST_RUNS, Deal, Place, Placement, Run

DEALT, STAYS = Placement(3, 2), Placement(3, 0)


def test_stripes_go_on_from_lane_to_lane_and_runs_lie_elsewhere() -> None:
    place = Place(1, (Run(2, 4, 0), Run(6, 7, 1)))
    assert [DEALT.lane(place, n) for n in range(9)] == [1, 2, 0, 0, 2, 0, 1, 2, 0]
    assert [DEALT.lane(Place(2), n) for n in range(4)] == [2, 0, 1, 2]
    assert [STAYS.lane(Place(2), n) for n in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("placement", "place", "words"),
    [
        (DEALT, Place(3), "lane 3 of 3"),
        (DEALT, Place(-1), "lane -1 of 3"),
        (STAYS, Place(3), "lane 3 of 3"),
        (STAYS, Place(0, (Run(0, 1, 1),)), "1 runs of stripes in other lanes, at most 0 can be"),
        (
            DEALT,
            Place(0, tuple(Run(n, n + 1, 1) for n in range(MOST_RUNS + 1))),
            "65 runs of stripes in other lanes, at most 64 can be",
        ),
        (DEALT, Place(0, (Run(3, 3, 1),)), "stripes 3..3 behind 0 in lane 1 of 3"),
        (DEALT, Place(0, (Run(-1, 1, 1),)), "stripes -1..1 behind 0 in lane 1 of 3"),
        (DEALT, Place(0, (Run(0, 3, 1), Run(2, 4, 0))), "stripes 2..4 behind 3 in lane 0 of 3"),
        (DEALT, Place(0, (Run(0, 3, 3),)), "stripes 0..3 behind 0 in lane 3 of 3"),
        (DEALT, Place(0, (Run(0, 3, -1),)), "stripes 0..3 behind 0 in lane -1 of 3"),
    ],
)
def test_places_that_cannot_be(placement: Placement, place: Place, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        placement.check(place)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("placement", "place"),
    [
        (DEALT, Place(0)),
        (DEALT, Place(2, (Run(0, 1, 0), Run(1, 2, 2)))),
        (DEALT, Place(0, tuple(Run(n, n + 1, 1) for n in range(MOST_RUNS)))),
        (STAYS, Place(2)),
    ],
)
def test_places_at_the_edge_can_be(placement: Placement, place: Place) -> None:
    placement.check(place)


@pytest.mark.parametrize("units", range(14))
def test_what_lies_in_a_lane_is_counted_with_what_has_moved_there(units: int) -> None:
    """Two units to a stripe. In lane 1 are 2 3 by rule, and 4 5 that were moved there; 8 9 were moved away."""
    place = Place(0, (Run(2, 3, 1), Run(4, 5, 0)))
    kept = Deal(Lanes((False, True, False)), DEALT).kept(place, units)
    assert kept == sum(n < units for n in (2, 3, 4, 5))
    assert Deal(Lanes(), DEALT).kept(place, units) == units
    assert Deal(Lanes((False,)), DEALT).kept(place, units) == 0
    assert [Deal(Lanes((False, True, False)), STAYS).kept(Place(lane), units) for lane in range(3)] == [0, units, 0]
