"""What is left of conversations that are longer than the context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.conversations.overflow import Overflow, overflow_of
from lamina.protocol.options.overflow import OverflowOptions

TRUNCATE = OverflowOptions(context_overflow="truncate")


def test_half_of_the_context_goes_at_once() -> None:
    """CachedAttention, figure 10: of a window of 4K the first 2K tokens, here behind a page that is kept."""
    of = overflow_of(TRUNCATE, 4096, 0)
    assert of == Overflow(4096, 128, 2048)
    assert [of.discarded(n, 1) for n in (4095, 4096, 6143, 6144)] == [0, 2048, 2048, 4096]
    assert [of.discarded(n, None) for n in (3072, 3073, 5120, 5121)] == [0, 2048, 2048, 4096], "of any length"
    assert of.discarded(4000, 97) == 2048
    assert of.discarded(3073, 4000) == 2048, "an answer has a quarter of the context, if it may be so long"
    assert of.discarded(3072, 4000) == 0
    assert of.left(list(range(4096)), 2048) == [*range(128), *range(2176, 4096)]


def test_lanes_and_pages_stay_whole() -> None:
    of = overflow_of(OverflowOptions(context_overflow="truncate", truncate_ratio=0.4, keep_first=0), 4096, 384)
    assert of == Overflow(4096, 0, 1536)
    assert overflow_of(OverflowOptions(), 4096, 0) is None
    with pytest.raises(ValueError, match="no room behind the 128 of --keep-first, the 256 of --truncate-ratio 0.5"):
        overflow_of(TRUNCATE, 512, 256)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 2000))
def test_a_conversation_always_fits_and_never_gets_back_what_it_lost(turns: list[int], max_tokens: int) -> None:
    of, said, before = Overflow(1024, 128, 384), list[int](), 0
    for count in turns:
        said += range(len(said), len(said) + count)
        now = of.discarded(len(said), max_tokens, before)
        left = of.left(said, now)
        assert before <= now
        assert now % of.step == 0
        assert len(left) < of.limit
        assert left[: of.first] == said[: of.first]
        assert left[-1] == said[-1]
        assert len(left) == len(said) - now
        before = now
