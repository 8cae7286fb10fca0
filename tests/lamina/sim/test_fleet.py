"""The whole fleet, processes of which die at any call: each request gets its tokens, once."""

from __future__ import annotations

import pytest

from lamina.sim.whole.run import check_fleet, play_fleet
from lamina.sim.whole.scenario import fleet_scenario

SEEDS, PARTS = 12, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_stream_goes_on(part: int) -> None:
    deaths = sum(check_fleet(fleet_scenario(seed)).deaths for seed in range(part, SEEDS, PARTS))
    assert deaths


def test_a_scenario_is_played_again_as_it_was() -> None:
    """To the last digit of its clock."""
    of = fleet_scenario(1)
    assert play_fleet(of) == play_fleet(of)
