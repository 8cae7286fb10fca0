"""Ranges of a conversation's tokens, such as its dropped ones. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

TokenRanges = tuple[tuple[int, int], ...]  # sorted, disjoint (first, end) pairs that do not touch


def parse_ranges(pairs: Sequence[Sequence[int]]) -> TokenRanges:
    """Returns the union of a caller's [first, end) pairs. Raises ValueError for a pair that is no range."""
    for pair in pairs:
        if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
            raise ValueError(f"kv_discard: {list(pair)} is no range [first, end) of tokens, such as [128, 256]")
    return union((int(first), int(stop)) for first, stop in pairs)


def union(ranges: Iterable[tuple[int, int]]) -> TokenRanges:
    """The union of ``ranges``, which may come in any order."""
    disjoint = list[tuple[int, int]]()
    for first, stop in sorted(ranges):
        if disjoint and first <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(stop, disjoint[-1][1])
        else:
            disjoint.append((first, stop))
    return tuple(disjoint)


def count_tokens(ranges: TokenRanges, stop: int | None = None, first: int = 0) -> int:
    """Counts the tokens of ``ranges`` from ``first`` on, and below ``stop`` if given."""
    return sum(max(0, (b if stop is None else min(b, stop)) - max(a, first)) for a, b in ranges)


def gaps(ranges: TokenRanges, first: int) -> Iterator[tuple[int, int | None]]:
    """Yield the gaps between ``ranges``, from ``first`` on; the last one has no end."""
    for a, b in ranges:
        if first < a:
            yield first, a
        first = max(first, b)
    yield first, None


def extend(ranges: TokenRanges, first: int, count: int) -> TokenRanges:
    """Adds the next ``count`` tokens from ``first`` on that are in none of ``ranges``."""
    more = list[tuple[int, int]]()
    for low, high in gaps(ranges, first):
        if not count:
            break
        stop = low + count if high is None else min(high, low + count)
        more.append((low, stop))
        count -= stop - low
    return union([*ranges, *more])


def first_missing(ranges: TokenRanges, wanted: TokenRanges) -> tuple[int, int] | None:
    """The first range of ``wanted`` that ``ranges`` lack; None if they lack none."""
    for low, high in gaps(ranges, 0):
        for first, stop in wanted:
            a, b = max(first, low), stop if high is None else min(stop, high)
            if a < b:
                return a, b
    return None


def remove_ranges(tokens: list[int], ranges: TokenRanges) -> list[int]:
    """Returns the tokens that are in none of ``ranges``."""
    return [token for low, high in gaps(ranges, 0) for token in tokens[low:high]] if ranges else tokens
