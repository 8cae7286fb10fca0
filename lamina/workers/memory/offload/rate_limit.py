"""How fast pages are saved while steps go on: a thread that saves takes cores from the threads that a step waits for.

Saving has no deadline, as blocks that are needed meanwhile are copied. So while rounds are served and cores are short,
the thread that saves takes a small share of one: behind each page it rests. It keeps its priority meanwhile: who holds
Python's lock must not wait for a core behind everybody else. Where cores are free, or nothing else is to be done, it
goes on at once. All rests of a task end in time for its report, so that the driver does not take the worker for one
that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

SAVE_CPU_SHARE = 1 / 32  # of a core
SERVED_S = 1.0  # behind a round, the next one may still come
LOOK_S = 2.5  # between two looks at the pressure, which the kernel counts anew every 2 s
SHORTAGE_THRESHOLD = 0.02  # of the time some task has waited for a core: cores are short
MAX_REST_S = 0.5  # of one rest
TASK_S = 5.0  # of all rests of one task
PRESSURE = "/proc/pressure/cpu"


class SaveRateLimiter:
    """Of one epoch. ``begin`` and ``wait`` are for the thread that saves, all else for any."""

    def __init__(
        self, pressure: Callable[[], float | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``pressure``: seconds for which some task has waited for a core, since whenever; None: nobody knows."""
        self._pressure, self._clock = pressure or cpu_pressure_s, clock
        self._served = -SERVED_S  # when a round came last
        self._looked, self._waited, self._short = clock(), self._pressure(), True
        self._used = 0.0  # seconds of CPU, at the end of the last rest
        self._left = TASK_S  # of rests, for the task under way
        self._over = threading.Event()

    def begin(self) -> None:
        """A task that ends with a report."""
        self._left = TASK_S

    def on_round(self) -> None:
        """A round has come."""
        self._served = self._clock()

    def stop(self) -> None:
        """No rest from now on."""
        self._over.set()

    def wait(self) -> float:
        """Behind a page: as long as is due, seconds. It is over at once behind ``stop``."""
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
    """As the kernel counts it for this host; None where it does not."""
    with suppress(OSError, ValueError, IndexError), open(PRESSURE, encoding="ascii") as file:
        return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    return None
