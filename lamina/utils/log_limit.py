"""The limit of repeated warnings, for the logs of all processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST = 10  # warnings of one text in WINDOW_S
WINDOW_S = 60.0
MOST_TEXTS = 1024  # texts that are remembered


@dataclass
class _Window:
    begun_s: float
    passed: int = 0
    held_back: int = 0


class RepeatLimit(logging.Filter):
    """Passes at most MOST warnings or errors of one text, whatever its values, in WINDOW_S. The next one after that has
    the number of those that were held back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            note = self._note((record.name, str(record.msg)))
        if note:
            record.msg, record.args = f"{record.getMessage()} ({note})", None
        return note is not None

    def _note(self, text: tuple[str, str]) -> str | None:
        """Return what to add to a line; None if it is held back."""
        now, before = self._clock(), self._windows.get(text)
        if before is not None and now < before.begun_s + WINDOW_S:
            before.passed += 1
            if before.passed > MOST:
                before.held_back += 1
                return None
            return "" if before.passed < MOST else f"more like it are counted for {WINDOW_S:g} s"
        self._windows.pop(text, None)  # texts are in the order of their windows
        self._windows[text] = _Window(now, passed=1)
        if len(self._windows) > MOST_TEXTS:
            del self._windows[next(iter(self._windows))]
        return f"{before.held_back} more like it were held back" if before and before.held_back else ""


def limit_repeats() -> None:
    """Limit what the root logger's handlers write and, where it has none, the handler of last resort."""
    last = [] if logging.lastResort is None else [logging.lastResort]
    limit = RepeatLimit()
    for handler in logging.getLogger().handlers or last:
        handler.addFilter(limit)
