"""The limit of repeated warnings, for the logs of all processes."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

MOST = 10  # warnings of one text in WINDOW_S
WINDOW_S = 60.0
MOST_TEXTS = 1024  # texts that are remembered
_WORD = re.compile(r"(?<!%)\b[a-z]{2}", re.IGNORECASE)


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
        self._windows: dict[tuple[object, ...], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            note = self._note(_text_of(record))
        if note:
            record.msg = f"{record.msg} ({note})"
        return note is not None

    def _note(self, text: tuple[object, ...]) -> str | None:
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


def _text_of(record: logging.LogRecord) -> tuple[object, ...]:
    """Return what equal warnings share: the text without its values, and the type and the line of an exception. Where
    the text is all values, such as "%s", these count, but for their numbers.
    """
    text = str(record.msg)
    values = "" if _WORD.search(text) else re.sub(r"\d+", "0", " ".join(map(str, record.args or ())))
    kind, _, trace = record.exc_info or (None, None, None)
    frames = [] if trace is None else [*traceback.walk_tb(trace)]
    return record.name, text, values, kind, (frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else None


def limit_repeats() -> None:
    """Limit what the root logger's handlers write and, where it has none, the handler of last resort."""
    last = [] if logging.lastResort is None else [logging.lastResort]
    limit = RepeatLimit()
    for handler in logging.getLogger().handlers or last:
        handler.addFilter(limit)
