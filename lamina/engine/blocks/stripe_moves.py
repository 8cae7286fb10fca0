"""Which stripes go to another memory worker while their sequences decode, and when. Pure policy: no torch, no I/O, no
clock.

What lies on loan goes home once home has room for it and nobody waits; what is retained there gives way, unless it was
asked to stay. One copy is under way at a time, of few stripes: so no more than these lie twice. While it is, the
sequence lies as it did; if anything fails, it goes on so. Where sequences lie whole, they leave the memory workers that
are to go, one after the other: each has no rows while it is copied, and all others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from itertools import islice
from typing import NamedTuple

from lamina.engine.sequence import Sequence, Shadow
from lamina.engine.wire import Report
from lamina.protocol.loans import relocated
from lamina.protocol.move_ops import Adopt, MoveStripes, StripesCopied
from lamina.protocol.placement import Place, Run
from lamina.protocol.plan import Fork, Free, Keep, StepPlan

from .ledger import Ledger
from .newcomers import Batch
from .prefixes import Prefixes
from .room import Room, less

MOST_STRIPES = 8  # of a copy
MOST_LOOKED_AT = 8  # retained sequences


class _MovingStripes(NamedTuple):
    """``of``: the sequence, by its number, whose stripes ``run`` are to lie in its lane; none: all of it is.
    ``number``: of the copy.
    """

    number: int
    of: int
    run: Run


class StripeMoves:
    """``ranks``: each copies what it has of the stripes; 0, or layers with a window: nothing moves."""

    def __init__(self, ledger: Ledger, room: Room, prefixes: Prefixes, ranks: int) -> None:
        self.num_moved = 0  # KV blocks of each layer, that have gone home, or left
        self.leaving: set[int] = set()  # groups of memory workers that are to go: whole sequences leave them
        self._stuck = False  # none of those that are left there finds room elsewhere
        self._ledger, self._room, self._prefixes = ledger, room, prefixes
        self._ranks = 0 if any(ledger.windows) else ranks  # of what a window has passed there is nothing to copy
        self._copy: _MovingStripes | None = None
        self._stored, self._failed = 0, False  # of it: ranks that have it
        self._unsure: dict[int, int] = {}  # sequence -> step, before which not all know where it lies
        self._fails = not self._ranks  # nothing more is tried under this view

    @property
    def under_way(self) -> bool:
        """Whether memory workers copy something, or have not been told to have it."""
        return self._copy is not None or bool(self._unsure) or bool(self.leaving)

    @property
    def awaited(self) -> bool:
        """Whether a memory worker has yet to say that a copy is there, or is not."""
        return self._copy is not None and not self._failed and self._stored < self._ranks

    def is_over(self, running: Iterable[Sequence]) -> bool:
        """Whether all have left who can, and all know where they lie."""
        there = [s for s in running if not s.finished]
        sure = self._unsure.keys().isdisjoint(s.id for s in there)
        return self._copy is None and sure and (self._fails or self._stuck or not any(map(self._is_leaving, there)))

    def report(self, said: Report) -> None:
        """A memory worker has done its part of a copy, or could not; others are about something else."""
        if isinstance(said, StripesCopied) and self._copy is not None and said.sequence == self._copy.number:
            self._failed |= bool(said.error)
            self._stored += said.nbytes > 0

    def done(self, step: StepPlan) -> None:
        """A step is: whoever has rows of it knows where they lie."""
        for rows in step.rows if self._unsure else ():
            if self._unsure.get(rows.sequence, step.step + 1) <= step.step:
                del self._unsure[rows.sequence]

    def roll_back(self, kept: Callable[[Keep], int]) -> Callable[[Keep], int]:
        """Steps in flight are taken back. What memory workers have, as ``kept`` tells it; of a sequence that not all
        know to lie elsewhere nothing is.
        """
        unsure = set(self._unsure)
        self._copy, self._unsure, self._fails, self._stuck = None, {}, not self._ranks, False
        return lambda keep: 0 if keep.sequence in unsure else kept(keep)

    def tend(self, batches: Several[Batch], step: int, number: Callable[[], int], *, crowded: bool) -> None:
        """Add the ops that are due to the plans of ``step``, the next ones. ``number``: gives the number of a new
        sequence; ``crowded``: whether sequences wait for room.
        """
        self._unsure = {s: at for s, at in self._unsure.items() if any(self._ledger.blocks_of([s]))}
        idle = not self.leaving and (crowded or self._room.loans is None)
        if self._copy is None and (self._fails or idle):
            return
        running = {s.id: (s, batch) for batch in batches for s in batch.running if not s.finished}
        if self._copy is not None:
            self._end(self._copy, batches[0], step, running.get(self._copy.of))
            return
        sequences = [s for s, _ in running.values()]
        due = self._leaver(sequences, batches) if self.leaving else self._borrower(sequences, batches[0])
        if due is not None:
            sequence, run = due
            self._copy, self._stored, self._failed = _MovingStripes(number(), sequence.id, run), 0, False
            op = MoveStripes(self._copy.number, sequence.id, run.start, run.stop - run.start, run.lane)
            running[sequence.id][1].ops.append(op)

    def _borrower(self, running: list[Sequence], first: Batch) -> tuple[Sequence, Run] | None:
        """Whose loan goes home next, and what of it; what is retained gives way."""
        if not any(s.place.moved for s in running):
            return None
        due = self._due(running, self._room.left(running, {}))
        if due is None:
            first.ops += self._give_way(running)
        return due

    def _leaver(self, running: list[Sequence], batches: Several[Batch]) -> tuple[Sequence, Run] | None:
        """Who leaves next, and where to: the first one that finds room. What is retained there gives way."""
        there = [s for s in running if self._is_leaving(s)]
        ready = [s for s in there if self._may_move(s)]
        left = self._room.left(running, {})
        for sequence in running:
            left = less(left, self._room.blocks_of(sequence.place, 1))  # for the rows of this round
        sources = {op.source for batch in batches for op in batch.ops if isinstance(op, Fork)}
        gone = list[int]()
        for number in [None, *(n for n in self._prefixes.oldest if n not in sources)]:
            if number is not None:
                own = self._ledger.own_blocks(number)
                if not any(n for group, n in enumerate(own) if group not in self.leaving):
                    continue
                left, gone = [n + more for n, more in zip(left, own, strict=True)], [*gone, number]
            for sequence in ready:
                if (lane := self._roomy(sequence, left)) is not None:
                    batches[0].ops += [self._prefixes.evict(n) for n in gone]
                    sequence.moving = True
                    return sequence, Run(0, 0, lane)
        self._stuck = len(ready) == len(there)
        return None

    def _roomy(self, sequence: Sequence, left: list[int]) -> int | None:
        """The lane with the most room, of those that have enough for it."""
        rests = dict[int, int]()
        for lane in range(self._ledger.num_lanes):
            groups = self._groups(lane)
            rest = less(left, self._room.blocks_of(Place(lane), sequence.num_promised + 1))
            if groups.isdisjoint(self._room.closed | self.leaving) and min(rest[g] for g in groups) >= 0:
                rests[lane] = min(rest[g] for g in groups)
        return max(rests, key=rests.__getitem__, default=None)

    def _groups(self, lane: int) -> set[int]:
        return {group for group, lanes in enumerate(self._ledger.lanes) if lane in lanes}

    def _is_leaving(self, sequence: Sequence) -> bool:
        return bool(self.leaving) and not self._groups(sequence.place.lane).isdisjoint(self.leaving)

    def _end(self, copy: _MovingStripes, first: Batch, step: int, of: tuple[Sequence, Batch] | None) -> None:
        """Have the sequence lie there once the copy is, or nothing of it where it is not wanted any more."""
        place = self._relocated(of[0], copy.run) if of is not None else None
        if of is None or place is None or self._failed:
            first.ops.append(Free(copy.number))
            self._copy, self._fails = None, self._failed
            if of is not None:
                of[0].moving = False
        elif self._stored >= self._ranks:
            sequence, batch = of
            batch.ops.append(Adopt(sequence.id, copy.number, place))
            sequence.place, self._unsure[sequence.id] = place, step
            stripes, whole = copy.run.stop - copy.run.start, -(-sequence.num_scheduled // self._ledger.block_size)
            self.num_moved += stripes * self._ledger.placement.stripe or whole
            self._copy, sequence.moving = None, False

    def _due(self, running: list[Sequence], blocks: list[int]) -> tuple[Sequence, Run] | None:
        """What may be copied next into so many ``blocks``: the last stripes of a run, as many as fit at home. What
        others share stays.
        """
        assert self._room.loans is not None
        room = self._room.loans.room(blocks)
        for sequence in (s for s in running if s.place.moved and self._may_move(s)):
            home = sequence.place.lane
            spare = room.get(home, 0) - sum(s.place.lane == home for s in running)
            for run in reversed(sequence.place.moved):
                stop = self._whole(sequence, run)
                count = min(spare, MOST_STRIPES, stop - run.start)
                part = Run(stop - count, stop, home)
                alone = count > 0 and self._ledger.has_alone(sequence.id, part.start * self._stripe_tokens)
                if alone and self._relocated(sequence, part) is not None:
                    return sequence, part
        return None

    def _give_way(self, running: list[Sequence]) -> list[Free]:
        """The oldest of what is retained and was not asked to stay, where some could go home without the oldest few."""
        few = [(n, self._ledger.own_blocks(n)) for n in islice(self._prefixes.unasked(), MOST_LOOKED_AT)]
        blocks = [sum(each) for each in zip(self._room.left(running, {}), *(own for _, own in few), strict=True)]
        if not few or (due := self._due(running, blocks)) is None:
            return []
        there = [group for group, lanes in enumerate(self._ledger.lanes) if due[1].lane in lanes]
        oldest = next((n for n, own in few if any(own[group] for group in there)), None)
        return [] if oldest is None else [self._prefixes.evict(oldest)]

    def _relocated(self, sequence: Sequence, run: Run) -> Place | None:
        if not self._ledger.placement.stripe:
            return Place(run.lane)
        return relocated(sequence.place, run, -(-sequence.num_scheduled // self._stripe_tokens))

    def _whole(self, sequence: Sequence, run: Run) -> int:
        """Behind its last stripe that is wholly written, or will be by steps in flight; 0: it has none."""
        stop = min(run.stop, sequence.num_scheduled // self._stripe_tokens)
        return stop if stop > run.start else 0

    @property
    def _stripe_tokens(self) -> int:
        return self._ledger.placement.stripe * self._ledger.block_size

    @staticmethod
    def _may_move(sequence: Sequence) -> bool:
        waits = sequence.num_loading or sequence.num_prefilling or sequence.prefill_worker is not None
        return sequence.decodes and not waits and not isinstance(sequence, Shadow)
