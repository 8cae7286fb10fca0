"""Sets of time as sorted, disjoint, non-empty (start, end) pairs. Every function is linear in its input, except for
sorting.
"""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Return the set that any pairs cover; empty and backward ones cover nothing."""
    out: Intervals = []
    for start, end in sorted(p for p in pairs if p[0] < p[1]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of both."""
    out: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the part of ``a`` that is not in ``b``."""
    out: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                out.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if start < end:
            out.append((start, end))
    return out


def total(a: Intervals) -> float:
    """Return the length of all intervals together."""
    return sum(end - start for start, end in a)
