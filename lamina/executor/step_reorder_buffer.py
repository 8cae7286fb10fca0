"""The order in which finished steps and prefill chunks are returned. Pure bookkeeping: no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from lamina.protocol.control import RunRound, StepDone

_T = TypeVar("_T")


class StepReorderBuffer:
    """The steps in flight on the compute workers. Steps of one batch are returned in the order in which they were
    queued.

    A batch's steps end on one replica after the other, and each replica reports over a link of its own. So a driver
    that reads late may see a step before the one that precedes it.
    """

    def __init__(self) -> None:
        self.queued: dict[int, deque[int]] = {}  # batch -> its steps in flight
        self.done: dict[tuple[int, int], StepDone] = {}  # reported, not yet returned

    def __len__(self) -> int:
        """Return the number of steps that were not yet returned."""
        return sum(map(len, self.queued.values()))

    def add_round(self, new: RunRound) -> None:
        """Record that a round was sent."""
        for step in new.steps:
            self.queued.setdefault(step.plan.batch, deque()).append(step.plan.step)

    def on_step_done(self, done: StepDone) -> None:
        """Record a step that a replica has reported."""
        self.done[done.batch, done.step] = done

    def next_done(self) -> StepDone | None:
        """Return the next step that is done; None if there is none."""
        for batch, steps in self.queued.items():
            if steps and (done := self.done.pop((batch, steps[0]), None)):
                steps.popleft()
                return done
        return None


class PendingChunks:
    """The chunks of prompts in flight, by group of ``stages`` prefill workers, of which the last one reports."""

    def __init__(self, groups: int, stages: int) -> None:
        self._stages = stages
        self._counts = [0] * groups
        self._since = [0.0] * groups  # when the group's oldest chunk became the next one to be done

    def __bool__(self) -> bool:
        return any(self._counts)

    def on_sent(self, group: int, now_s: float) -> None:
        """Record that a chunk was sent to all workers of a group."""
        if not self._counts[group]:
            self._since[group] = now_s
        self._counts[group] += 1

    def on_done(self, group: int, now_s: float) -> None:
        """Record that a group's oldest chunk is done."""
        self._counts[group] -= 1
        self._since[group] = now_s

    def group_workers(self, group: int, workers: Sequence[_T]) -> Sequence[_T]:
        """Return the workers of a group out of all ``workers``; the last one reports. Empty if there are none yet."""
        return workers[group * self._stages : (group + 1) * self._stages]

    def busy_workers(self, workers: Sequence[_T]) -> list[_T]:
        """Return the workers of groups that have chunks in flight, out of all ``workers``."""
        return [w for group, count in enumerate(self._counts) if count for w in self.group_workers(group, workers)]

    def late_groups(self, workers: Sequence[_T], now_s: float, limit_s: float) -> list[Sequence[_T]]:
        """Return the groups whose next chunk has taken longer than ``limit_s``."""
        counts = enumerate(zip(self._counts, self._since, strict=True))
        return [
            self.group_workers(group, workers) for group, (count, since) in counts if count and now_s - since > limit_s
        ]
