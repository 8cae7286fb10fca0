"""Whether the engine's process makes no way any more: it stands still by a signal, or its first thread, which does all,
waits for something that does not come. One that is idle, busy or slow, or that waits for its interpreter, wakes up.
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

# By which others end a process: an operator, a supervisor, or the kernel where memory runs out.
ORDERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


class EngineHandle(WorkerHandle, Protocol):
    """A started engine, as its server sees it."""

    @property
    def status(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs, and where nobody knows."""
        ...


class EngineWatchdog:
    """Looks a few times a second. ``hangs``: whether the last look has found that it hangs."""

    hangs = False

    def __init__(self, deadlines: Deadlines, clock: Clock = time.monotonic) -> None:
        self._step_s, self._start_s = deadlines.step_timeout_s, deadlines.start_timeout_s
        self._standing, self._asleep = StallDetector[int](clock), HangDetector(clock)

    def check(self, engine: WorkerHandle, *, wanted: bool, recovering: bool) -> str:
        """Why it is to be ended, in words; "" = it is not. ``wanted``: whether somebody waits for it, and another one
        may take its place; ``recovering``: whether it may wait for a worker to start.
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
    """How its process has ended, in words; its link ends a moment before that can be known."""
    deadline = time.monotonic() + 1.0
    while engine.exit_reason() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.exit_reason() or "closed its link"


def is_defect(engine: EngineHandle) -> bool:
    """Whether it has ended by a crash, or by an error of its own; not by a signal that somebody has sent."""
    return engine.status not in {None, 0, *ORDERS}
