"""The replacement of memory workers that got SIGTERM: new workers get their KV before they end."""

from __future__ import annotations

import logging
import time

from lamina.protocol.executor import Clock
from lamina.protocol.reshard import TerminationNotice

from .elastic import MemoryResizer
from .worker_registry import RegisteredWorker, WorkerRegistry

log = logging.getLogger(__name__)
GATHER_S = 0.25  # after the first notice, for other workers of its host, which get SIGTERM one by one


class TerminationNotices:
    """Replaces workers that got SIGTERM, those of one moment together. One that cannot be replaced stays until it ends,
    and is then lost.
    """

    def __init__(self, registry: WorkerRegistry, elastic: MemoryResizer, clock: Clock = time.monotonic) -> None:
        self._registry, self._resizer, self._clock = registry, elastic, clock
        self._leaving: dict[RegisteredWorker, float] = {}  # workers that have sent a notice, and when

    def poll(self) -> None:
        """Begin to replace workers that got SIGTERM, unless memory workers come or go. Does not wait."""
        self._resizer.reap()
        self._gather()
        self._registry.has_notices = bool(self._leaving)
        if self._resizer.in_progress or not self._leaving or self._clock() - min(self._leaving.values()) < GATHER_S:
            return
        leaving, self._leaving = list(self._leaving), {}
        if (error := self._replace(leaving)) and len(leaving) > 1:
            self._leaving = dict.fromkeys(leaving[1:], 0.0)  # one by one, as memory does not suffice for two of each
            leaving, error = leaving[:1], self._replace(leaving[:1])
        names = ", ".join(member.name for member in leaving)
        if error:
            log.warning("%s: asked to end, and keeps its KV until it ends: %s", names, error)
        else:
            log.warning("%s: asked to end; another one takes its KV, and all requests go on", names)

    def _gather(self) -> None:
        there = self._registry.memory
        self._leaving = {member: at for member, at in self._leaving.items() if member in there}
        for member in there:
            notices = [message for message in member.inbox if isinstance(message, TerminationNotice)]
            for message in notices:
                member.inbox.remove(message)
            if notices:
                self._leaving.setdefault(member, self._clock())

    def _replace(self, leaving: list[RegisteredWorker]) -> str:
        """Begin to replace ``leaving`` workers. Returns why that is impossible, or nothing."""
        there = self._registry.memory
        gone = sorted(there.index(member) for member in leaving)
        try:
            self._resizer.begin(self._resizer.plan(len(there), gone), gone, on_result=False, reason="leave")
        except (ValueError, OSError) as error:
            return str(error)
        return ""
