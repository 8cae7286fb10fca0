"""Which of the steps that were reported done is the next one. Pure bookkeeping: no I/O."""

from __future__ import annotations

from collections import deque

from lamina.protocol.control import RunRound, StepDone


class Arrivals:
    """The steps in flight on the compute workers; those of one batch are handed out in the order they were queued.

    A batch's steps end on one replica after the other, and each reports over a link of its own: a driver that was kept
    from listening may well read of a step before it reads of the one before.
    """

    def __init__(self) -> None:
        self._queued: dict[int, deque[int]] = {}  # batch -> its steps in flight
        self._done: dict[tuple[int, int], StepDone] = {}  # reported, not handed out

    def __len__(self) -> int:
        """Steps that were not handed out."""
        return sum(map(len, self._queued.values()))

    def expect(self, new: RunRound) -> None:
        """A round was sent off."""
        for step in new.steps:
            self._queued.setdefault(step.plan.batch, deque()).append(step.plan.step)

    def add(self, done: StepDone) -> None:
        """A replica reported a step."""
        self._done[done.batch, done.step] = done

    def take(self) -> StepDone | None:
        """The next step that is done, None while none is."""
        for batch, steps in self._queued.items():
            if steps and (done := self._done.pop((batch, steps[0]), None)):
                steps.popleft()
                return done
        return None
