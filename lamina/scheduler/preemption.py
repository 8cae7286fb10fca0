"""Which sequence gives way where KV blocks run out for running sequences. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lamina.protocol.step_plan import Free, PrefillGrant, RowRange

from .batch import Batch
from .kv_manager.allocator import KvAllocator, next_rows
from .kv_manager.block_accounting import BlockAccounting
from .kv_manager.prefix_cache import PrefixCache
from .kv_manager.swap import SwapPolicy
from .prefill_dispatch import PrefillDispatcher
from .sequence import ReferenceSequence, Sequence


class Preemption:
    """Makes room. Nobody waits for KV that is being saved: memory workers copy it, or do not save it."""

    def __init__(
        self,
        accounting: BlockAccounting,
        allocator: KvAllocator,
        prefix_cache: PrefixCache,
        prefill: PrefillDispatcher,
        swap: SwapPolicy | None,
    ) -> None:
        """``swap``: where KV of preempted sequences is kept; None = nowhere."""
        self._accounting, self._allocator = accounting, allocator
        self._prefix_cache, self._prefill, self._swap = prefix_cache, prefill, swap

    def free_blocks(self, batch: Batch, picked: dict[Sequence, int], stuck: list[Sequence]) -> Sequence | None:
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
        newest.sort(key=lambda s: (not isinstance(s, ReferenceSequence), -s.priority))
        victim = next(filter(helps, newest), batch.running[-1])
        if victim.num_pending_prefill_chunks or victim.num_loading_tokens:
            picked.popitem()
            return None
        picked.pop(victim, None)
        if isinstance(victim, ReferenceSequence):
            victim.finish("abort")
        self.preempt(batch, victim)
        return None if isinstance(victim, ReferenceSequence) else victim

    def free_blocks_for_grants(self, batch: Batch, picked: dict[Sequence, int]) -> bool:
        """Give up one that is retained where blocks lack for the grants of ``batch`` beside the rows of ``picked``;
        whether there was any that is of use.
        """
        return self._evict_retained(batch, self._test_rows([*next_rows(picked), *_granted(batch)]))

    def _test_rows(self, rows: Iterable[RowRange]) -> Callable[[Iterable[int]], bool]:
        """Whether blocks, by layer group, are of use where such rows lack some; where they lack none, any are."""
        needed, free = self._accounting.blocks_needed(rows), self._accounting.free_blocks
        short = [n > f for n, f in zip(needed, free, strict=True)]
        anywhere = not any(short)
        return lambda blocks: any(n > 0 for n, lacks in zip(blocks, short, strict=True) if lacks or anywhere)

    def _evict_retained(self, batch: Batch, relieves: Callable[[Iterable[int]], bool]) -> bool:
        """Give up the oldest of what is retained whose blocks of its own are of use, else the oldest that shares some
        which are; whether there was any.
        """
        oldest, ledger = self._prefix_cache.eviction_order, self._accounting
        number = next((n for n in oldest if relieves(ledger.exclusive_blocks(n))), None)
        if number is None:
            number = next((n for n in oldest if relieves(ledger.count_blocks([n]))), None)
        if number is not None:
            batch.ops.append(self._prefix_cache.evict(number))
        return number is not None

    def preempt(self, batch: Batch, victim: Sequence) -> None:
        """Its KV is freed with the batch's next plan, or kept beside the pool."""
        batch.running.remove(victim)
        if (
            self._swap
            and not victim.evicts_kv
            and not victim.finished
            and victim.num_computed_tokens > victim.num_cached_tokens
        ):
            batch.ops += self._swap.save_ops(victim)
        batch.ops.append(Free(victim.id))
        self._prefill.remove(victim)
        self._prefix_cache.forget_sequence(victim)
        victim.num_preemptions += 1
        victim.reset_computed()
        if not victim.finished:
            self._prefill.on_arrival(victim)


def _granted(batch: Batch) -> list[RowRange]:
    """Of each sequence that prefill workers go on with in the next plan, all rows."""
    rows = dict[int, RowRange]()
    for op in batch.ops:
        if isinstance(op, PrefillGrant):
            first = rows[op.sequence].first if op.sequence in rows else op.first
            rows[op.sequence] = RowRange(op.sequence, first, op.first + op.count - first, op.location)
    return list(rows.values())
