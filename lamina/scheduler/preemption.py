"""Preemption: chooses sequences to evict or preempt when KV blocks run out. Pure policy: no torch, no I/O, no clock.

``kv_manager.swap`` decides whether its KV is saved to host memory first.
"""

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
    """Frees blocks at once, without waiting for KV that is being saved: memory workers copy it, or drop the save."""

    def __init__(
        self,
        accounting: BlockTables,
        allocator: KvAllocator,
        features: FeatureTable,
    ) -> None:
        self._accounting, self._allocator, self._features = accounting, allocator, features

    def make_room(self, batch: Batch, picked: dict[Sequence, int], stuck: list[Sequence]) -> Sequence | None:
        """Evict a retained sequence, or preempt a running one of ``batch``, which is returned.

        It preempts ``stuck`` first, then by priority (the highest number first), then the newest, if its blocks help.
        If its K and V are in transfer, another one of ``picked`` waits.
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
        newest = batch.running[::-1]  # followers first, since answers depend on which one is preempted
        newest.sort(key=lambda s: (s.follows is None, -s.priority))
        victim = next(filter(helps, newest), batch.running[-1])
        if victim.transfer.writes_blocks:
            picked.popitem()
            return None
        picked.pop(victim, None)
        if victim.follows is not None:
            victim.finish("abort")
        self.preempt(batch, victim)
        return victim if victim.follows is None else None

    def evict_for(self, batch: Batch, rows: Iterable[RowRange]) -> bool:
        """Evict a retained sequence whose blocks ``rows`` can use. Returns False if there is none."""
        return self._evict_retained(batch, self._test_rows(rows))

    def _test_rows(self, rows: Iterable[RowRange]) -> Callable[[Iterable[int]], bool]:
        """Return a test of blocks by layer group: True if ``rows`` lack some there, or if they lack none at all."""
        needed, free = self._accounting.blocks_needed(rows), self._accounting.free_blocks
        short = [n > f for n, f in zip(needed, free, strict=True)]
        anywhere = not any(short)
        return lambda blocks: any(n > 0 for n, lacks in zip(blocks, short, strict=True) if lacks or anywhere)

    def _evict_retained(self, batch: Batch, relieves: Callable[[Iterable[int]], bool]) -> bool:
        """Evict the oldest retained sequence whose own blocks help, else the oldest whose shared blocks do.

        Returns False if there is none.
        """
        oldest, ledger = self._features.eviction_order, self._accounting
        number = next((n for n in oldest if relieves(ledger.exclusive_blocks(n))), None)
        if number is None:
            number = next((n for n in oldest if relieves(ledger.count_blocks([n]))), None)
        if number is not None:
            batch.ops.append(self._features.evict(number))
        return number is not None

    def preempt(self, batch: Batch, victim: Sequence) -> None:
        """Stop a running sequence and free its KV with the batch's next plan; a feature may save it."""
        batch.running.remove(victim)
        leaving = self._features.on_leave(Leaving(victim, Free(victim.id), is_preempted=True))
        batch.ops += [*leaving.own, Free(victim.id)]
        victim.num_preemptions += 1
        victim.reset_computed()
        if not victim.finished:
            self._features.on_arrival(victim, is_new=False)
