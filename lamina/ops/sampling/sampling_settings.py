"""The parameters of sampling as numbers that every implementation uses in the same way. No torch here."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import NamedTuple

from lamina.request import FILTERS

LEVEL_BITS = 24  # levels in a doubling of probability
LOWEST = -42 << LEVEL_BITS  # the lowest level
MASS_BITS = 40  # the best token has the mass 2^40
SHARE_BITS = 53  # bits of top_p, and of random numbers
ALL = 1 << 62  # top_k that keeps all tokens
# Factors between which a level is a number. Temperatures beyond them act like the nearest one that has such a factor.
LEAST_FACTOR, MOST_FACTOR = 2.0**-100, 2.0**127


class SamplerSettings(NamedTuple):
    """One row's temperature and filters, as the integers with which ``lamina.ops.sampling`` computes."""

    greedy: bool
    factor: float  # levels for 1 of logits; exact in fp32
    top_k: int  # at least 1
    share: int  # top_p * 2^53
    cut: int  # the lowest level that min_p keeps
    top_k_first: bool  # before top_p
    min_p_first: bool  # before top_p


GREEDY = SamplerSettings(True, 1.0, ALL, 1 << SHARE_BITS, LOWEST, True, True)


@lru_cache(1024)
def sampler_settings(
    temperature: float, top_k: int, top_p: float, min_p: float, order: tuple[str, ...]
) -> SamplerSettings:
    """Return the settings. ``temperature`` 0: greedy, and nothing else counts. ``top_k`` 0: all. ``order``: filter
    names. Raises ValueError for numbers out of range.
    """
    if temperature == 0.0:
        return GREEDY
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive number, or 0 for greedy, not {temperature}")
    if not (0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0 and top_k >= 0):
        raise ValueError(f"top_p {top_p}, min_p {min_p} or top_k {top_k} is out of range")
    if sorted(order) != sorted(FILTERS):
        raise ValueError(f"the order of filters must have each of {', '.join(FILTERS)} once, not {', '.join(order)}")
    factor = min(max((1 << LEVEL_BITS) / math.log(2.0) / temperature, LEAST_FACTOR), MOST_FACTOR)
    first = order[: order.index("top_p")]
    return SamplerSettings(
        greedy=False,
        factor=struct.unpack("f", struct.pack("f", factor))[0],
        top_k=top_k or ALL,
        share=max(1, round(top_p * (1 << SHARE_BITS))),
        cut=max(LOWEST, round(math.log2(min_p) * (1 << LEVEL_BITS))) if min_p else LOWEST,
        top_k_first="top_k" in first,
        min_p_first="min_p" in first,
    )
