"""Losses made good: lost workers are fenced and replaced; the others rest, meet anew, and go on.

The driver alone decides which workers live. Links keep their order, so nothing of an older view follows a Halted; and a
fenced worker stays in an older view for ever.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lamina.config import fewer
from lamina.engine.wire import Clock, FewerError, WorkerError
from lamina.protocol.control import ComputeReady, Halt, Halted, StepDone
from lamina.protocol.options.declare import flag
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.plan import Keep

from .cohort import Cohort
from .launchers import NoHostError
from .members import LostError, Member, Members
from .parity import Parity
from .recoveries import RECENT_S, Recoveries
from .standing import STOPPED_S, StandingStill

log = logging.getLogger(__name__)


class Supervisor:
    """``halt`` behind a loss; then ``resume``, and ``halt`` again where that brings another one."""

    def __init__(self, config: EngineConfig, members: Members, cohort: Cohort, clock: Clock = time.monotonic) -> None:
        self._config, self._members, self._cohort, self._clock = config, members, cohort, clock
        self._step_s, self._start_s = config.deadlines.step_timeout_s, config.deadlines.start_timeout_s
        self._recoveries = Recoveries(config.launching.max_recoveries, clock)
        self._failures = dict[str, float]()  # what workers have said that failed and were replaced, and when
        self._failing = set[str]()  # of the recovery under way
        self._deaths = Recoveries(config.launching.max_recoveries, clock)  # of spares
        self._short = False  # of spares: one has died, and none has been started in its place
        self._standing = StandingStill[Member](clock)
        self._parity = Parity(config, members, cohort, clock)

    def look_round(self, owing: Collection[Member]) -> None:
        """For whoever waits for ``owing``. Raises LostError where one of them has been stopped for STOPPED_S,
        and can be replaced; one that is only slow stays, and so does one that owes nothing.
        """
        self.tend_spares()
        each = dict.fromkeys(owing)  # who owes two things is looked at once: a look compares with the one before
        stopped = [m for m in each if m not in self._members.lost and m.handle.stopped]
        for member in self._standing.look(stopped):
            most = f"while it is waited for, {self._standing.longest_s(member):.2f} s at most"
            text = f"{member.name} has been stopped for {STOPPED_S:g} s {most}"
            loss = LostError(text, [member], ended=True)
            if self.may_make_good(loss):
                self._members.give_up(member, loss)
                raise loss

    def tend_spares(self) -> None:
        """Others are started for spares that have died, as often as recoveries may be; not while there is one."""
        spares = self._cohort.spares
        self._short = bool(spares.dead()) or self._short
        if self._recoveries.under_way:
            return
        if self._short and self._deaths.allow([]):
            self._deaths.count([self], [])
            self._deaths.end()
            self._fill_spares()
        else:
            self._start_spares(spares.bring)

    def _fill_spares(self) -> None:
        self._short = False
        self._start_spares(self._cohort.spares.fill)

    @staticmethod
    def _start_spares(start: Callable[[], None]) -> None:
        try:
            start()
        except (OSError, ValueError) as error:
            log.warning("there are fewer spares than asked for: %s", error)

    def may_make_good(self, loss: LostError) -> bool:
        """Whether the run can go on behind ``loss``, and all others that have not been made good yet."""
        if not self._is_curable(loss):
            return False
        known = {*self._members.lost, *self._known(loss)}
        each = {*known, *loss.members}
        return (bool(each) and all(m.on_loan for m in each)) or self._recoveries.allow(known)

    def last_words(self, loss: LostError) -> str:
        """About a run that ends by ``loss``."""
        if self._is_curable(loss) and self._recoveries.most and not self.may_make_good(loss):
            limit = f", as --max-recoveries {self._recoveries.most} allows no more in ten minutes,"
        elif loss.ended:
            limit = ""
        else:
            return str(loss)
        return f"{loss}; its pool cannot go on{limit} and was ended: start again"

    def no_other(self, error: Exception) -> WorkerError:
        """About a run that ends as no other worker could be started."""
        text, lost = f"a lost worker could not be replaced: {error}", self._members.lost
        others = {"memory": self._members.memory, "prefill": self._members.prefill}  # of which there may be fewer
        roles = {member.handle.role for member in lost}
        if isinstance(error, NoHostError) and roles and roles <= others.keys():
            left = {f"{role}_workers": sum(m not in lost for m in others[role]) for role in sorted(roles)}
            words = self._words_of(left) if left.get("memory_workers", 1) else ""
            return FewerError(text + words, left, error.without)
        return WorkerError(text)

    def _words_of(self, left: Mapping[str, int]) -> str:
        """Which run those that are ``left`` could do, by its options; else why none."""
        try:
            sizes = fewer(self._config, left)
        except ValueError as why:
            return f"; no run can go on with {_flags(left)}, which is left: {why}"
        return f"; there is room for a run with {_flags(sizes)} at most"

    def _is_curable(self, loss: LostError) -> bool:
        """Whether all that are lost are processes that ended without a word, can be ended, or have failed in a way that
        others need not. One that is late is asked to come to rest, unless it has come in place of another and has not
        started: the next one would be as late.
        """
        lost = self._members.lost
        late = [m for m in loss.members if m not in lost and not loss.ended]
        each = {*lost, *loss.members}
        if not each:
            return loss.ended  # of a view: nobody is lost, and all meet anew
        if self._recoveries.under_way and not all(map(self._cohort.has_started, late)):
            return False
        may_go_well = all(x.ended or self._is_first(member, x) for member, x in lost.items())
        return may_go_well and all(map(self._cohort.may_replace, each))

    def _is_first(self, member: Member, failure: LostError) -> bool:
        """Whether a worker that has said why it failed had served till then, such as one whose device has an error, and
        nobody has said the same in RECENT_S, or before it came: else another one would fail in its place, too.
        """
        said_at, again = self._failures.get(str(failure), -math.inf), str(failure) in self._failing
        if not self._cohort.has_started(member) or (again and self._recoveries.is_newcomer(member)):
            return False
        return self._clock() - said_at > RECENT_S

    @staticmethod
    def _known(loss: LostError) -> Sequence[Member]:
        """The members that ``loss`` has ended for certain."""
        return loss.members if loss.ended else ()

    def halt(self, loss: LostError | None) -> list[dict[int, int]]:
        """Fence who is lost, and bring the others to rest. Returns the KV that is left, by memory worker; see
        ViewChanged. What was said before may be taken by Members.said. ``loss``: None where nobody is lost, so far.
        Raises LostError where no more can be made good.
        """
        meets_late = loss is not None and not loss.ended and self._recoveries.under_way
        if loss is not None:
            log.warning("%s; whoever is lost is replaced, and all requests go on", str(loss))  # not the processes
            self._count()
        view, kept, asked = self._cohort.next_view(), dict[Member, dict[int, int]](), set[Member]()
        fenced = set[Member]()
        self._members.enter(view, still=(StepDone,))
        deadline = self._clock() + self._step_s
        while left := self._left(kept, fenced):
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
                if not self.may_make_good(another):
                    raise
                self._count()
        if meets_late and not self._members.lost:
            raise LostError(f"{loss}, and nobody hangs", [])  # it would be so again
        for lost in self._members.lost:
            kept.pop(lost, None)  # its report from before its death
        return self._parity.left([kept.get(member, {}) for member in self._members.memory])

    def rebuild(self, keep: Sequence[Keep]) -> bool:
        """Rebuild the KV of a lost memory worker by parity, in the worker that takes its place. Returns whether all of
        ``keep`` is there, also without a loss. Raises as ``resume``.
        """
        if self._parity.lacks:
            self._cohort.replace()
        return self._parity.rebuild(keep)

    def _count(self) -> None:
        """Those that are on loan are no reason to give up: others may lend."""
        lost = self._members.lost
        self._failing |= {str(failure) for failure in lost.values() if not failure.ended}
        self._recoveries.count(self._members, lost, free=all(m.on_loan for m in lost) and bool(lost))

    def resume(self, keep: Sequence[Keep]) -> ComputeReady:
        """Replace who is lost, and have all meet. Raises LostError, and ValueError with what a user can put right."""
        self._cohort.replace()
        ready = self._cohort.connect(keep)
        self._recoveries.end()
        self._failures |= dict.fromkeys(self._failing, self._clock())
        self._failing.clear()
        self._fill_spares()
        return ready

    def _left(self, kept: dict[Member, dict[int, int]], fenced: set[Member]) -> list[Member]:
        """The members that have not come to rest. Lost ones are fenced, once: one that cannot end takes its time."""
        for lost in [m for m in self._members.lost if m not in fenced]:
            fenced.add(lost)
            self._members.fence(lost)
        return [m for m in self._members if m not in self._members.lost and m not in kept]

    def _rest_of(self, member: Member, deadline: float) -> dict[int, int]:
        loading = not self._cohort.has_started(member)
        left = self._start_s if loading else deadline - self._clock()
        halted: Halted = self._members.wait_for([member], Halted, left, "to come to rest behind a loss")
        return halted.kept


def _flags(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{flag(name)} {value}" for name, value in sizes.items())
