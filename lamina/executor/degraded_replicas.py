"""Degraded mode: decoding continues without lost replicas while new workers load.

They join by a change of the epoch in which no worker is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import Failed, LinkClosedError, Loaded
from lamina.protocol.executor import Clock

from .launchers import HostLostError
from .worker_registry import RegisteredWorker, WorkerRegistry, WorkersLostError

log = logging.getLogger(__name__)
END_S = 2.0  # for all these workers to end with their links


class DegradedReplicas:
    """Tracks replicas that are starting; only this class reads their links."""

    def __init__(
        self,
        config: EngineConfig,
        registry: WorkerRegistry,
        start: Callable[[str, int], RegisteredWorker],
        clock: Clock,
    ) -> None:
        """``start``: starts a worker of a role for the place with that number, and has it load."""
        self._members, self._start, self._clock = registry, start, clock
        self._limit_s = config.deadlines.start_timeout_s
        topology, on_cpu = config.topology, config.devices.compute_device == "cpu"  # graphs of GPUs name their peers
        self._possible = topology.tensor_parallel_size == 1 and not topology.measures_pipeline and on_cpu
        # By place: the worker that loads, and its deadline.
        self.loading: dict[int, tuple[RegisteredWorker, float]] = {}
        self._loaded: dict[RegisteredWorker, Loaded] = {}
        self._dropped: set[RegisteredWorker] = set()  # absent members whose links have ended

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return (member for member, _ in self.loading.values())

    def drop_replica(self, lost: RegisteredWorker) -> bool:
        """Continue without a lost replica, if another one lives, and start a worker in its place, if there is space.
        Returns whether the lost one was dropped from the members. Raises OSError, ValueError.
        """
        others = [m for m in self._members.compute if m not in self._members.lost_workers]
        if lost.handle.role != "compute" or not self._possible or not others:
            return False
        self._begin(lost.handle.index)
        self._members.remove_lost(lost)
        if lost.handle.index in self.loading:
            log.info("%s is done without until another one has loaded", lost.name)
        return True

    def is_any_loaded(self) -> bool:
        """Return whether some have loaded, and may join. Raises WorkersLostError if one has ended, or is too slow."""
        for member, deadline in self.loading.values():
            try:
                while member not in self._loaded and (message := self._members.receive_from(member)) is not None:
                    if isinstance(message, Loaded):
                        self._loaded[member] = message
                    elif isinstance(message, Failed):
                        raise self._lost(member, message.text)
            except (LinkClosedError, TimeoutError) as error:
                self._dropped.add(member)  # its exit status may be known later
                late = "sent only part of a message" if isinstance(error, TimeoutError) else ""
                fate = late or member.handle.exit_reason() or "closed its control link"
                raise self._lost(member, fate, ended=True) from None
            if member not in self._loaded and self._clock() > deadline:
                raise self._lost(member, f"took too long to start (--start-timeout-s {self._limit_s:g})")
        return bool(self._loaded)

    def rejoin(self) -> dict[RegisteredWorker, Loaded]:
        """Give loaded workers their places, and return their replies. Starts new workers for those that have ended.
        Raises OSError, ValueError.
        """
        loaded, self._loaded = self._loaded, {}
        gone, self._dropped = self._dropped, set()
        for place, (member, _) in list(self.loading.items()):
            if member in loaded:
                with self._members.register(member):
                    del self.loading[place]
                    self._members.insert(member)
            elif member in gone or member.handle.exit_reason() is not None:
                self._members.fence(member)
                self._begin(place)
        return loaded

    def close(self) -> None:
        """End the workers that are starting. Idempotent."""
        there, self.loading = list(self), {}
        for member in there:
            member.link.close()
        deadline = self._clock() + END_S
        for member in there:
            member.handle.join(max(0.0, deadline - self._clock()))

    def _begin(self, place: int) -> None:
        self.loading.pop(place, None)
        try:
            member = self._start("compute", place)
        except HostLostError as error:
            log.warning("%s: decoding continues without it", error)
            return
        with self._members.register(member):
            self.loading[place] = member, self._clock() + self._limit_s

    def _lost(self, worker: RegisteredWorker, how: str, *, ended: bool = False) -> WorkersLostError:
        """Return the error of a failed worker. One that has not ended counts as lost: its failure would repeat."""
        loss = WorkersLostError(f"{worker.name}: {how}", [worker], ended=ended)
        if not ended:
            self._members.mark_lost(worker, loss)
        return loss
