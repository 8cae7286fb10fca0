"""Losses made good: lost workers are fenced and replaced; the others rest, meet anew, and go on.

The driver alone decides which workers live. Links keep their order, so nothing of an older epoch follows a Quiesced;
and a fenced worker stays in an older epoch for ever.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name
from lamina.config.flat_options import with_fewer_workers
from lamina.protocol.control import ComputeReady, Quiesce, Quiesced, StepDone
from lamina.protocol.executor import Clock, ReducedCapacityError, WorkerError
from lamina.protocol.step_plan import SurvivingKv

from .kv_parity import KvParity
from .launchers import HostLostError
from .restart_budget import WINDOW_S, RestartBudget
from .stall_detector import STOPPED_S, StallDetector
from .worker_group import WorkerGroup
from .worker_registry import RegisteredWorker, WorkerRegistry, WorkersLostError

log = logging.getLogger(__name__)


class Supervisor:
    """``quiesce`` behind a loss; then ``resume``, and ``quiesce`` again where that brings another one."""

    def __init__(
        self, config: EngineConfig, registry: WorkerRegistry, worker_group: WorkerGroup, clock: Clock = time.monotonic
    ) -> None:
        self._config, self._registry, self._workers, self._clock = config, registry, worker_group, clock
        self._step_s, self._start_s = config.deadlines.step_timeout_s, config.deadlines.start_timeout_s
        self._restart_budget = RestartBudget(config.launch.max_recoveries, clock)
        self._failures = dict[str, float]()  # what workers have said that failed and were replaced, and when
        self._failed_workers = set[str]()  # of the recovery under way
        self._deaths = RestartBudget(config.launch.max_recoveries, clock)  # of spares
        self._missing_capacity = False  # of spares: one has died, and none has been started in its place
        self._stall_detector = StallDetector[RegisteredWorker](clock)
        self._parity = KvParity(config, registry, worker_group, clock)

    def check_health(self, waited_for: Collection[RegisteredWorker]) -> None:
        """For whoever waits for ``waited_for``. Raises WorkersLostError where one of them has been stopped for
        STOPPED_S, and can be replaced; one that is only slow stays, and so does one that owes nothing.
        """
        self.restart_spares()
        each = dict.fromkeys(waited_for)  # who owes two things is looked at once: a look compares with the one before
        stopped = [m for m in each if m not in self._registry.lost_workers and m.handle.is_stopped]
        for member in self._stall_detector.update(stopped):
            most = f"while it is waited for, {self._stall_detector.longest_stall_s(member):.2f} s at most"
            text = f"{member.name} has been stopped for {STOPPED_S:g} s {most}"
            loss = WorkersLostError(text, [member], ended=True)
            if self.is_recoverable(loss):
                self._registry.mark_lost(member, loss)
                raise loss

    def restart_spares(self) -> None:
        """Others are started for spares that have died, as often as recoveries may be; not while there is one."""
        spares = self._workers.spare_workers
        self._missing_capacity = bool(spares.exited()) or self._missing_capacity
        if self._restart_budget.in_progress:
            return
        if self._missing_capacity and self._deaths.allows([]):
            self._deaths.begin([self], [])
            self._deaths.end()
            self._fill_spares()
        else:
            self._start_spares(spares.finish_starting)

    def _fill_spares(self) -> None:
        self._missing_capacity = False
        self._start_spares(self._workers.spare_workers.start_missing)

    @staticmethod
    def _start_spares(start: Callable[[], None]) -> None:
        try:
            start()
        except (OSError, ValueError) as error:
            log.warning("there are fewer spares than asked for: %s", error)

    def is_recoverable(self, loss: WorkersLostError) -> bool:
        """Whether the run can go on behind ``loss``, and all others that have not been made good yet."""
        if not self._is_replaceable(loss):
            return False
        known = {*self._registry.lost_workers, *self._known(loss)}
        each = {*known, *loss.workers}
        return (bool(each) and all(m.on_loan for m in each)) or self._restart_budget.allows(known)

    def exit_message(self, loss: WorkersLostError) -> str:
        """About a run that ends by ``loss``."""
        if self._is_replaceable(loss) and self._restart_budget.max_recoveries and not self.is_recoverable(loss):
            limit = f", as --max-recoveries {self._restart_budget.max_recoveries} allows no more in ten minutes,"
        elif loss.is_certain:
            limit = ""
        else:
            return str(loss)
        return f"{loss}; its pool cannot go on{limit} and was ended: start again"

    def no_replacement_message(self, error: Exception) -> WorkerError:
        """About a run that ends as no other worker could be started."""
        text, lost = f"a lost worker could not be replaced: {error}", self._registry.lost_workers
        others = {"memory": self._registry.memory, "prefill": self._registry.prefill}  # of which there may be fewer
        roles = {member.handle.role for member in lost}
        if isinstance(error, HostLostError) and roles and roles <= others.keys():
            left = {f"{role}_workers": sum(m not in lost for m in others[role]) for role in sorted(roles)}
            words = self._words_of(left) if left.get("memory_workers", 1) else ""
            return ReducedCapacityError(text + words, left, error.lost_hosts)
        return WorkerError(text)

    def _words_of(self, left: Mapping[str, int]) -> str:
        """Which run those that are ``left`` could do, by its options; else why none."""
        try:
            sizes = with_fewer_workers(self._config, left)
        except ValueError as why:
            return f"; no run can go on with {_flags(left)}, which is left: {why}"
        return f"; there is room for a run with {_flags(sizes)} at most"

    def _is_replaceable(self, loss: WorkersLostError) -> bool:
        """Whether all that are lost are processes that ended without a word, can be ended, or have failed in a way that
        others need not. One that is late is asked to come to rest, unless it has come in place of another and has not
        started: the next one would be as late.
        """
        lost = self._registry.lost_workers
        late = [m for m in loss.workers if m not in lost and not loss.is_certain]
        each = {*lost, *loss.workers}
        if not each:
            return loss.is_certain  # of an epoch: nobody is lost, and all meet anew
        if self._restart_budget.in_progress and not all(map(self._workers.has_answered, late)):
            return False
        may_go_well = all(x.is_certain or self._is_first(member, x) for member, x in lost.items())
        return may_go_well and all(map(self._workers.can_replace, each))

    def _is_first(self, worker: RegisteredWorker, failure: WorkersLostError) -> bool:
        """Whether a worker that has said why it failed had served till then, such as one whose device has an error, and
        nobody has said the same in WINDOW_S, or before it came: else another one would fail in its place, too.
        """
        said_at, again = self._failures.get(str(failure), -math.inf), str(failure) in self._failed_workers
        if not self._workers.has_answered(worker) or (again and self._restart_budget.is_lost_again(worker)):
            return False
        return self._clock() - said_at > WINDOW_S

    @staticmethod
    def _known(loss: WorkersLostError) -> Sequence[RegisteredWorker]:
        """The members that ``loss`` has ended for certain."""
        return loss.workers if loss.is_certain else ()

    def quiesce(self, loss: WorkersLostError | None) -> list[dict[int, int]]:
        """Fence who is lost, and bring the others to rest. Returns the KV that is left, by memory worker; see
        EpochChanged. What was said before may be taken by WorkerRegistry.read_messages. ``loss``: None where nobody is
        lost, so far. Raises WorkersLostError where no more can be made good.
        """
        meets_late = loss is not None and not loss.is_certain and self._restart_budget.in_progress
        if loss is not None:
            log.warning("%s; whoever is lost is replaced, and all requests go on", str(loss))  # not the processes
            self._count()
        view, kept, asked = (
            self._workers.next_epoch(),
            dict[RegisteredWorker, dict[int, int]](),
            set[RegisteredWorker](),
        )
        fenced = set[RegisteredWorker]()
        self._registry.begin_epoch(view, still=(StepDone,))
        deadline = self._clock() + self._step_s
        while left := self._left(kept, fenced):
            try:
                for member in left:
                    if member not in asked:
                        asked.add(member)
                        self._registry.send(member, Quiesce(epoch=view))
                kept[left[0]] = self._await_quiesced(left[0], deadline)
            except WorkersLostError as another:
                log.warning("behind that loss: %s", another)
                for member in another.workers:
                    self._registry.mark_lost(member, WorkersLostError(str(another), [member], ended=True))
                if not self.is_recoverable(another):
                    raise
                self._count()
        if meets_late and not self._registry.lost_workers:
            raise WorkersLostError(f"{loss}, and nobody hangs", [])  # it would be so again
        for lost in self._registry.lost_workers:
            kept.pop(lost, None)  # its report from before its death
        return self._parity.surviving_after_rebuild([kept.get(member, {}) for member in self._registry.memory])

    def rebuild(self, keep: Sequence[SurvivingKv]) -> bool:
        """Rebuild the KV of a lost memory worker by parity, in the worker that takes its place. Returns whether all of
        ``keep`` is there, also without a loss. Raises as ``resume``.
        """
        if self._parity.needs_rebuild:
            self._workers.replace()
        return self._parity.rebuild(keep)

    def _count(self) -> None:
        """Those that are on loan are no reason to give up: others may lend."""
        lost = self._registry.lost_workers
        self._failed_workers |= {str(failure) for failure in lost.values() if not failure.is_certain}
        self._restart_budget.begin(self._registry, lost, free=all(m.on_loan for m in lost) and bool(lost))

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady:
        """Replace who is lost, and have all meet. Raises WorkersLostError, and ValueError with what a user can put
        right."""
        self._workers.replace()
        ready = self._workers.connect(keep)
        self._restart_budget.end()
        self._failures |= dict.fromkeys(self._failed_workers, self._clock())
        self._failed_workers.clear()
        self._fill_spares()
        return ready

    def _left(
        self, kept: dict[RegisteredWorker, dict[int, int]], fenced: set[RegisteredWorker]
    ) -> list[RegisteredWorker]:
        """The members that have not come to rest. Lost ones are fenced, once: one that cannot end takes its time."""
        for lost in [m for m in self._registry.lost_workers if m not in fenced]:
            fenced.add(lost)
            self._registry.fence(lost)
        return [m for m in self._registry if m not in self._registry.lost_workers and m not in kept]

    def _await_quiesced(self, worker: RegisteredWorker, deadline: float) -> dict[int, int]:
        loading = not self._workers.has_answered(worker)
        left = self._start_s if loading else deadline - self._clock()
        halted: Quiesced = self._registry.wait_for([worker], Quiesced, left, "to come to rest behind a loss")
        return halted.surviving_tokens


def _flags(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{flag_name(name)} {value}" for name, value in sizes.items())
