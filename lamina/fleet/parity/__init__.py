"""What a lost memory worker had comes back from the others, where one more keeps the parity of all (--kv-parity)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from lamina.compute.parity import parity_bind
from lamina.engine.wire import Clock
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.plan import Bind, Keep
from lamina.protocol.recut import Rebuild, Recutted

if TYPE_CHECKING:
    from lamina.fleet.cohort import Cohort
    from lamina.fleet.members import Members

log = logging.getLogger(__name__)
Kept = dict[int, int]  # sequence -> tokens


class Parity:
    """Of one engine; without --kv-parity it does nothing. The parity worker is the last one."""

    def __init__(self, config: EngineConfig, members: Members, cohort: Cohort, clock: Clock) -> None:
        self._wanted, self._limit = bool(config.topology.kv_parity), config.deadlines.start_timeout_s
        self._silent_s = config.deadlines.step_timeout_s  # of a peer that others give up
        self._members, self._cohort, self._clock = members, cohort, clock
        self._lost: int | None = None  # whose KV is to come back

    @property
    def lacks(self) -> bool:
        """Whether KV of one is to come back."""
        return self._lost is not None

    def left(self, kept: list[Kept]) -> list[Kept]:
        """For each memory worker that attends, its KV once a single lost worker's KV is back; behind the loss of
        several, theirs is gone. ``kept``: what all have, the parity worker last.
        """
        if not self._wanted:
            return kept
        lost = [i for i, member in enumerate(self._members.memory) if member in self._members.lost]
        self._lost = lost[0] if len(lost) == 1 else None
        if self._lost is not None:
            kept[self._lost] = _least([report for i, report in enumerate(kept) if i != self._lost])
        *others, parity = kept
        return [_least([report, parity]) for report in others]

    def rebuild(self, keep: Sequence[Keep]) -> bool:
        """Have all other memory workers send their share of the KV of ``keep`` to the worker in the lost one's place.
        Returns whether that KV is there; else it is to be computed again. Raises LostError.
        """
        place, self._lost = self._lost, None
        if place is None or not keep:
            return True
        memory, begun = self._members.memory, self._clock()
        others = [i for i in range(len(memory)) if i != place]
        order = Rebuild(
            view=self._members.view,
            bind=None,
            keep=list(keep),
            peers=[self._cohort.address_of(member) for member in memory],
            me=0,
            sources=others,
            targets=[place],
            timeout_s=self._silent_s,
        )
        for me, member in enumerate(memory):
            bind = self._bind_of(place) if me == place else None
            self._members.send(member, structs.replace(order, me=me, bind=bind))
        said = "to rebuild KV"
        answers, limit_s = list[Recutted](), self._limit
        for _ in memory:
            answers.append(self._members.wait_for(memory, Recutted, limit_s, said))
            limit_s = min(self._limit, max(self._clock() - begun, self._silent_s))  # as long again; else one hangs
            if error := answers[-1].error:  # whoever is left may hang, and says nothing
                log.warning("KV could not be rebuilt, and is computed again: %s", error)
                return False
        nbytes, seconds = sum(answer.nbytes for answer in answers), self._clock() - begun
        log.info("KV of memory worker %d is back: %d bytes came, %.3f s", place, nbytes, seconds)
        return True

    def _bind_of(self, place: int) -> Bind:
        """Of the store that the one in that place had."""
        (first,), (kv_bytes,), backend = self._cohort.binds, self._cohort.kv_bytes, self._cohort.backend
        if place == len(kv_bytes):
            return parity_bind(first, backend, kv_bytes[0])
        kv = structs.replace(first.kv, attention=backend) if place else first.kv
        return structs.replace(first, worker=place, kv=kv, kv_bytes=kv_bytes[place])


def _least(reports: Sequence[Mapping[int, int]]) -> Kept:
    """Of each sequence what all have."""
    return {sequence: min(report.get(sequence, 0) for report in reports) for sequence in reports[0]}
