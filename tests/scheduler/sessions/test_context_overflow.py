"""The part that is left of conversations longer than the context.

Covers: lamina/scheduler/sessions/token_ranges.py.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.config.context_overflow import OverflowOptions
from lamina.scheduler.sessions.context_overflow import ContextOverflow, build_context_overflow
from lamina.scheduler.sessions.token_ranges import (
    TokenRanges,
    count_tokens,
    extend,
    first_missing,
    remove_ranges,
    union,
)

TRUNCATE = OverflowOptions(context_overflow="truncate")


def test_half_of_the_context_goes_at_once() -> None:
    """CachedAttention, figure 10: of a window of 4K the first 2K tokens go, here after a page that is kept."""
    of = build_context_overflow(TRUNCATE, 4096, 0)
    assert of == ContextOverflow(4096, 128, 2048, 128)
    none, half, all_of_it = (), ((128, 2176),), ((128, 4224),)
    assert [of.ranges_to_discard(n, 1) for n in (4095, 4096, 6143, 6144)] == [none, half, half, all_of_it]
    assert [of.ranges_to_discard(n, None) for n in (3072, 3073, 5120, 5121)] == [none, half, half, all_of_it], (
        "of any length"
    )
    assert of.ranges_to_discard(4000, 97) == half
    assert of.ranges_to_discard(3073, 4000) == half, "an answer has a quarter of the context, if it may be so long"
    assert of.ranges_to_discard(3072, 4000) == none
    assert remove_ranges(list(range(4096)), half) == [*range(128), *range(2176, 4096)]


def test_what_was_named_is_discarded_and_more_where_that_is_not_enough() -> None:
    of = build_context_overflow(OverflowOptions(context_overflow="truncate", truncate_ratio=0.4), 4096, 256)
    assert of == ContextOverflow(4096, 128, 1536, 256)
    named = ((256, 512), (1024, 1280))
    assert of.ranges_to_discard(2000, 1, named) == named
    assert of.ranges_to_discard(4607, 1, named) == named, "512 less"
    assert of.ranges_to_discard(4608, 1, named) == ((128, 2176),), "1,536 of what was left behind the first page"
    assert of.ranges_to_discard(1280, 1, named) == (), "a shorter one is another conversation"
    of.check(named, 2000)
    for ranges, words in (
        (((0, 256),), "the first 128"),
        (((1024, 1280),), "of 1280"),
        (((256, 256),), "so name some between"),
        (((256, 384),), "a multiple of 256"),
        (((257, 513),), "begin at a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=words):
            of.check(ranges, 1280)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)), st.integers(0, 30), st.integers(0, 30))
def test_ranges_are_sets_of_tokens(pairs: list[list[int]], first: int, count: int) -> None:
    """Compares ranges with sets."""
    pairs = [p for p in pairs if p[0] < p[1]]
    ranges, tokens = union((a, b) for a, b in pairs), {n for a, b in pairs for n in range(a, b)}
    assert {n for a, b in ranges for n in range(a, b)} == tokens
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
    assert count_tokens(ranges) == len(tokens)
    assert count_tokens(ranges, 30, first) == len([n for n in tokens if first <= n < 30])
    assert count_tokens(ranges, first) == len([n for n in tokens if n < first])
    assert remove_ranges(list(range(50)), ranges) == [n for n in range(50) if n not in tokens]
    more = extend(ranges, first, count)
    free = [n for n in range(200) if n >= first and n not in tokens][:count]
    assert {n for a, b in more for n in range(a, b)} == tokens | {*free}
    lacks = first_missing(ranges, more)
    assert (lacks is None) == (not free)
    if lacks:
        assert {*range(*lacks)} <= {*free}
        assert lacks[0] == free[0]
    assert first_missing(more, ranges) is None


def test_lanes_and_pages_stay_whole() -> None:
    of = build_context_overflow(
        OverflowOptions(context_overflow="truncate", truncate_ratio=0.4, keep_first=0), 4096, 384
    )
    assert of == ContextOverflow(4096, 0, 1536, 384)
    assert build_context_overflow(OverflowOptions(), 4096, 0) is None
    with pytest.raises(ValueError, match="no room after keep-first=128, the 256 of ratio=0.5"):
        build_context_overflow(TRUNCATE, 512, 256)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 2000))
def test_a_conversation_always_fits_and_never_gets_back_what_it_lost(turns: list[int], max_tokens: int) -> None:
    of, said, before = ContextOverflow(1024, 128, 384, 128), list[int](), TokenRanges()
    for count in turns:
        said += range(len(said), len(said) + count)
        now = of.ranges_to_discard(len(said), max_tokens, before)
        left, gone = remove_ranges(said, now), count_tokens(now)
        assert first_missing(now, before) is None
        assert gone % of.step == 0
        assert len(left) < of.limit
        assert left[: of.first] == said[: of.first]
        assert left[-1] == said[-1]
        assert len(left) == len(said) - gone
        before = now
