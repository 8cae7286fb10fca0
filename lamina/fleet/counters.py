"""The counters of all workers, asked for and collected without waiting for anybody."""

from __future__ import annotations

import time

from lamina.engine.wire import Clock
from lamina.protocol.control import AskStats, Stats

from .members import Member, Members

WAITS = ("wait_s", "carry_s", "stored_wait_s")  # counters that grow while a worker waits for others


class Counters:
    """One round of questions at a time. One thread uses it."""

    def __init__(self, members: Members, clock: Clock = time.monotonic) -> None:
        self._members, self._clock = members, clock
        self._asked_at: float | None = None
        self._answers: dict[str, dict[str, float]] = {}  # by the workers' labels

    @property
    def silent(self) -> list[Member]:
        """The workers that have yet to answer."""
        return [] if self._asked_at is None else [m for m in self._members if m.label not in self._answers]

    def ask(self) -> None:
        """Ask every worker, unless some have yet to answer. Raises LostError."""
        if self._asked_at is None:
            self._asked_at, self._answers = self._clock(), {}
            for member in self._members:
                self._members.send(member, AskStats())

    def take(self, limit_s: float, words: str) -> dict[str, dict[str, float]] | None:
        """The counters, once all workers have answered; None before that, and where nobody has asked.

        Raises LostError where a worker is lost, or has not answered for ``limit_s``; ``words``: the purpose, for the
        error. A stopped worker raises nothing: the supervisor replaces it, or it answers once it goes on.
        """
        self._answers |= {m.label: s.values for m, s in self._members.arrived(Stats)}
        if self._asked_at is None:
            return None
        if not (silent := self.silent):
            self._asked_at = None
            return self._answers
        if self._clock() - self._asked_at > limit_s and (late := [m for m in silent if not m.handle.stopped]):
            raise self._members.late(late, words)
        return None


def moved(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> bool:
    """Whether some worker has done something between two readings of all counters. To wait is not to do something."""
    return any(
        before.get(worker, {}).get(name) != value
        for worker, values in now.items()
        for name, value in values.items()
        if name not in WAITS
    )
