"""The recovery of a lost memory worker's KV from all other ones, with one more worker that keeps their parity
(--kv-parity).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from lamina.config.engine_config import EngineConfig
from lamina.protocol.executor import Clock
from lamina.protocol.reshard import RebuildKv, ReshardDone
from lamina.protocol.step_plan import BindRequest, SurvivingKv
from lamina.workers.compute.kv_parity import parity_bind

if TYPE_CHECKING:
    from .worker_group import WorkerGroup
    from .worker_registry import WorkerRegistry

log = logging.getLogger(__name__)
TokensBySequence = dict[int, int]  # sequence -> tokens


class KvParity:
    """The parity of one engine; without --kv-parity it does nothing. The parity worker is the last one."""

    def __init__(self, config: EngineConfig, registry: WorkerRegistry, worker_group: WorkerGroup, clock: Clock) -> None:
        self._wanted, self._limit = bool(config.topology.kv_parity), config.deadlines.start_timeout_s
        self._silent_s = config.deadlines.step_timeout_s  # after which workers stop waiting for a silent peer
        self.registry, self._workers, self._clock = registry, worker_group, clock
        self._lost: int | None = None  # number of the worker whose KV is to be rebuilt

    @property
    def needs_rebuild(self) -> bool:
        """Return whether a worker's KV is to be rebuilt."""
        return self._lost is not None

    def surviving_after_rebuild(self, kept: list[TokensBySequence]) -> list[TokensBySequence]:
        """Return, for each memory worker that attends, the KV that it will have once a single lost worker's KV is
        rebuilt. If several are lost, theirs is gone. ``kept``: the KV of all, the parity worker last.
        """
        if not self._wanted:
            return kept
        lost = [i for i, member in enumerate(self.registry.memory) if member in self.registry.lost_workers]
        self._lost = lost[0] if len(lost) == 1 else None
        if self._lost is not None:
            kept[self._lost] = _least([report for i, report in enumerate(kept) if i != self._lost])
        *others, parity = kept
        return [_least([report, parity]) for report in others]

    def rebuild(self, keep: Sequence[SurvivingKv]) -> bool:
        """Send all other memory workers the order to send their share of the KV of ``keep`` to the worker in the lost
        one's place. Returns whether that KV is there; if not, it is to be computed again. Raises WorkersLostError.
        """
        place, self._lost = self._lost, None
        if place is None or not keep:
            return True
        memory, begun = self.registry.memory, self._clock()
        others = [i for i in range(len(memory)) if i != place]
        order = RebuildKv(
            epoch=self.registry.epoch,
            bind=None,
            surviving=list(keep),
            peers=[self._workers.address_of(member) for member in memory],
            own_index=0,
            sources=others,
            targets=[place],
            timeout_s=self._silent_s,
        )
        for me, member in enumerate(memory):
            bind = self._bind_of(place) if me == place else None
            self.registry.send(member, structs.replace(order, own_index=me, bind=bind))
        purpose = "to rebuild KV"
        answers, limit_s = list[ReshardDone](), self._limit
        for _ in memory:
            answers.append(self.registry.wait_for(memory, ReshardDone, limit_s, purpose))
            # As long again; after that one hangs.
            limit_s = min(self._limit, max(self._clock() - begun, self._silent_s))
            if error := answers[-1].error:  # the others may hang, and never reply
                log.warning("KV could not be rebuilt, and is computed again: %s", error)
                return False
        nbytes, seconds = sum(answer.nbytes for answer in answers), self._clock() - begun
        log.info("KV of memory worker %d is back: %d bytes came, %.3f s", place, nbytes, seconds)
        return True

    def _bind_of(self, place: int) -> BindRequest:
        """Return the BindRequest of the store that the lost worker at ``place`` had."""
        (first,), (kv_bytes,), backend = self._workers.memory_binds, self._workers.kv_bytes, self._workers.backend
        if place == len(kv_bytes):
            return parity_bind(first, backend, kv_bytes[0])
        kv = structs.replace(first.kv, attention=backend) if place else first.kv
        return structs.replace(first, worker=place, kv=kv, kv_bytes=kv_bytes[place])


def _least(reports: Sequence[Mapping[int, int]]) -> TokensBySequence:
    return {sequence: min(report.get(sequence, 0) for report in reports) for sequence in reports[0]}
