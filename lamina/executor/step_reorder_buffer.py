"""Which of the steps that were reported done is the next one. Pure bookkeeping: no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from lamina.protocol.control import RunRound, StepDone

_T = TypeVar("_T")


class StepReorderBuffer:
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

    def add_round(self, new: RunRound) -> None:
        """A round was sent off."""
        for step in new.steps:
            self._queued.setdefault(step.plan.batch, deque()).append(step.plan.step)

    def on_step_done(self, done: StepDone) -> None:
        """A replica reported a step."""
        self._done[done.batch, done.step] = done

    def next_done(self) -> StepDone | None:
        """The next step that is done, None while none is."""
        for batch, steps in self._queued.items():
            if steps and (done := self._done.pop((batch, steps[0]), None)):
                steps.popleft()
                return done
        return None


class PendingChunks:
    """Chunks of prompts in flight, by group of ``stages`` prefill workers, of which the last one says what is done."""

    def __init__(self, groups: int, stages: int) -> None:
        self._stages = stages
        self._counts = [0] * groups
        self._since = [0.0] * groups  # when the first of them began to be the next one that is done

    def __bool__(self) -> bool:
        return any(self._counts)

    def on_sent(self, group: int, now_s: float) -> None:
        """A chunk was sent to all of a group."""
        if not self._counts[group]:
            self._since[group] = now_s
        self._counts[group] += 1

    def on_done(self, group: int, now_s: float) -> None:
        """The first of a group's is."""
        self._counts[group] -= 1
        self._since[group] = now_s

    def group_workers(self, group: int, workers: Sequence[_T]) -> Sequence[_T]:
        """The workers of a group, from those of all; the last one reports. None, where there are none yet."""
        return workers[group * self._stages : (group + 1) * self._stages]

    def busy_workers(self, workers: Sequence[_T]) -> list[_T]:
        """Of all workers, those of groups that have something to do."""
        return [w for group, count in enumerate(self._counts) if count for w in self.group_workers(group, workers)]

    def late_groups(self, workers: Sequence[_T], now_s: float, limit_s: float) -> list[Sequence[_T]]:
        """The groups whose next chunk has taken longer than the limit."""
        counts = enumerate(zip(self._counts, self._since, strict=True))
        return [
            self.group_workers(group, workers) for group, (count, since) in counts if count and now_s - since > limit_s
        ]
