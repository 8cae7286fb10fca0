"""Stripes, or whole sequences, that go from one memory worker of the simulation to another one while both serve."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import CopyStripes, StripesCopied

from .workers import SimMemory

FAILS = 0.1  # of copies


class SimCopies:
    """The copies of one epoch. A copy is made some time after its plan, and each memory worker reports it once."""

    def __init__(
        self,
        memory: Sequence[SimMemory],
        rng: random.Random,
        later: Callable[..., None],
        lives: Callable[[str, int], bool],
        say: Callable[[StripesCopied], None],
    ) -> None:
        self._memory, self._rng, self._later, self._lives, self._say = memory, rng, later, lives, say
        self._begun: dict[int, set[int]] = {}  # copy -> memory workers that have its plan

    def begin(self, number: int, op: CopyStripes) -> None:
        """Memory worker ``number`` has applied the plan of ``op``."""
        begun = self._begun.setdefault(op.sequence, set())
        begun.add(number)
        if len(begun) == len(self._memory):
            self._later(self._copy, op)

    def _copy(self, op: CopyStripes) -> None:
        if not all(self._lives("memory", worker.number) for worker in self._memory):
            return  # the epoch changes
        there = all({op.sequence, op.source} <= {*worker.tables.sequences} for worker in self._memory)
        fails = self._rng.random() < FAILS
        for worker in self._memory:
            nbytes = self.take(worker, op) if there else 0
            error = "the link has ended" if nbytes and fails else ""
            self._say(StripesCopied(epoch=0, sequence=op.sequence, nbytes=0 if error else nbytes, error=error))

    def take(self, worker: SimMemory, op: CopyStripes) -> int:
        """Returns what ``worker`` is to have of it, as the giving worker has it."""
        tables, nbytes = worker.tables, 0
        place, length = tables.location(op.source), tables.length(op.sequence)
        for number in range(op.stripe * tables.stripe_blocks, -(-length // worker.size)):
            for group, window in enumerate(tables.windows):
                block = worker.block(group, op.sequence, KvLocation(op.kv_shard), number)
                if block is not None:
                    whole = next(x for w in self._memory for x in w.given(window, op.source, place, number))
                    block[:] = [stored * worker.weights[group] for stored in whole]
                    nbytes += worker.size
        return nbytes
