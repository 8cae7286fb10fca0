"""The limit on the number of recoveries. Policy: no I/O.

One recovery lasts from a loss until all have reconnected, however many workers are lost meanwhile. So two workers that
die at once count as one, whenever the second loss is noticed. A replacement that is itself lost in that time counts as
one more. Without this rule, a worker that dies at every start would be replaced for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable

from lamina.protocol.executor import Clock

WINDOW_S = 600.0  # in which --max-recoveries counts


class RestartBudget:
    """The recoveries of the last ``WINDOW_S``, and the one in progress."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.max_recoveries = most
        self._clock = clock
        self._begun: deque[float] = deque()  # times
        self._first: frozenset[Hashable] = frozenset()  # the members when the present recovery began
        self._counted: set[Hashable] = set()  # replacements that were lost in it

    @property
    def in_progress(self) -> bool:
        """Return whether there is a recovery now."""
        return bool(self._first)

    def is_lost_again(self, lost: Hashable) -> bool:
        """Return whether a lost worker was started in this recovery, and its loss is not counted yet."""
        return self.in_progress and lost not in self._first | self._counted

    def allows(self, lost: Collection[Hashable]) -> bool:
        """Return whether as many recoveries are allowed as ``lost`` requires, all workers that are lost now."""
        while self._begun and self._begun[0] < self._clock() - WINDOW_S:
            self._begun.popleft()
        return len(self._begun) + self._taken(lost) <= self.max_recoveries

    def begin(self, everybody: Iterable[Hashable], lost: Collection[Hashable], *, free: bool = False) -> None:
        """Record that ``lost`` of ``everybody`` are being replaced. This begins a recovery, or belongs to the one in
        progress. ``free``: it does not count against ``max_recoveries``.
        """
        self._begun += [] if free else [self._clock()] * self._taken(lost)
        if self._first:
            self._counted |= {*lost} - self._first
        else:
            self._first = frozenset(everybody)

    def forgive(self) -> None:
        """Remove the last recovery from the count."""
        if self._begun:
            self._begun.pop()

    def end(self) -> None:
        """End the recovery: all have reconnected."""
        self._first = frozenset()
        self._counted = set()

    def _taken(self, lost: Collection[Hashable]) -> int:
        return len({*lost} - self._first - self._counted) if self._first else 1
