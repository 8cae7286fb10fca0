"""The place of each stripe, by rule and by exception, and which places cannot be: stripe by stripe, word for word."""

from __future__ import annotations

import pytest

from lamina.config.partition import KvShards
from lamina.protocol.kv_placement import MAX_RUNS, KvLocation, KvPlacement, ShardCounter, StripeRun

DEALT, STAYS = KvPlacement(3, 2), KvPlacement(3, 0)


def test_stripes_go_on_from_lane_to_lane_and_runs_lie_elsewhere() -> None:
    place = KvLocation(1, (StripeRun(2, 4, 0), StripeRun(6, 7, 1)))
    assert [DEALT.kv_shard_of(place, n) for n in range(9)] == [1, 2, 0, 0, 2, 0, 1, 2, 0]
    assert [DEALT.kv_shard_of(KvLocation(2), n) for n in range(4)] == [2, 0, 1, 2]
    assert [STAYS.kv_shard_of(KvLocation(2), n) for n in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("placement", "place", "words"),
    [
        (DEALT, KvLocation(3), "KV shard 3 of 3"),
        (DEALT, KvLocation(-1), "KV shard -1 of 3"),
        (STAYS, KvLocation(3), "KV shard 3 of 3"),
        (STAYS, KvLocation(0, (StripeRun(0, 1, 1),)), "1 runs of stripes in other KV shards, at most 0 can be"),
        (
            DEALT,
            KvLocation(0, tuple(StripeRun(n, n + 1, 1) for n in range(MAX_RUNS + 1))),
            "65 runs of stripes in other KV shards, at most 64 can be",
        ),
        (DEALT, KvLocation(0, (StripeRun(3, 3, 1),)), "stripes 3..3 after 0 in KV shard 1 of 3"),
        (DEALT, KvLocation(0, (StripeRun(-1, 1, 1),)), "stripes -1..1 after 0 in KV shard 1 of 3"),
        (DEALT, KvLocation(0, (StripeRun(0, 3, 1), StripeRun(2, 4, 0))), "stripes 2..4 after 3 in KV shard 0 of 3"),
        (DEALT, KvLocation(0, (StripeRun(0, 3, 3),)), "stripes 0..3 after 0 in KV shard 3 of 3"),
        (DEALT, KvLocation(0, (StripeRun(0, 3, -1),)), "stripes 0..3 after 0 in KV shard -1 of 3"),
    ],
)
def test_places_that_cannot_be(placement: KvPlacement, place: KvLocation, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        placement.check(place)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("placement", "place"),
    [
        (DEALT, KvLocation(0)),
        (DEALT, KvLocation(2, (StripeRun(0, 1, 0), StripeRun(1, 2, 2)))),
        (DEALT, KvLocation(0, tuple(StripeRun(n, n + 1, 1) for n in range(MAX_RUNS)))),
        (STAYS, KvLocation(2)),
    ],
)
def test_places_at_the_edge_can_be(placement: KvPlacement, place: KvLocation) -> None:
    placement.check(place)


@pytest.mark.parametrize("units", range(14))
def test_what_lies_in_a_lane_is_counted_with_what_has_moved_there(units: int) -> None:
    """Two units to a stripe. In KV shard 1 are 2 3 by rule, and 4 5 that were moved there; 8 9 were moved away."""
    place = KvLocation(0, (StripeRun(2, 3, 1), StripeRun(4, 5, 0)))
    kept = ShardCounter(KvShards((False, True, False)), DEALT).num_owned(place, units)
    assert kept == sum(n < units for n in (2, 3, 4, 5))
    assert ShardCounter(KvShards(), DEALT).num_owned(place, units) == units
    assert ShardCounter(KvShards((False,)), DEALT).num_owned(place, units) == 0
    assert [
        ShardCounter(KvShards((False, True, False)), STAYS).num_owned(KvLocation(lane), units) for lane in range(3)
    ] == [0, units, 0]
