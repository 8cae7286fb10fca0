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
END_S = 2.0  # for all of them to end with their links


class DegradedReplicas:
    """Tracks replicas that are starting; only this class reads their links."""

    def __init__(
        self,
        config: EngineConfig,
        registry: WorkerRegistry,
        start: Callable[[str, int], RegisteredWorker],
        clock: Clock,
    ) -> None:
        """``start``: a worker of a role for the place with that number, which loads."""
        self._members, self._start, self._clock = registry, start, clock
        self._limit_s = config.deadlines.start_timeout_s
        topology, on_cpu = config.topology, config.devices.compute_device == "cpu"  # graphs name who is met
        self._possible = topology.tensor_parallel_size == 1 and not topology.measures_pipeline and on_cpu
        self._loading: dict[int, tuple[RegisteredWorker, float]] = {}  # by place: who loads, and until when
        self._loaded: dict[RegisteredWorker, Loaded] = {}
        self._dropped: set[RegisteredWorker] = set()  # absent members whose links have ended

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return (member for member, _ in self._loading.values())

    def drop_replica(self, lost: RegisteredWorker) -> bool:
        """Go on without one that is lost, where another replica lives: it is no member any more, and another one is
        started in its place, if there is room. Whether that is so. Raises OSError, ValueError.
        """
        others = [m for m in self._members.compute if m not in self._members.lost_workers]
        if lost.handle.role != "compute" or not self._possible or not others:
            return False
        self._begin(lost.handle.index)
        self._members.remove_lost(lost)
        if lost.handle.index in self._loading:
            log.info("%s is done without until another one has loaded", lost.name)
        return True

    def is_any_loaded(self) -> bool:
        """Whether some have loaded, and may come in. Raises WorkersLostError where one has ended, or takes too long."""
        for member, deadline in self._loading.values():
            try:
                while member not in self._loaded and (message := self._members.receive_from(member)) is not None:
                    if isinstance(message, Loaded):
                        self._loaded[member] = message
                    elif isinstance(message, Failed):
                        raise self._lost(member, message.text)
            except (LinkClosedError, TimeoutError) as error:
                self._dropped.add(member)  # its fate may be known later
                late = "stands still in the midst of a message" if isinstance(error, TimeoutError) else ""
                fate = late or member.handle.exit_reason() or "closed its control link"
                raise self._lost(member, fate, ended=True) from None
            if member not in self._loaded and self._clock() > deadline:
                raise self._lost(member, f"took too long to start (--start-timeout-s {self._limit_s:g})")
        return bool(self._loaded)

    def rejoin(self) -> dict[RegisteredWorker, Loaded]:
        """Give workers that have loaded their places; returns their answers. Starts other ones for those that have
        ended. Raises OSError, ValueError.
        """
        loaded, self._loaded = self._loaded, {}
        gone, self._dropped = self._dropped, set()
        for place, (member, _) in list(self._loading.items()):
            if member in loaded:
                with self._members.register(member):
                    del self._loading[place]
                    self._members.insert(member)
            elif member in gone or member.handle.exit_reason() is not None:
                self._members.fence(member)
                self._begin(place)
        return loaded

    def close(self) -> None:
        """End them. Idempotent."""
        there, self._loading = list(self), {}
        for member in there:
            member.link.close()
        deadline = self._clock() + END_S
        for member in there:
            member.handle.join(max(0.0, deadline - self._clock()))

    def _begin(self, place: int) -> None:
        self._loading.pop(place, None)
        try:
            member = self._start("compute", place)
        except HostLostError as error:
            log.warning("%s: decoding goes on without it", error)
            return
        with self._members.register(member):
            self._loading[place] = member, self._clock() + self._limit_s

    def _lost(self, worker: RegisteredWorker, how: str, *, ended: bool = False) -> WorkersLostError:
        """One that has not ended has failed for a reason, which another one would have, too."""
        loss = WorkersLostError(f"{worker.name}: {how}", [worker], ended=ended)
        if not ended:
            self._members.mark_lost(worker, loss)
        return loss
