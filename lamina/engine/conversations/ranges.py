"""Ranges of a conversation's tokens, such as its discarded tokens. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Ranges = tuple[tuple[int, int], ...]  # first and stop of each, in order, and none touches another


def ranges_of(pairs: Sequence[Sequence[int]]) -> Ranges:
    """Ranges as a caller names them, joined. Raises ValueError for one that is no first and a stop behind it."""
    for pair in pairs:
        if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
            raise ValueError(
                f"kv_discard: {list(pair)} is no range of tokens, as [128, 256] is: a first one, a stop behind it"
            )
    return joined((int(first), int(stop)) for first, stop in pairs)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ``ranges``, which may come in any order."""
    apart = list[tuple[int, int]]()
    for first, stop in sorted(ranges):
        if apart and first <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(stop, apart[-1][1])
        else:
            apart.append((first, stop))
    return tuple(apart)


def count_of(ranges: Ranges, stop: int | None = None, first: int = 0) -> int:
    """Tokens in ``ranges``, from ``first`` on; with ``stop``, of those below that."""
    return sum(max(0, (b if stop is None else min(b, stop)) - max(a, first)) for a, b in ranges)


def gaps(ranges: Ranges, first: int) -> Iterator[tuple[int, int | None]]:
    """What is in none of ``ranges``, from ``first`` on; the last one has no end."""
    for a, b in ranges:
        if first < a:
            yield first, a
        first = max(first, b)
    yield first, None


def widened(ranges: Ranges, first: int, count: int) -> Ranges:
    """With the next ``count`` tokens from ``first`` on that are in none of ``ranges``."""
    more = list[tuple[int, int]]()
    for low, high in gaps(ranges, first):
        if not count:
            break
        stop = low + count if high is None else min(high, low + count)
        more.append((low, stop))
        count -= stop - low
    return joined([*ranges, *more])


def lacking(ranges: Ranges, wanted: Ranges) -> tuple[int, int] | None:
    """The first range of ``wanted`` that is in none of ``ranges``; None: all of it is."""
    for low, high in gaps(ranges, 0):
        for first, stop in wanted:
            a, b = max(first, low), stop if high is None else min(stop, high)
            if a < b:
                return a, b
    return None


def without(tokens: list[int], ranges: Ranges) -> list[int]:
    """Tokens that are in none of ``ranges``."""
    return [token for low, high in gaps(ranges, 0) for token in tokens[low:high]] if ranges else tokens
