"""Which stripes go to another memory worker while their sequences decode, and when. Pure policy: no torch, no I/O, no
clock.

What lies on loan goes home once home has room for it and nobody waits; what is retained there gives way, unless it was
asked to stay. One copy is under way at a time, of few stripes: so no more than these lie twice. While it is, the
sequence lies as it did; if anything fails, it goes on so.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import islice
from typing import NamedTuple

from lamina.engine.sequence import Sequence, Shadow
from lamina.engine.wire import Report
from lamina.protocol.loans import relocated
from lamina.protocol.move_ops import Adopt, MoveStripes, StripesCopied
from lamina.protocol.placement import Place, Run
from lamina.protocol.plan import Free, Keep, StepPlan

from .ledger import Ledger
from .newcomers import Batch
from .prefixes import Prefixes
from .room import Room

MOST_STRIPES = 8  # of a copy
MOST_LOOKED_AT = 8  # of what is retained


class _MovingStripes(NamedTuple):
    """``of``: the sequence, by its number, whose stripes ``run`` are to lie in its lane; ``number``: of the copy."""

    number: int
    of: int
    run: Run


class StripeMoves:
    """``ranks``: each copies what it has of the stripes; 0, or layers with a window: nothing moves."""

    def __init__(self, ledger: Ledger, room: Room, prefixes: Prefixes, ranks: int) -> None:
        self.num_moved = 0  # KV blocks of each layer, that have gone home
        self._ledger, self._room, self._prefixes = ledger, room, prefixes
        self._ranks = 0 if any(ledger.windows) else ranks  # of what a window has passed there is nothing to copy
        self._copy: _MovingStripes | None = None
        self._stored, self._failed = 0, False  # of it: ranks that have it
        self._unsure: dict[int, int] = {}  # sequence -> step, before which not all know where it lies
        self._fails = not self._ranks  # nothing more is tried under this view

    @property
    def under_way(self) -> bool:
        """Whether memory workers copy something, or have not been told to have it."""
        return self._copy is not None or bool(self._unsure)

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
        self._copy, self._unsure, self._fails = None, {}, not self._ranks
        return lambda keep: 0 if keep.sequence in unsure else kept(keep)

    def tend(self, batches: Several[Batch], step: int, number: Callable[[], int], *, crowded: bool) -> None:
        """Add to the next plans, those of ``step``, what is due. ``number``: gives a new sequence's; ``crowded``:
        others wait for room.
        """
        self._unsure = {s: at for s, at in self._unsure.items() if any(self._ledger.blocks_of([s]))}
        loans = self._room.loans
        if self._copy is None and (self._fails or crowded or loans is None):
            return
        running = {s.id: (s, batch) for batch in batches for s in batch.running if not s.finished}
        if self._copy is not None:
            self._end(self._copy, batches[0], step, running.get(self._copy.of))
        elif any(s.place.moved for s, _ in running.values()):
            sequences = [s for s, _ in running.values()]
            due = self._due(sequences, self._room.left(sequences, {}))
            if due is None:
                batches[0].ops += self._give_way(sequences)
            else:
                sequence, run = due
                self._copy, self._stored, self._failed = _MovingStripes(number(), sequence.id, run), 0, False
                op = MoveStripes(self._copy.number, sequence.id, run.start, run.stop - run.start, run.lane)
                running[sequence.id][1].ops.append(op)

    def _end(self, copy: _MovingStripes, first: Batch, step: int, of: tuple[Sequence, Batch] | None) -> None:
        """Have the sequence lie there once the copy is, or nothing of it where it is not wanted any more."""
        place = self._relocated(of[0], copy.run) if of is not None else None
        if of is None or place is None or self._failed:
            first.ops.append(Free(copy.number))
            self._copy, self._fails = None, self._failed
        elif self._stored >= self._ranks:
            sequence, batch = of
            batch.ops.append(Adopt(sequence.id, copy.number, place))
            sequence.place, self._unsure[sequence.id] = place, step
            self.num_moved += (copy.run.stop - copy.run.start) * self._ledger.placement.stripe
            self._copy = None

    def _due(self, running: list[Sequence], blocks: list[int]) -> tuple[Sequence, Run] | None:
        """What may be copied next into so many ``blocks``: the last stripes of a run, as many as fit at home. What
        others share stays.
        """
        assert self._room.loans is not None
        room = self._room.loans.room(blocks)
        for sequence in filter(self._may_move, running):
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
        return bool(sequence.place.moved) and sequence.decodes and not waits and not isinstance(sequence, Shadow)
