"""Recovery from losses: lost workers are fenced and replaced; the other workers quiesce, reconnect, and continue.

The driver alone decides which workers live. Links keep their order, so no message of an older epoch follows a Quiesced.
A fenced worker stays in an older epoch for ever.
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
    """Call ``quiesce`` after a loss, then ``resume``. If that reports another loss, call ``quiesce`` again."""

    def __init__(
        self, config: EngineConfig, registry: WorkerRegistry, worker_group: WorkerGroup, clock: Clock = time.monotonic
    ) -> None:
        self._config, self._registry, self._workers, self._clock = config, registry, worker_group, clock
        self._step_s, self._start_s = config.deadlines.step_timeout_s, config.deadlines.start_timeout_s
        self.restart_budget = RestartBudget(config.launch.max_recoveries, clock)
        self._failures = dict[str, float]()  # error of a failed and replaced worker -> time of the failure
        self._failed_workers = set[str]()  # errors of workers in this recovery
        self._deaths = RestartBudget(config.launch.max_recoveries, clock)  # recoveries of spare workers
        self._missing_capacity = False  # a spare worker has died, and none has been started in its place
        self._stall_detector = StallDetector[RegisteredWorker](clock)
        self._parity = KvParity(config, registry, worker_group, clock)
        self._versions = dict[RegisteredWorker, dict[int, list[int]]]()  # of workers that have quiesced
        self.state_versions: list[dict[int, list[int]]] = []  # of the last ``quiesce``; see EpochChanged

    def check_health(self, waited_for: Collection[RegisteredWorker]) -> None:
        """Look for stopped workers; called during waits for ``waited_for``. Raises WorkersLostError if one of them has
        been stopped for STOPPED_S and can be replaced. A worker that is only slow stays, and so does one that owes
        nothing.
        """
        if self._workers.spare_workers.are_wanted:
            self.restart_spares()
        each = dict.fromkeys(waited_for)  # each worker once: a look compares with the one before
        stopped = [m for m in each if m not in self._registry.lost_workers and m.handle.is_stopped]
        for member in self._stall_detector.update(stopped):
            most = f"while it is waited for, {self._stall_detector.longest_stall_s(member):.2f} s at most"
            text = f"{member.name} has been stopped for {STOPPED_S:g} s {most}"
            loss = WorkersLostError(text, [member], ended=True)
            if self.is_recoverable(loss):
                self._registry.mark_lost(member, loss)
                raise loss

    def restart_spares(self) -> None:
        """Start spare workers in place of dead ones, as often as recoveries are allowed; not during a recovery."""
        spares = self._workers.spare_workers
        self._missing_capacity = bool(spares.exited()) or self._missing_capacity
        if self.restart_budget.in_progress:
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
            log.warning("there are fewer spare workers than configured: %s", error)

    def is_recoverable(self, loss: WorkersLostError) -> bool:
        """Return whether the run can continue after ``loss`` and all other losses not yet repaired."""
        if not self._is_replaceable(loss):
            return False
        known = {*self._registry.lost_workers, *self._known(loss)}
        each = {*known, *loss.workers}
        return (bool(each) and all(m.on_loan for m in each)) or self.restart_budget.allows(known)

    def exit_message(self, loss: WorkersLostError) -> str:
        """Return the error text of a run that ends by ``loss``."""
        if self._is_replaceable(loss) and self.restart_budget.max_recoveries and not self.is_recoverable(loss):
            limit = f", as --max-recoveries {self.restart_budget.max_recoveries} allows no more in ten minutes,"
        elif loss.is_certain:
            limit = ""
        else:
            return str(loss)
        return f"{loss}; its pool cannot continue{limit} and was ended: start again"

    def no_replacement_message(self, error: Exception) -> WorkerError:
        """Return the error of a run that ends since no replacement could be started."""
        text, lost = f"a lost worker could not be replaced: {error}", self._registry.lost_workers
        others = {"memory": self._registry.memory, "prefill": self._registry.prefill}  # a run may have fewer of these
        roles = {member.handle.role for member in lost}
        if isinstance(error, HostLostError) and roles and roles <= others.keys():
            left = {f"{role}_workers": sum(m not in lost for m in others[role]) for role in sorted(roles)}
            words = self._words_of(left) if left.get("memory_workers", 1) else ""
            return ReducedCapacityError(text + words, left, error.lost_hosts)
        return WorkerError(text)

    def _words_of(self, left: Mapping[str, int]) -> str:
        """Return the largest run that the workers ``left`` could do, by its options, or why there is none."""
        try:
            sizes = with_fewer_workers(self._config, left)
        except ValueError as why:
            return f"; no run can continue with {_flags(left)}, which is left: {why}"
        return f"; there is space for a run with {_flags(sizes)} at most"

    def _is_replaceable(self, loss: WorkersLostError) -> bool:
        """Return whether all lost workers can be replaced. Each is a process that ended without an error, can be ended,
        or failed in a way that need not repeat. A late worker is first requested to quiesce. But one that is itself a
        replacement and has not started counts as lost: the next one would be as late.
        """
        lost = self._registry.lost_workers
        late = [m for m in loss.workers if m not in lost and not loss.is_certain]
        each = {*lost, *loss.workers}
        if not each:
            return loss.is_certain  # a loss without workers: all reconnect under another epoch
        if self.restart_budget.in_progress and not all(map(self._workers.has_answered, late)):
            return False
        may_go_well = all(x.is_certain or self._is_first(member, x) for member, x in lost.items())
        return may_go_well and all(map(self._workers.can_replace, each))

    def _is_first(self, worker: RegisteredWorker, failure: WorkersLostError) -> bool:
        """Return whether a worker's failure, which it has reported, need not repeat in its replacement.

        The worker had served till then, as one whose device has an error. And no worker has reported the same error in
        WINDOW_S, or in this recovery before this worker started.
        """
        said_at, again = self._failures.get(str(failure), -math.inf), str(failure) in self._failed_workers
        if not self._workers.has_answered(worker) or (again and self.restart_budget.is_lost_again(worker)):
            return False
        return self._clock() - said_at > WINDOW_S

    @staticmethod
    def _known(loss: WorkersLostError) -> Sequence[RegisteredWorker]:
        """The members that ``loss`` has certainly ended."""
        return loss.workers if loss.is_certain else ()

    def quiesce(self, loss: WorkersLostError | None) -> list[dict[int, int]]:
        """Fence lost workers, and quiesce all others. Returns the KV that remains, by memory worker; see EpochChanged.

        Earlier messages remain for WorkerRegistry.read_messages. ``loss``: None if no worker is lost so far. Raises
        WorkersLostError if a loss cannot be repaired.
        """
        meets_late = loss is not None and not loss.is_certain and self.restart_budget.in_progress
        if loss is not None:
            # Without references to workers.
            log.warning("%s; lost workers are replaced, and all requests go on", str(loss))
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
                kept[left[0]] = self.await_quiesced(left[0], deadline)
            except WorkersLostError as another:
                log.warning("after that loss: %s", another)
                for member in another.workers:
                    self._registry.mark_lost(member, WorkersLostError(str(another), [member], ended=True))
                if not self.is_recoverable(another):
                    raise
                self._count()
        if meets_late and not self._registry.lost_workers:
            raise WorkersLostError(f"{loss}, and no worker hangs", [])  # it would repeat
        for lost in self._registry.lost_workers:
            kept.pop(lost, None)  # reported before its death
        self.state_versions = [self._versions.pop(m, {}) if m in kept else {} for m in self._registry.memory]
        self._versions.clear()
        return self._parity.surviving_after_rebuild([kept.get(member, {}) for member in self._registry.memory])

    def rebuild(self, keep: Sequence[SurvivingKv]) -> bool:
        """Rebuild a lost memory worker's KV by parity, in the worker that takes its place. Returns whether all of
        ``keep`` is there; True without a loss. Raises as ``resume`` does.
        """
        if self._parity.needs_rebuild:
            self._workers.replace()
        return self._parity.rebuild(keep)

    def _count(self) -> None:
        """Count the losses against the budget. Lost workers on loan do not count, since other deployments may lend."""
        lost = self._registry.lost_workers
        self._failed_workers |= {str(failure) for failure in lost.values() if not failure.is_certain}
        self.restart_budget.begin(self._registry, lost, free=all(m.on_loan for m in lost) and bool(lost))

    def resume(self, keep: Sequence[SurvivingKv], *, copies_kv: bool = False) -> ComputeReady:
        """Replace lost workers and connect all; ``copies_kv``: see WorkerGroup.connect. Raises WorkersLostError, and
        ValueError for what a user can correct.
        """
        self._workers.replace()
        ready = self._workers.connect(keep, copies_kv=copies_kv)
        self.restart_budget.end()
        self._failures |= dict.fromkeys(self._failed_workers, self._clock())
        self._failed_workers.clear()
        self._fill_spares()
        return ready

    def _left(
        self, kept: dict[RegisteredWorker, dict[int, int]], fenced: set[RegisteredWorker]
    ) -> list[RegisteredWorker]:
        """Return the members that have not quiesced. Fences each lost one, once: a process may take long to end."""
        for lost in [m for m in self._registry.lost_workers if m not in fenced]:
            fenced.add(lost)
            self._registry.fence(lost)
        return [m for m in self._registry if m not in self._registry.lost_workers and m not in kept]

    def await_quiesced(self, worker: RegisteredWorker, deadline: float) -> dict[int, int]:
        loading = not self._workers.has_answered(worker)
        left = self._start_s if loading else deadline - self._clock()
        halted: Quiesced = self._registry.wait_for([worker], Quiesced, left, "to quiesce after a loss")
        self._versions[worker] = halted.state_versions
        return halted.surviving_tokens


def _flags(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{flag_name(name)} {value}" for name, value in sizes.items())
