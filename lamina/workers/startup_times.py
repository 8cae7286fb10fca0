"""The seconds of each stage of a worker's start."""

from __future__ import annotations

import time


class StartupTimes:
    """The seconds of each stage of a start, by the stage's name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Begin a new stage; the time since the last one is not counted."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a stage, and begin the next one."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
