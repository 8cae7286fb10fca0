"""The numbers that every sampler takes, to the last bit: they are what makes all of them draw alike."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from lamina.ops.sampling.sampling_settings import ALL, GREEDY, LOWEST, SamplerSettings, sampler_settings
from lamina.request import FILTERS

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "order": FILTERS}
LEVEL = 1 << 24  # of a doubling


def made(**changes: Any) -> SamplerSettings:
    return sampler_settings(**{**PLAIN, **changes})


def test_temperature_0_is_greedy_whatever_else_is_asked() -> None:
    assert made(temperature=0.0, top_k=-7, order=()) == GREEDY
    assert SamplerSettings(True, 1.0, ALL, 1 << 53, -42 * LEVEL, True, True) == GREEDY
    assert not made().greedy


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_factor_is_levels_to_1_of_logits_in_fp32(temperature: float) -> None:
    assert made(temperature=temperature).factor == float(np.float32(LEVEL / math.log(2.0) / temperature))


def test_temperatures_without_a_factor_act_as_the_nearest_that_has_one() -> None:
    assert made(temperature=1e-300).factor == 2.0**127
    assert made(temperature=1e300).factor == 2.0**-100


@pytest.mark.parametrize(("top_k", "kept"), [(0, ALL), (1, 1), (50, 50)])
def test_top_k(top_k: int, kept: int) -> None:
    assert made(top_k=top_k).top_k == kept
    assert ALL == 1 << 62


@pytest.mark.parametrize(("top_p", "share"), [(1.0, 1 << 53), (0.5, 1 << 52), (2.0**-53, 1), (1e-300, 1)])
def test_top_p_is_a_share_of_2_to_the_53(top_p: float, share: int) -> None:
    assert made(top_p=top_p).share == share


@pytest.mark.parametrize(
    ("min_p", "cut"), [(0.0, LOWEST), (1.0, 0), (0.5, -LEVEL), (0.125, -3 * LEVEL), (1e-300, LOWEST)]
)
def test_min_p_is_a_level(min_p: float, cut: int) -> None:
    assert made(min_p=min_p).cut == cut
    assert LOWEST == -42 * LEVEL


@pytest.mark.parametrize("order", list(permutations(FILTERS)))
def test_what_comes_before_top_p(order: tuple[str, ...]) -> None:
    found = made(order=order)
    assert found.top_k_first == (order.index("top_k") < order.index("top_p"))
    assert found.min_p_first == (order.index("min_p") < order.index("top_p"))


TEMPERATURE = "temperature must be a positive number, or 0 for greedy, not {}"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"temperature": -1.0}, TEMPERATURE.format(-1.0)),
        ({"temperature": math.inf}, TEMPERATURE.format("inf")),
        ({"temperature": math.nan}, TEMPERATURE.format("nan")),
        ({"top_p": 0.0}, "top_p 0.0, min_p 0.0 or top_k 0 is out of range"),
        ({"top_p": 1.01}, "top_p 1.01, min_p 0.0 or top_k 0 is out of range"),
        ({"min_p": -0.1}, "top_p 1.0, min_p -0.1 or top_k 0 is out of range"),
        ({"min_p": 1.1}, "top_p 1.0, min_p 1.1 or top_k 0 is out of range"),
        ({"top_k": -1}, "top_p 1.0, min_p 0.0 or top_k -1 is out of range"),
        (
            {"order": ("top_k", "top_p")},
            f"the order of filters must have each of {', '.join(FILTERS)} once, not top_k, top_p",
        ),
    ],
)
def test_what_is_out_of_range_is_named(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        made(**bad)
    assert str(refused.value) == words
