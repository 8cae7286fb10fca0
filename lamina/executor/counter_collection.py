"""The collection of all workers' counters, without waiting for any worker."""

from __future__ import annotations

import time

from lamina.protocol.control import Stats, StatsRequest
from lamina.protocol.executor import Clock

from .worker_registry import RegisteredWorker, WorkerRegistry

WAIT_COUNTERS = ("wait_s", "carry_s", "stored_wait_s")  # counters that grow while a worker waits for others


class CounterCollector:
    """Requests all counters once. One thread uses it."""

    def __init__(self, registry: WorkerRegistry, clock: Clock = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._asked_at = clock()
        self._answers: dict[str, dict[str, float]] = {}  # by the workers' labels

    @property
    def pending_workers(self) -> list[RegisteredWorker]:
        """The workers that have yet to reply."""
        return [m for m in self._registry if m.label not in self._answers]

    def request(self) -> None:
        """Request the counters of every worker. Raises WorkersLostError."""
        for member in self._registry:
            self._registry.send(member, StatsRequest())

    def collect(self, limit_s: float, words: str) -> dict[str, dict[str, float]] | None:
        """Return the counters, once all workers have replied; None before that.

        Raises WorkersLostError if a worker is lost, or has not replied for ``limit_s``. ``words``: the purpose, for the
        error. A stopped worker raises nothing: the supervisor replaces it, or it replies once it continues.
        """
        self._answers |= {m.label: s.values for m, s in self._registry.take_arrived(Stats)}
        if not (silent := self.pending_workers):
            return self._answers
        if self._clock() - self._asked_at > limit_s and (late := [m for m in silent if not m.handle.is_stopped]):
            raise self._registry.timeout_error(late, words)
        return None


def has_progress(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> bool:
    """Return whether some worker has done something between two readings of all counters. Waiting does not count."""
    return any(
        before.get(worker, {}).get(name) != value
        for worker, values in now.items()
        for name, value in values.items()
        if name not in WAIT_COUNTERS
    )
