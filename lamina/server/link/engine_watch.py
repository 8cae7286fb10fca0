"""Whether the engine's process makes no way any more: it stands still by a signal, or its first thread, which does all,
waits for something that does not come. One that is idle, busy or slow, or that waits for its interpreter, wakes up.
"""

from __future__ import annotations

import time

from lamina.engine.wire import Clock
from lamina.fleet.launchers import WorkerHandle
from lamina.fleet.standing import STOPPED_S, Asleep, StandingStill
from lamina.processes import naps_of
from lamina.protocol.options.engine import Deadlines


class EngineWatch:
    """Looks a few times a second."""

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
        if slept_s >= (max(self._step_s, self._start_s) if recovering else self._step_s):
            return f"hangs: it has not woken up for {slept_s:.1f} s, as an idle one does (--step-timeout-s)"
        return ""


def fate_of(engine: WorkerHandle) -> str:
    """How its process has ended, in words; its link ends a moment before that can be known."""
    deadline = time.monotonic() + 1.0
    while engine.fate() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.fate() or "closed its link"
