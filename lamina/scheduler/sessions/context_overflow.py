"""Context overflow: drops tokens of a conversation that is longer than the context.

The first tokens are kept as attention sinks (StreamingLLM, arXiv 2309.17453). Tokens after these are dropped in large
steps, so that most turns drop nothing (CachedAttention section 3.4, arXiv 2403.19708). Pure policy: no torch, no I/O,
no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lamina.config.context_overflow import OverflowOptions
from lamina.kv.pages import PAGE

from .token_ranges import TokenRanges, count_tokens, extend

ANSWER_DIVISOR = 4  # of the context one in so many tokens is kept free for an answer, where it may be so long


class ContextOverflow(NamedTuple):
    """Numbers of tokens. ``limit``: the longest sequence. ``first``: the kept first tokens. ``step``: dropped at once.

    ``unit``: the smallest number of whole pages with equally many in each KV shard, in tokens.
    """

    limit: int
    first: int
    step: int
    unit: int

    def ranges_to_discard(self, length: int, max_tokens: int | None, before: TokenRanges = ()) -> TokenRanges:
        """The tokens to drop from a prompt of ``length``, including those that were dropped ``before``."""
        before = before if before and length > before[-1][1] else ()
        part = self.limit // ANSWER_DIVISOR
        answer = part if max_tokens is None else min(max_tokens, part)
        lacks = length - count_tokens(before) + answer - self.limit
        return extend(before, self.first, -(-max(0, lacks) // self.step) * self.step)

    def check(self, ranges: TokenRanges, length: int) -> None:
        """Raises ValueError for tokens that cannot be discarded of a prompt of ``length``."""
        for first, stop in ranges:
            if not self.first <= first < stop < length:
                raise ValueError(
                    f"kv_discard: tokens {first} to {stop} of {length}: the first {self.first} (keep-first) and the "
                    f"last one stay, so name some between"
                )
            if first % PAGE or (stop - first) % self.unit:
                raise ValueError(
                    f"kv_discard: tokens {first} to {stop}: begin at a multiple of {PAGE}, and take a multiple of "
                    f"{self.unit}: whole pages, equally many in each KV shard"
                )


def build_context_overflow(options: OverflowOptions, limit: int, stripe_round_tokens: int) -> ContextOverflow | None:
    """Returns the rule for truncation; None: long prompts are refused.

    ``stripe_round_tokens``: tokens of one stripe in every KV shard. Raises ValueError if a context of ``limit`` tokens
    is too short to be truncated.
    """
    if not options.truncates_context:
        return None
    unit = math.lcm(PAGE, max(1, stripe_round_tokens))
    step = max(unit, int(limit * options.truncate_ratio) // unit * unit)
    first = options.keep_first
    if limit - limit // ANSWER_DIVISOR - step - first < 1:
        raise ValueError(
            f"--context-overflow truncate: a context of {limit} tokens has no room after keep-first={first}, "
            f"the {step} of ratio={options.truncate_ratio:g} (whole steps of {unit}) and an answer: lower those, or "
            "raise --max-model-len"
        )
    return ContextOverflow(limit, first, step, unit)
