"""Losses made good: who is lost is fenced and replaced, and the others rest, meet anew, and go on.

One mechanism, of the driver: nobody else decides who lives. Links keep their order, so nothing of an older view follows
a Halted; and whoever was fenced is of an older view for ever.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from lamina.engine.wire import Clock
from lamina.protocol.control import ComputeReady, Halt, Halted, StepDone
from lamina.protocol.options import EngineConfig
from lamina.protocol.plan import Keep

from .cohort import Cohort
from .members import LostError, Member, Members

log = logging.getLogger(__name__)
RECENT_S = 600.0  # in which --max-recoveries counts
STALE_S = 1.0  # behind which a look says nothing of the one before
STOPPED_S = 2.0  # that a worker may stand still by a signal while it is waited for


class Supervisor:
    """``halt`` behind a loss; then ``resume``, and ``halt`` again where that brings another one."""

    def __init__(self, config: EngineConfig, members: Members, cohort: Cohort, clock: Clock = time.monotonic) -> None:
        self._members, self._cohort, self._clock = members, cohort, clock
        self._most = config.launching.max_recoveries
        self._step_s, self._start_s = config.deadlines.step_timeout_s, config.deadlines.start_timeout_s
        self._losses: deque[float] = deque()  # when
        self._stopped: dict[Member, float] = {}  # since when
        self._looked = 0.0  # when look_round was called

    def look_round(self) -> None:
        """For whoever waits for workers. Raises LostError where one of them has been stopped for STOPPED_S,
        and can be replaced; one that is only slow stays.
        """
        now, before = self._clock(), self._stopped
        if now - self._looked > STALE_S:  # who stands still now may have run meanwhile
            before = {}
        self._looked = now
        stopped = [m for m in self._members if m not in self._members.lost and m.handle.stopped]
        self._stopped = {m: before.get(m, now) for m in stopped}
        for member, since in self._stopped.items():
            if now - since >= STOPPED_S and self._cohort.may_replace(member) and self._has_left:
                loss = LostError(f"{member.name} has been stopped for {STOPPED_S:g} s", [member], ended=True)
                self._members.give_up(member, loss)
                raise loss

    @property
    def _has_left(self) -> bool:
        """Whether one more loss can be made good now."""
        while self._losses and self._losses[0] < self._clock() - RECENT_S:
            self._losses.popleft()
        return len(self._losses) < self._most

    @property
    def can_replace(self) -> bool:
        """Whether those that are lost can be replaced: processes that ended without a word, or can be ended; not one
        that has failed and said why, and would again.
        """
        lost = self._members.lost
        ended = bool(lost) and all(loss.ended for loss in lost.values())
        return ended and all(map(self._cohort.may_replace, lost)) and self._has_left

    def halt(self, loss: LostError) -> list[dict[int, int]]:
        """Fence who is lost, and bring the others to rest. Returns the KV that is left, by memory worker; see
        ViewChanged. What was said before may be taken by Members.said. Raises LostError where no more can be made good.
        """
        log.warning("%s; another one takes its place, and all requests go on", loss)
        self._losses.append(self._clock())
        view, kept, asked = self._cohort.next_view(), dict[Member, dict[int, int]](), set[Member]()
        self._members.enter(view, still=(StepDone,))
        deadline = self._clock() + self._step_s
        while left := self._left(kept):
            try:
                for member in left:
                    if member not in asked:
                        asked.add(member)
                        self._members.send(member, Halt(view=view))
                kept[left[0]] = self._rest_of(left[0], deadline)
            except LostError as another:
                log.warning("behind that loss: %s", another)
                for member in another.members:
                    self._members.give_up(member, LostError(str(another), [member], ended=True))
                if not self.can_replace:
                    raise
        return [kept.get(member, {}) for member in self._members.memory]

    def resume(self, keep: Sequence[Keep]) -> ComputeReady:
        """Replace who is lost, and have all meet. Raises LostError, and ValueError with what a user can put right."""
        self._cohort.replace()
        return self._cohort.connect(keep)

    def _left(self, kept: dict[Member, dict[int, int]]) -> list[Member]:
        """Who has not come to rest. Those that are lost are fenced."""
        for lost in self._members.lost:
            self._members.fence(lost)
        return [m for m in self._members if m not in self._members.lost and m not in kept]

    def _rest_of(self, member: Member, deadline: float) -> dict[int, int]:
        loading = not self._cohort.has_started(member)
        left = self._start_s if loading else deadline - self._clock()
        halted: Halted = self._members.wait_for([member], Halted, left, "to come to rest behind a loss")
        return halted.kept
