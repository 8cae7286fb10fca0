"""How many recoveries there may be, and what counts as one. Policy: no I/O.

From a loss until all have met anew is one recovery, however many are lost meanwhile: so two that die at once count as
one, whenever the second is noticed. A worker that came in that time and is lost, too, counts as one more: else one that
dies whenever it starts would be replaced for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable

from lamina.protocol.executor import Clock

WINDOW_S = 600.0  # in which --max-recoveries counts


class RestartBudget:
    """The recoveries of the last ``WINDOW_S``, and the one that is under way."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.max_recoveries = most
        self._clock = clock
        self._begun: deque[float] = deque()  # when
        self._first: frozenset[Hashable] = frozenset()  # the members as the present recovery began
        self._counted: set[Hashable] = set()  # newcomers that were lost in it

    @property
    def in_progress(self) -> bool:
        """Whether there is one now."""
        return bool(self._first)

    def is_lost_again(self, lost: Hashable) -> bool:
        """Whether one that is lost has come in the recovery under way, and its loss is not counted yet."""
        return self.in_progress and lost not in self._first | self._counted

    def allows(self, lost: Collection[Hashable]) -> bool:
        """Whether there may be as many as ``lost`` takes; ``lost``: all that are lost now."""
        while self._begun and self._begun[0] < self._clock() - WINDOW_S:
            self._begun.popleft()
        return len(self._begun) + self._taken(lost) <= self.max_recoveries

    def begin(self, everybody: Iterable[Hashable], lost: Collection[Hashable], *, free: bool = False) -> None:
        """Note that ``lost`` of ``everybody`` are being replaced. This begins a recovery, or belongs to the one under
        way. ``free``: it does not count against ``max_recoveries``.
        """
        self._begun += [] if free else [self._clock()] * self._taken(lost)
        if self._first:
            self._counted |= {*lost} - self._first
        else:
            self._first = frozenset(everybody)

    def forgive(self) -> None:
        """The last recovery does not count against ``max_recoveries`` any more."""
        if self._begun:
            self._begun.pop()

    def end(self) -> None:
        """All have met anew."""
        self._first = frozenset()
        self._counted = set()

    def _taken(self, lost: Collection[Hashable]) -> int:
        return len({*lost} - self._first - self._counted) if self._first else 1
