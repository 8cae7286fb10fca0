"""Fleets with a hybrid model, hit at any call of any process: each request gets its tokens."""

from __future__ import annotations

import pytest

from simulation.whole.run import check_fleet
from simulation.whole.scenario import hybrid_fleet


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("seed", range(3))
def test_every_stream_of_a_hybrid_model_goes_on(seed: int) -> None:
    assert check_fleet(hybrid_fleet(seed)).tokens
