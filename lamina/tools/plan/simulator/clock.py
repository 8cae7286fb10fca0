"""A clock that moves only in waits, and its scheduled events."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """A clock in seconds. Events that are due at the same time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass, with all events in it."""
        until = self.now + seconds
        while self.advance(until):
            pass

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Schedule ``work`` after ``delay_s``."""
        self._count += 1
        heapq.heappush(self._due, (self.now + delay_s, self._count, work))

    def advance(self, until: float = float("inf")) -> bool:
        """Move to the next event, or to ``until``. Returns True if there was an event."""
        if not self._due or self._due[0][0] > until:
            self.now = max(self.now, until) if until < float("inf") else self.now
            return False
        due, _, work = heapq.heappop(self._due)
        self.now = max(self.now, due)
        work()
        return True
