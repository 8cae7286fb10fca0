"""Chooses sequences that give way when KV blocks run out for running ones. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import Free, RowRange

from .batch import Batch
from .feature import Leaving
from .feature_table import FeatureTable
from .kv_manager.allocator import KvAllocator, next_rows
from .sequence import Sequence


class Preemption:
    """Makes room, without a wait for KV that is being saved: memory workers copy it, or do not save it."""

    def __init__(
        self,
        accounting: BlockTables,
        allocator: KvAllocator,
        features: FeatureTable,
    ) -> None:
        self._accounting, self._allocator, self._features = accounting, allocator, features

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
        relieves = self._test_rows(next_rows(picked))

        def helps(sequence: Sequence) -> bool:
            return relieves(self._allocator.max_blocks(sequence.location, sequence.num_computed_tokens))

        if self._evict_retained(batch, relieves):
            return None
        newest = batch.running[::-1]  # shadows give way before all others: answers depend on who gives way
        newest.sort(key=lambda s: (not s.is_hidden, -s.priority))
        victim = next(filter(helps, newest), batch.running[-1])
        if victim.num_pending_prefill_chunks or victim.num_loading_tokens:
            picked.popitem()
            return None
        picked.pop(victim, None)
        if victim.is_hidden:
            victim.finish("abort")
        self.preempt(batch, victim)
        return None if victim.is_hidden else victim

    def evict_for(self, batch: Batch, rows: Iterable[RowRange]) -> bool:
        """Give up one that is retained where blocks lack for ``rows``; whether there was any that is of use."""
        return self._evict_retained(batch, self._test_rows(rows))

    def _test_rows(self, rows: Iterable[RowRange]) -> Callable[[Iterable[int]], bool]:
        """Return a test of blocks, by layer group: whether they help rows that lack some. If none lack, all do."""
        needed, free = self._accounting.blocks_needed(rows), self._accounting.free_blocks
        short = [n > f for n, f in zip(needed, free, strict=True)]
        anywhere = not any(short)
        return lambda blocks: any(n > 0 for n, lacks in zip(blocks, short, strict=True) if lacks or anywhere)

    def _evict_retained(self, batch: Batch, relieves: Callable[[Iterable[int]], bool]) -> bool:
        """Give up the oldest of what is retained whose blocks of its own are of use, else the oldest that shares some
        which are; whether there was any.
        """
        oldest, ledger = self._features.eviction_order, self._accounting
        number = next((n for n in oldest if relieves(ledger.exclusive_blocks(n))), None)
        if number is None:
            number = next((n for n in oldest if relieves(ledger.count_blocks([n]))), None)
        if number is not None:
            batch.ops.append(self._features.evict(number))
        return number is not None

    def preempt(self, batch: Batch, victim: Sequence) -> None:
        """Free its KV with the batch's next plan; a feature may save it."""
        batch.running.remove(victim)
        leaving = self._features.on_leave(Leaving(victim, Free(victim.id), is_preempted=True))
        batch.ops += [*leaving.own, Free(victim.id)]
        victim.num_preemptions += 1
        victim.reset_computed()
        if not victim.finished:
            self._features.on_arrival(victim, is_new=False)
