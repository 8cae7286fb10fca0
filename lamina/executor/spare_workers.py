"""Spare workers: started and loaded, but not connected. One takes the place of a lost worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import structs

from lamina.protocol.control import Failed, LinkClosedError
from lamina.protocol.reshard import PrepareStore
from lamina.protocol.step_plan import BindRequest

from .worker_registry import RegisteredWorker, WorkerRegistry

if TYPE_CHECKING:
    from .worker_group import WorkerGroup

log = logging.getLogger(__name__)
END_S = 2.0  # for all spare workers to end with their links


class SpareWorkers:
    """The spare workers, a number of each role, for the ranks of a replica in turn. A spare's link is not read until it
    is taken.

    A spare memory worker takes memory for a pool ahead, the largest that its rank has. Whatever place it then takes
    uses this memory, and what is too much is freed.
    """

    def __init__(self, worker_group: WorkerGroup, registry: WorkerRegistry, counts: dict[str, int]) -> None:
        """``worker_group``: the workers whose places the spares may take."""
        self._workers, self._registry, self._counts = worker_group, registry, counts
        self.are_wanted = any(counts.values())
        self._ready: dict[tuple[str, int], RegisteredWorker] = {}  # role and number among the spares
        self._starting: set[tuple[str, int]] = set()  # wanted spares that may still start
        self._pools: list[BindRequest] = []  # by rank, the store for which a spare memory worker takes memory
        self._warned: dict[RegisteredWorker, BindRequest] = {}

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self._ready.values())

    def start_missing(self, wait_s: float = 0.0) -> None:
        """Start the missing spares; they load while other workers compute. A spare that takes longer than ``wait_s`` to
        start is left to ``finish_starting``. Raises OSError, ValueError.
        """
        self._pools = [
            structs.replace(bind, worker=own.index(max(own)), kv_bytes=max(own))
            for bind, own in zip(self._workers.memory_binds, self._workers.kv_bytes, strict=False)
        ]
        for (role, number), spare in self._ready.items():
            self._make_ready(role, number, spare)
        each = {(role, number) for role, count in self._counts.items() for number in range(count)}
        self._starting = each - self._ready.keys()
        self.finish_starting(wait_s)

    def finish_starting(self, wait_s: float = 0.0) -> None:
        """Continue with spares that have not started yet. Raises as ``start_missing`` if one of them cannot start."""
        for key in sorted(self._starting):
            self._bring(*key, wait_s)

    def _bring(self, role: str, number: int, wait_s: float) -> None:
        self._starting.discard((role, number))
        spare = self._start(role, number, wait_s)
        if spare is None:
            self._starting.add((role, number))
            return
        with self._registry.ending_lock:
            if self._registry.closed:  # by another thread, which does not know this spare
                self._registry.fence(spare)
                return
            self._ready[role, number] = spare
        self._make_ready(role, number, spare)

    def _start(self, role: str, number: int, wait_s: float) -> RegisteredWorker | None:
        """Start a spare as if for an existing place. The place that it takes is sent to it when it connects."""
        cohort, launcher = self._workers, self._workers.launcher
        assert launcher is not None
        index = number % cohort.topology.num_workers[role]
        handle = launcher.start_spare(role, number, cohort.threads(role, index), wait_s)
        if handle is None:
            return None
        handle.index = index
        return cohort.prepare_extra(handle)

    def _make_ready(self, role: str, number: int, spare: RegisteredWorker) -> None:
        """Order a spare memory worker to allocate its memory, unless it has done so."""
        pool = self._pools[number % len(self._pools)] if self._pools and role == "memory" else None
        if pool is not None and self._warned.get(spare) != pool.unconnected:
            self._warned[spare] = pool.unconnected
            with suppress(LinkClosedError):  # its end is noticed when it is to take a place
                spare.link.send(PrepareStore(pool))

    def exited(self) -> list[RegisteredWorker]:
        """Return the spares that have ended since the last call, and forget them."""
        gone = {key: member for key, member in self._ready.items() if member.handle.exit_reason() is not None}
        for key, member in gone.items():
            log.warning("the spare %s %s", member.name, member.handle.exit_reason())
            self._let_go(key)
            self._registry.fence(member)
        return list(gone.values())

    def take_for(self, lost: RegisteredWorker, ranks: int, left_s: float = 0.0) -> RegisteredWorker | None:
        """Return a living spare for the place of ``lost``, which it then has; None if there is none on a host that
        other workers reach.

        ``ranks``: of a replica; a spare compute worker has the weights of one rank. ``left_s``: seconds that the caller
        has. Half of them are spent on a spare that is still starting, since that is faster than a new start.
        """
        coming = [key for key in sorted(self._starting) if _may_take(key, lost, ranks) and not lost.unreachable_peer]
        spare = self._pick(lost, ranks)
        while spare is None and coming and left_s > 0.0:
            role, number = key = coming.pop(0)
            log.info("a spare %s worker is starting and is waited for, %.1f s at most", role, left_s / 2)
            spare = self._awaited(role, number, lost, ranks, left_s / 2)
            left_s = 0.0 if key in self._starting else left_s
        return spare

    def _awaited(
        self, role: str, number: int, lost: RegisteredWorker, ranks: int, wait_s: float
    ) -> RegisteredWorker | None:
        try:
            self._bring(role, number, wait_s)
        except (OSError, ValueError) as error:
            log.warning("there are fewer spare workers than configured: %s", error)
        return self._pick(lost, ranks)

    def _pick(self, lost: RegisteredWorker, ranks: int) -> RegisteredWorker | None:
        """Return a spare for the place of ``lost`` out of those that have started; None if there is none."""
        role, index, place = lost.handle.role, lost.handle.index, lost.handle.host
        for (kind, number), member in list(self._ready.items()):
            if lost.unreachable_peer and place and member.handle.host == place:
                continue
            if _may_take((kind, number), lost, ranks):
                self._let_go((kind, number))
                if not (why := self._defect(member)):
                    log.info("a spare takes the place of %s worker %d (pid %d)", role, index, member.handle.pid)
                    if self._workers.launcher is not None:
                        self._workers.launcher.promote_spare(role, number, index)
                    member.handle.index = index
                    return member
                log.warning("the spare %s cannot take a place: %s", member.name, why)
                self._registry.fence(member)
        return None

    def _let_go(self, key: tuple[str, int]) -> None:
        self._warned.pop(self._ready.pop(key), None)

    def _defect(self, worker: RegisteredWorker) -> str:
        """Return why a spare cannot take a place, or nothing. Its messages stay in its inbox for later readers."""
        try:
            while (message := self._registry.receive_from(worker)) is not None:
                if isinstance(message, Failed):
                    return message.text
                worker.inbox.append(message)
        except (LinkClosedError, TimeoutError):
            return worker.handle.exit_reason() or "its control link has ended"
        return worker.handle.exit_reason() or ("stopped" if worker.handle.is_stopped else "")

    def close(self) -> None:
        """End all spares. Idempotent."""
        there, self._ready, self._warned, self._starting = list(self._ready.values()), {}, {}, set()
        for member in there:
            member.link.close()
        for member in there:
            member.handle.join(END_S)


def _may_take(key: tuple[str, int], lost: RegisteredWorker, ranks: int) -> bool:
    """Return whether the spare with that role and number suits the place of ``lost``."""
    (kind, number), role = key, lost.handle.role
    return kind == role and (role != "compute" or number % ranks == lost.handle.index % ranks)
