"""What is left of a conversation that is longer than the context. Pure policy: no torch, no I/O, no clock.

The first tokens are kept, for models rest their attention on them; what follows is discarded, in whole steps, so that
most turns discard nothing (CachedAttention section 3.4, arXiv 2403.19708; sinks: StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lamina.kv.pages import PAGE
from lamina.protocol.options.overflow import OverflowOptions

from .ranges import Ranges, count_of, widened

ANSWER_PART = 4  # of the context one in so many tokens is kept free for an answer, where it may be so long


class Overflow(NamedTuple):
    """``limit``: tokens of a sequence; ``first``: that are kept; ``step``: that are discarded at once; ``unit``: those
    of the fewest whole pages that have as many in each lane.
    """

    limit: int
    first: int
    step: int
    unit: int

    def discarded(self, length: int, max_tokens: int | None, before: Ranges = ()) -> Ranges:
        """Tokens to discard of a prompt of ``length``, where those of ``before`` were discarded: these too, as long as
        it is longer.
        """
        before = before if before and length > before[-1][1] else ()
        part = self.limit // ANSWER_PART
        answer = part if max_tokens is None else min(max_tokens, part)
        lacks = length - count_of(before) + answer - self.limit
        return widened(before, self.first, -(-max(0, lacks) // self.step) * self.step)

    def check(self, ranges: Ranges, length: int) -> None:
        """Raises ValueError for tokens that cannot be discarded of a prompt of ``length``."""
        for first, stop in ranges:
            if not self.first <= first < stop < length:
                raise ValueError(
                    f"kv_discard: tokens {first} to {stop} of {length}: the first {self.first} (--keep-first) and the "
                    f"last one stay, so name some between"
                )
            if first % PAGE or (stop - first) % self.unit:
                raise ValueError(
                    f"kv_discard: tokens {first} to {stop}: begin at a multiple of {PAGE}, and take a multiple of "
                    f"{self.unit}: whole pages, one of each lane"
                )


def overflow_of(options: OverflowOptions, limit: int, lane_tokens: int) -> Overflow | None:
    """How prompts that are too long are truncated; None: they are refused. ``lane_tokens``: tokens of a stripe in every
    lane. Raises ValueError where a context of ``limit`` tokens is too short to be truncated.
    """
    if not options.truncates:
        return None
    unit = math.lcm(PAGE, max(1, lane_tokens))
    step = max(unit, int(limit * options.truncate_ratio) // unit * unit)
    first = options.keep_first
    if limit - limit // ANSWER_PART - step - first < 1:
        raise ValueError(
            f"--context-overflow truncate: a context of {limit} tokens has no room behind the {first} of --keep-first, "
            f"the {step} of --truncate-ratio {options.truncate_ratio:g} (whole steps of {unit}) and an answer: lower "
            f"those, or raise --max-model-len"
        )
    return Overflow(limit, first, step, unit)
