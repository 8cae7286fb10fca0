"""The progress of a start, as a callback of (stage, done, total): a bar on stderr, or log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
OnProgress = Callable[[str, int, int], None]
SHORT_STAGE_S = 1.0  # a server logs only the end of shorter ones
LONG_STAGE_S = 3.0  # a start in Python logs no shorter stage
logger = logging.getLogger(__name__)


class StartupLog:
    """Logs a line for a stage of a start once it has lasted ``SHORT_STAGE_S``, and one at its end. A stage ends at its
    last report, when the next stage begins, or in ``end``.
    """

    def __init__(self, after_s: float = 0.0) -> None:
        """``after_s``: log nothing of a stage that takes less; 0: log the end of each."""
        self._after_s, self._lock = after_s, threading.Lock()
        self._stage, self._is_open, self._is_logged, self._since = "", False, False, time.monotonic()
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if stage != self._stage:
                self._end_stage()
                self._stage, self._is_open, self._is_logged = stage, True, False
                if done < total:
                    self._begin_stage(stage)
            if done >= total:  # reported several times if parts are smaller than the unit
                self._end_stage()

    def end(self) -> None:
        """End the last stage."""
        with self._lock:
            self._end_stage()

    def close(self) -> None:
        """Log nothing more: the start has ended or failed."""
        with self._lock:
            self._is_open = False
            if self._timer is not None:
                self._timer.cancel()

    def _begin_stage(self, stage: str) -> None:
        self._timer = threading.Timer(self._after_s or SHORT_STAGE_S, self._on_long, [stage])
        self._timer.daemon = True
        self._timer.start()

    def _on_long(self, stage: str) -> None:
        with self._lock:
            if self._is_open and self._stage == stage:
                self._is_logged = True
                self._log(stage)

    def _end_stage(self) -> None:
        if self._is_open:
            now = time.monotonic()
            if self._is_logged or not self._after_s:
                self._log(f"{self._stage}: done, {now - self._since:.1f} s")
            self._since, self._is_open = now, False
            if self._timer is not None:
                self._timer.cancel()

    def _log(self, text: str) -> None:
        if logger.hasHandlers():
            logger.info("%s", text)
        elif logging.lastResort is not None and logger.getEffectiveLevel() <= logging.WARNING:
            # As warnings of a program that has not set up logging, although this one is for information.
            logging.lastResort.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, f"lamina: {text}", (), None))


@contextlib.contextmanager
def start_progress(bar: bool) -> Iterator[OnProgress]:
    """Yield a callback that shows a start in Python. ``bar``: as bars; else long stages have log lines."""
    if bar:
        with progress_bar(True) as show:
            yield show
        return
    stages = StartupLog(LONG_STAGE_S)
    try:
        yield stages
        stages.end()
    finally:
        stages.close()


@contextlib.contextmanager
def progress_bar(enabled: bool) -> Iterator[OnProgress]:
    """Yield a callback that shows one bar per stage; it does nothing if ``enabled`` is False."""
    if not enabled:
        yield lambda stage, done, total: None
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def end_last() -> None:
        """Complete the last stage's bar: it has ended when the next one begins, or all have."""
        for bar in list(bars.values())[-1:]:
            bar.update(bar.total - bar.n)
            bar.close()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            end_last()
            bars[stage] = tqdm(total=total, desc=stage, bar_format="{desc:<22} {bar:30} {n_fmt}/{total_fmt} {elapsed}")
        bars[stage].total = total
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
        end_last()
    finally:
        for bar in bars.values():
            bar.close()


def counted(things: Iterable[T], make: bool | Callable[..., Any], total: int, text: str) -> Iterator[T]:
    """Yield ``things``, of which a bar counts ``total``. ``make``: True: on a terminal; or a function that makes the
    bar, called as tqdm is.
    """
    if make is True and not sys.stderr.isatty():
        yield from things
        return
    from tqdm import tqdm

    make = tqdm if isinstance(make, bool) else make
    with contextlib.closing(make(total=total, desc=text, dynamic_ncols=True)) as bar:
        for thing in things:
            yield thing
            bar.update()
