"""Who has stood still for long enough to be given up. Policy: no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from lamina.protocol.executor import Clock

STALE_S = 1.0  # behind which a look says nothing of the one before
STOPPED_S = 1.75  # that a process may stand still by a signal while it is waited for: 2.5 s with the looks around it

Who = TypeVar("Who")


class StallDetector(Generic[Who]):
    """Looks a few times a second at who is stopped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[Who, float] = {}
        self._free: dict[Who, float] = {}  # the look before that
        self._looked = 0.0

    def update(self, stopped: Collection[Who]) -> list[Who]:
        """``stopped``: who stands still now, and is waited for. Those that have for STOPPED_S."""
        now, before, last = self._clock(), self._since, self._looked
        if now - last > STALE_S:  # who stands still now may have run meanwhile
            before = {}
        self._looked = now
        self._free = {who: self._free[who] if who in before else last for who in stopped}
        self._since = {who: before.get(who, now) for who in stopped}
        return [who for who, since in self._since.items() if now - since >= STOPPED_S]

    def longest_stall_s(self, who: Who) -> float:
        """For how long, at most, one of the last look has stood still and been waited for."""
        return self._looked - self._free[who]


class HangDetector:
    """Looks a few times a second at a thread that wakes up once a second at least, unless it hangs."""

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
