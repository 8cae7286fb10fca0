"""The recovery of a lost memory worker's KV from all other ones of its rank, with one more worker for each rank that
keeps their parity (--kv-parity).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from lamina.config.engine_config import EngineConfig
from lamina.protocol.control import Address, TransferPeer
from lamina.protocol.executor import Clock
from lamina.protocol.reshard import RebuildKv, ReshardDone
from lamina.protocol.step_plan import BindRequest, SurvivingKv
from lamina.workers.compute.kv_parity import parity_bind

if TYPE_CHECKING:
    from .worker_group import WorkerGroup
    from .worker_registry import RegisteredWorker, WorkerRegistry

log = logging.getLogger(__name__)
TokensBySequence = dict[int, int]  # sequence -> tokens


class KvParity:
    """The parity of one engine; without --kv-parity it does nothing. Memory worker w is rank w % ranks', and the last
    worker of each rank keeps the parity of the rank's others.
    """

    def __init__(self, config: EngineConfig, registry: WorkerRegistry, worker_group: WorkerGroup, clock: Clock) -> None:
        self._wanted, self._limit = bool(config.topology.kv_parity), config.deadlines.start_timeout_s
        self._silent_s = config.deadlines.step_timeout_s  # after which workers stop waiting for a silent peer
        self._ranks = config.topology.tensor_parallel_size
        self.registry, self._workers, self._clock = registry, worker_group, clock
        self._lost: list[int] = []  # numbers of the workers whose KV is to be rebuilt, of a rank one at most

    @property
    def needs_rebuild(self) -> bool:
        """Return whether a worker's KV is to be rebuilt."""
        return bool(self._lost)

    def surviving_after_rebuild(self, kept: list[TokensBySequence]) -> list[TokensBySequence]:
        """Return, for each memory worker that attends, the KV that it will have once the KV of lost workers is rebuilt.
        If a rank has lost several, no KV is rebuilt. ``kept``: the KV of all, the parity workers last.
        """
        if not self._wanted:
            return kept
        lost = [i for i, member in enumerate(self.registry.memory) if member in self.registry.lost_workers]
        self._lost = lost if len({i % self._ranks for i in lost}) == len(lost) else []
        for place in self._lost:
            kept[place] = _least([kept[i] for i in self._others(place)])
        parity = kept[-self._ranks :]
        return [_least([report, parity[i % self._ranks]]) for i, report in enumerate(kept[: -self._ranks])]

    def rebuild(self, keep: Sequence[SurvivingKv]) -> bool:
        """Send all other memory workers of a lost one's rank the order to send their share of the KV of ``keep`` to the
        worker in its place. Returns whether that KV is there; if not, it is to be computed again. Raises
        WorkersLostError.
        """
        places, self._lost = self._lost, []
        return not keep or all(self._rebuild(place, keep) for place in places)

    def _rebuild(self, place: int, keep: Sequence[SurvivingKv]) -> bool:
        memory, begun = self._of_rank(place), self._clock()
        target = place // self._ranks
        order = RebuildKv(
            epoch=self.registry.epoch,
            bind=None,
            surviving=list(keep),
            peers=[self._workers.address_of(member) for member in memory],
            own_index=0,
            sources=[i for i in range(len(memory)) if i != target],
            targets=[target],
            timeout_s=self._silent_s,
        )
        for me, member in enumerate(memory):
            bind = self._bind_of(place) if me == target else None
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

    def _of_rank(self, place: int) -> list[RegisteredWorker]:
        """Return the memory workers of the rank of the one at ``place``, the parity worker last."""
        return list(self.registry.memory[place % self._ranks :: self._ranks])

    def _others(self, place: int) -> list[int]:
        """Return the numbers of the other memory workers of the rank of the one at ``place``."""
        return [i for i in range(place % self._ranks, len(self.registry.memory), self._ranks) if i != place]

    def _bind_of(self, place: int) -> BindRequest:
        """Return the BindRequest of the store that the lost worker at ``place`` had."""
        worker, rank = divmod(place, self._ranks)
        first, kv_bytes = self._workers.memory_binds[rank], self._workers.kv_bytes[rank]
        if worker == len(kv_bytes):
            return parity_bind(first, self._workers.backend, kv_bytes[0])
        kv = structs.replace(first.kv, attention=self._workers.backend) if worker else first.kv
        return structs.replace(first, worker=worker, kv=kv, kv_bytes=kv_bytes[worker])


def _least(reports: Sequence[Mapping[int, int]]) -> TokensBySequence:
    return {sequence: min(report.get(sequence, 0) for report in reports) for sequence in reports[0]}


def parity_peers(of_rank: Sequence[Address], own: Address) -> list[TransferPeer]:
    """Return the peers of the memory worker at ``own`` for the parity of what is loaded. ``of_rank``: all of its rank,
    the parity worker last, which connects to the others.
    """
    *others, parity = of_rank
    if own != parity:
        return [TransferPeer(parity.name, is_awaited=True)]
    reached = [TransferPeer(each.name, connects=True, url=each.url, key=each.key) for each in others]
    return [*reached, TransferPeer(own.name, is_receiver=True)]
