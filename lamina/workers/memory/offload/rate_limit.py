"""The rate at which pages are saved while steps continue: a saving thread uses cores that a step's threads wait for.

Saving has no deadline, as blocks that are freed meanwhile are copied. So while rounds are served and cores are short,
the saving thread uses a small share of a core: it rests after each page. It keeps its priority: a thread that holds
Python's lock must not wait for a core after all others. If cores are free, or there is no other work, it continues at
once. All rests of a task end in time for its report, so that the driver does not consider the worker hung.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

SAVE_CPU_SHARE = 1 / 32  # share of a core
SERVED_S = 1.0  # seconds after a round in which the next one may still come
LOOK_S = 2.5  # seconds between two checks of the pressure, which the kernel updates every 2 s
SHORTAGE_THRESHOLD = 0.02  # share of time in which some task waited for a core; above it, cores are short
MAX_REST_S = 0.5  # seconds of one rest
TASK_S = 5.0  # seconds of all rests of one task
PRESSURE = "/proc/pressure/cpu"


class SaveRateLimiter:
    """The rests of one epoch. Only the saving thread calls ``begin`` and ``wait``; any thread may call other
    methods.
    """

    def __init__(
        self, pressure: Callable[[], float | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``pressure``: returns the seconds, since any fixed time, in which some task waited for a core; None if
        unknown.
        """
        self._pressure, self._clock = pressure or cpu_pressure_s, clock
        self._served = -SERVED_S  # when the last round came
        self._looked, self._waited, self._short = clock(), self._pressure(), True
        self._used = 0.0  # seconds of CPU at the end of the last rest
        self._left = TASK_S  # seconds of rests left for the present task
        self._over = threading.Event()

    def begin(self) -> None:
        """Begin a task that ends with a report."""
        self._left = TASK_S

    def on_round(self) -> None:
        """Note that a round has come."""
        self._served = self._clock()

    def stop(self) -> None:
        """End the present rest, and rest no more."""
        self._over.set()

    def wait(self) -> float:
        """Rest after a page as long as is due, and return the seconds; returns at once after ``stop``."""
        used = time.thread_time() - self._used
        due = (
            min(MAX_REST_S, self._left, used * (1 / SAVE_CPU_SHARE - 1))
            if self._clock() - self._served < SERVED_S
            else 0.0
        )
        if due and self._cores_are_short():
            self._over.wait(due)
            self._left -= due
        else:
            due = 0.0
        self._used = time.thread_time()
        return due

    def _cores_are_short(self) -> bool:
        now = self._clock()
        if now - self._looked >= LOOK_S:
            before, self._waited = self._waited, self._pressure()
            known = before is not None and self._waited is not None
            self._short = not known or self._waited - before > SHORTAGE_THRESHOLD * (now - self._looked)  # type: ignore[operator]
            self._looked = now
        return self._short


def cpu_pressure_s() -> float | None:
    """Return the pressure that the kernel counts for this host; None if it does not."""
    with suppress(OSError, ValueError, IndexError), open(PRESSURE, encoding="ascii") as file:
        return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    return None
