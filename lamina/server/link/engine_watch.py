"""Whether the engine's process makes no way any more: it stands still by a signal, or its first thread, which does all,
waits for something that does not come. One that is idle, busy or slow, or that waits for its interpreter, wakes up.
"""

from __future__ import annotations

import signal
import time
from typing import Protocol

from lamina.engine.wire import Clock
from lamina.fleet.launchers import WorkerHandle
from lamina.fleet.standing import STOPPED_S, Asleep, StandingStill
from lamina.processes import naps_of
from lamina.protocol.options.engine import Deadlines

# By which others end a process: an operator, a supervisor, or the kernel where memory runs out.
ORDERS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


class EngineHandle(WorkerHandle, Protocol):
    """A started engine, as its server sees it."""

    @property
    def status(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs, and where nobody knows."""
        ...


class EngineWatch:
    """Looks a few times a second. ``hangs``: whether the last look has found that it hangs."""

    hangs = False

    def __init__(self, deadlines: Deadlines, clock: Clock = time.monotonic) -> None:
        self._step_s, self._start_s = deadlines.step_timeout_s, deadlines.start_timeout_s
        self._standing, self._asleep = StandingStill[int](clock), Asleep(clock)

    def look(self, engine: WorkerHandle, *, wanted: bool, recovering: bool) -> str:
        """Why it is to be ended, in words; "" = it is not. ``wanted``: whether somebody waits for it, and another one
        may take its place; ``recovering``: whether it may wait for a worker to start.
        """
        stands_still = self._standing.look([engine.pid] if wanted and engine.stopped else [])
        slept_s = self._asleep.look(engine.pid, naps_of(engine.pid) if wanted else None)
        if stands_still:
            return f"has been stopped for {STOPPED_S:g} s"
        self.hangs = slept_s >= (max(self._step_s, self._start_s) if recovering else self._step_s)
        if self.hangs:
            return f"hangs: it has not woken up for {slept_s:.1f} s, as an idle one does (--step-timeout-s)"
        return ""


def fate_of(engine: WorkerHandle) -> str:
    """How its process has ended, in words; its link ends a moment before that can be known."""
    deadline = time.monotonic() + 1.0
    while engine.fate() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.fate() or "closed its link"


def is_defect(engine: EngineHandle) -> bool:
    """Whether it has ended by a crash, or by an error of its own; not by a signal that somebody has sent."""
    return engine.status not in {None, 0, *ORDERS}
