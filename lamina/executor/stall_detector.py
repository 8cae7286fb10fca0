"""Detectors of stopped processes and of hung threads. Policy: no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from lamina.protocol.executor import Clock

STALE_S = 1.0  # the longest time between two calls that belong together
STOPPED_S = 1.75  # the longest stop by a signal while a process is waited for; 2.5 s with the looks around it

Who = TypeVar("Who")


class StallDetector(Generic[Who]):
    """Finds processes that stay stopped. It is called a few times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[Who, float] = {}
        self._free: dict[Who, float] = {}  # the last look at which it was not stopped
        self._looked = 0.0

    def update(self, stopped: Collection[Who]) -> list[Who]:
        """Return the processes stopped for STOPPED_S. ``stopped``: those that are stopped now, and waited for."""
        now, before, last = self._clock(), self._since, self._looked
        if now - last > STALE_S:  # a process stopped now may have run meanwhile
            before = {}
        self._looked = now
        self._free = {who: self._free[who] if who in before else last for who in stopped}
        self._since = {who: before.get(who, now) for who in stopped}
        return [who for who, since in self._since.items() if now - since >= STOPPED_S]

    def longest_stall_s(self, who: Who) -> float:
        """Return for how many seconds, at most, a process of the last look has been stopped and waited for."""
        return self._looked - self._free[who]


class HangDetector:
    """Finds a hung thread, which should wake up at least once a second. It is called a few times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked = self._slept_s = 0.0
        self._last: tuple[int, int] | None = None

    def update(self, who: int, num_sleeps: int | None) -> float:
        """Return the seconds for which ``who`` has slept without a break.

        ``num_sleeps``: how often it has gone to sleep so far; None: it does not sleep now. Time between two late calls
        hardly counts, since no process may have run then.
        """
        now, state = self._clock(), None if num_sleeps is None else (who, num_sleeps)
        passed = min(now - self._looked, STALE_S)
        self._slept_s = self._slept_s + passed if state is not None and state == self._last else 0.0
        self._looked, self._last = now, state
        return self._slept_s
