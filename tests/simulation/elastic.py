"""Memory workers of the simulation that come and go: the orders, the members after each, and the KV that moves."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from lamina.engine.evacuation import Evacuation
from lamina.protocol.capacity import Capacity
from lamina.protocol.step_plan import SurvivingKv

from .scenario import PlannedChange
from .workers import PoolShape, SimMemory

START_S = 0.1  # at most, of workers that come


class SimElastic:
    """The changes of one wire: at most one at a time, as in the real fleet."""

    def __init__(self, rng: random.Random, clock: Callable[[], float]) -> None:
        self._rng, self._clock = rng, clock
        self._asked: tuple[PlannedChange, PoolShape] | None = None
        self._due_at = float("inf")
        self._exits: Evacuation | None = None  # of sequences, before that
        self.stays: dict[int, int] = {}  # of the last change: KV shards that keep their sequences; see EpochChanged
        self._old: list[SimMemory] | None = None  # whose KV is to be moved
        self._dying: deque[tuple[str, int]] = deque()
        self.changes = 0  # that were made

    @property
    def under_way(self) -> bool:
        """Returns whether a change is asked for, and not made yet."""
        return self._asked is not None

    @property
    def due(self) -> bool:
        """Returns whether all workers that are to come are there, and all sequences that are to leave have left."""
        return self._clock() >= self._due_at and (self._exits is None or self._exits.is_done())

    @property
    def due_at(self) -> float:
        """When they are there, or were; never, where sequences leave: that takes events of others."""
        return float("inf") if self._exits and self._clock() >= self._due_at else self._due_at

    def begin(self, asked: PlannedChange, shape: PoolShape, exits: Evacuation | None) -> None:
        """Memory workers of ``shape`` are to be there."""
        self._asked, self._due_at = (asked, shape), self._clock() + self._rng.uniform(0.0, START_S)
        self._exits = exits
        if exits is not None:
            exits.begin()

    def commit(self, old: list[SimMemory]) -> PoolShape:
        """All are at rest: who is there from now on has no KV before ``move``."""
        assert self._asked is not None
        asked, shape = self._asked
        self._asked, self._due_at, self._old = None, float("inf"), old
        self.stays = {w: w for w in range(asked.workers)} if self._exits else {}
        self._exits = None
        self._dying = deque(asked.again)
        self.changes += 1
        return shape

    def move(
        self, memory: Sequence[SimMemory], keep: Sequence[SurvivingKv], die: Callable[[tuple[str, int]], None]
    ) -> bool:
        """Give ``memory`` the KV of ``keep``. False: a worker has died meanwhile, or what came was damaged; then some
        have all that they were to have, and others nothing.
        """
        old, self._old = self._old, None
        if old is None:
            return True
        dying, self._dying = self._dying, deque()
        for victim in dying:
            if victim[1] >= 0:  # else something is damaged, and no worker dies
                die(victim)
        for worker in memory:
            if not dying or self._rng.random() < 0.5:
                take(worker, keep, old)
        return not dying


def take(new: SimMemory, keep: Sequence[SurvivingKv], old: Sequence[SimMemory]) -> None:
    """Have the KV of ``keep``, as one of the ``old`` workers has it where the sequence was."""
    new.tables.reconcile(keep, moved=True)
    new.written.reconcile(keep)
    for each in keep:
        was = each.previous_location or each.location
        for group, window in enumerate(new.tables.windows):
            start, _ = new.tables.block_table(group, each.sequence)
            for number in range(start, -(-each.length // new.size)):
                block = new.block(group, each.sequence, each.location, number)
                if block is not None:
                    count = min(new.size, each.length - number * new.size)
                    whole = next(x for w in old for x in w.given(window, each.sequence, was, number))
                    block[:count] = [stored * new.weights[group] for stored in whole[:count]]


def capacity_of(shape: PoolShape) -> Capacity:
    """Returns the capacity as the driver has it."""
    blocks = [[shape.num_blocks] * len(h) for h in shape.holders]
    sparse = [False] * len(shape.windows)
    return Capacity(shape.windows, shape.lanes, shape.stripe, shape.stays, sparse, blocks, shape.holders)
