"""Detects an engine process that makes no progress: a signal has stopped it, or its main thread waits for something
that does not come. An idle, busy or slow engine, or one that waits for Python's lock, still wakes up.
"""

from __future__ import annotations

import signal
import time
from typing import Protocol

from lamina.config.engine_config import Deadlines
from lamina.executor.launchers import WorkerHandle
from lamina.executor.stall_detector import STOPPED_S, HangDetector, StallDetector
from lamina.protocol.executor import Clock
from lamina.utils.proc import voluntary_switches_of

# Signals by which an operator, a supervisor or the kernel (out of memory) ends a process.
ORDERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


class EngineHandle(WorkerHandle, Protocol):
    """A started engine, as its server sees it."""

    @property
    def status(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs, and if the status is unknown."""
        ...


class EngineWatchdog:
    """Checks the engine a few times a second. ``hangs``: whether the last check found that it hangs."""

    hangs = False

    def __init__(self, deadlines: Deadlines, clock: Clock = time.monotonic) -> None:
        self._step_s, self._start_s = deadlines.step_timeout_s, deadlines.start_timeout_s
        self._standing, self._asleep = StallDetector[int](clock), HangDetector(clock)

    def check(self, engine: WorkerHandle, *, wanted: bool, recovering: bool) -> str:
        """Return why the engine must be ended, or "". ``wanted``: whether requests wait for it and another engine may
        replace it; ``recovering``: whether it may wait for a worker to start.
        """
        stands_still = self._standing.update([engine.pid] if wanted and engine.is_stopped else [])
        slept_s = self._asleep.update(engine.pid, voluntary_switches_of(engine.pid) if wanted else None)
        if stands_still:
            return f"has been stopped for {STOPPED_S:g} s"
        self.hangs = slept_s >= (max(self._step_s, self._start_s) if recovering else self._step_s)
        if self.hangs:
            return f"hangs: it has not woken up for {slept_s:.1f} s, as an idle one does (--step-timeout-s)"
        return ""


def exit_reason_of(engine: WorkerHandle) -> str:
    """Return how the process has ended, in words. Waits up to a second, as its link ends before its status is known."""
    deadline = time.monotonic() + 1.0
    while engine.exit_reason() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.exit_reason() or "closed its link"


def is_defect(engine: EngineHandle) -> bool:
    """Return True if the engine ended by a crash or an error of its own, not by a signal from outside."""
    return engine.status not in {None, 0, *ORDERS}
