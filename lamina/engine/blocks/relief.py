"""Which sequence gives way where KV blocks run out for running sequences. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lamina.engine.prefill import Prefill
from lamina.engine.sequence import Sequence, Shadow
from lamina.protocol.plan import Free, Grant, Rows

from .ledger import Ledger
from .newcomers import Batch
from .prefixes import Prefixes
from .room import Room, rows_of
from .swaps import Swaps


class Relief:
    """Makes room. Nobody waits for KV that is being saved: memory workers copy it, or do not save it."""

    def __init__(self, ledger: Ledger, room: Room, prefixes: Prefixes, prefill: Prefill, swaps: Swaps | None) -> None:
        """``swaps``: where KV of preempted sequences is kept; None = nowhere."""
        self._ledger, self._room = ledger, room
        self._prefixes, self._prefill, self._swaps = prefixes, prefill, swaps

    def make_room(self, batch: Batch, picked: dict[Sequence, int], stuck: list[Sequence]) -> Sequence | None:
        """Give up what is retained; else preempt the newest sequence of ``batch`` whose blocks help, of those with the
        highest number for a priority, which is returned.
        While K and V of that one are on their way, another of ``picked`` waits. ``stuck``: they are preempted first.
        """
        if stuck:
            victim = stuck.pop()
            del picked[victim]
            self.preempt(batch, victim)
            return victim
        relieves = self._relieves(rows_of(picked))

        def helps(sequence: Sequence) -> bool:
            return relieves(self._room.blocks_of(sequence.place, sequence.num_scheduled))

        if self._give_up(batch, relieves):
            return None
        newest = batch.running[::-1]  # shadows give way before all others: answers depend on who gives way
        newest.sort(key=lambda s: (not isinstance(s, Shadow), -s.priority))
        victim = next(filter(helps, newest), batch.running[-1])
        if victim.num_prefilling or victim.num_loading:
            picked.popitem()
            return None
        picked.pop(victim, None)
        if isinstance(victim, Shadow):
            victim.finish("abort")
        self.preempt(batch, victim)
        return None if isinstance(victim, Shadow) else victim

    def make_room_for_grants(self, batch: Batch, picked: dict[Sequence, int]) -> bool:
        """Give up one that is retained where blocks lack for the grants of ``batch`` beside the rows of ``picked``;
        whether there was any that is of use.
        """
        return self._give_up(batch, self._relieves([*rows_of(picked), *_granted(batch)]))

    def _relieves(self, rows: Iterable[Rows]) -> Callable[[Iterable[int]], bool]:
        """Whether blocks, by layer group, are of use where such rows lack some; where they lack none, any are."""
        needed, free = self._ledger.blocks_needed(rows), self._ledger.free_blocks
        short = [n > f for n, f in zip(needed, free, strict=True)]
        anywhere = not any(short)
        return lambda blocks: any(n > 0 for n, lacks in zip(blocks, short, strict=True) if lacks or anywhere)

    def _give_up(self, batch: Batch, relieves: Callable[[Iterable[int]], bool]) -> bool:
        """Give up the oldest of what is retained whose blocks of its own are of use, else the oldest that shares some
        which are; whether there was any.
        """
        oldest, ledger = self._prefixes.oldest, self._ledger
        number = next((n for n in oldest if relieves(ledger.own_blocks(n))), None)
        if number is None:
            number = next((n for n in oldest if relieves(ledger.blocks_of([n]))), None)
        if number is not None:
            batch.ops.append(self._prefixes.evict(number))
        return number is not None

    def preempt(self, batch: Batch, victim: Sequence) -> None:
        """Its KV is freed with the batch's next plan, or kept beside the pool."""
        batch.running.remove(victim)
        if self._swaps and not victim.sparse and not victim.finished and victim.num_scheduled > victim.num_cached:
            batch.ops += self._swaps.save(victim)
        batch.ops.append(Free(victim.id))
        self._prefill.drop(victim)
        self._prefixes.drop(victim)
        victim.num_preemptions += 1
        victim.restart()
        if not victim.finished:
            self._prefill.expect(victim)


def _granted(batch: Batch) -> list[Rows]:
    """Of each sequence that prefill workers go on with in the next plan, all rows."""
    rows = dict[int, Rows]()
    for op in batch.ops:
        if isinstance(op, Grant):
            first = rows[op.sequence].first if op.sequence in rows else op.first
            rows[op.sequence] = Rows(op.sequence, first, op.first + op.count - first, op.place)
    return list(rows.values())
