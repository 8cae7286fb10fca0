"""The counters of a scheduler and of its features, for reports."""

from __future__ import annotations

from typing import NamedTuple

from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ErrorState, ReferenceDecoder


class SchedulerStats(NamedTuple):
    """Counts of a scheduler and its features. None: it has no such feature."""

    running: int  # sequences
    waiting: int
    preemptions: int
    swapped_sequences: int
    evictable_blocks: list[int]  # of each layer group
    queried_tokens: int  # of admitted sequences
    hit_tokens: int  # of them, in the prefix cache
    stored_queried_tokens: int  # tokens that the prefix cache lacked
    stored_hit_tokens: int  # of them, loaded
    pruned_blocks: int | None  # in each sparse layer
    migrated_blocks: int | None  # in each layer
    borrowed_blocks: list[int] | None  # of running sequences, by the layer group that lends them
    sparsity_errors: ErrorState | None


def collect_stats(scheduler: Scheduler) -> SchedulerStats:
    """Return the counters as they are now."""
    features = scheduler.features
    prefixes, stored, swaps = features.get(PrefixCache), features.get(OffloadIndex), features.get(SwapPolicy)
    pruner, migration, references = features.get(BlockPruner), features.get(KvMigration), features.get(ReferenceDecoder)
    loans = features.get(SpillAllocator)
    return SchedulerStats(
        running=scheduler.num_unfinished,
        waiting=scheduler.num_waiting,
        preemptions=scheduler.num_preemptions,
        swapped_sequences=swaps.num_swapped_sequences if swaps else 0,
        evictable_blocks=prefixes.evictable(scheduler.available_blocks) if prefixes else [],
        queried_tokens=prefixes.num_queried_tokens if prefixes else 0,
        hit_tokens=prefixes.num_hit_tokens if prefixes else 0,
        stored_queried_tokens=stored.num_queried_tokens if stored else 0,
        stored_hit_tokens=stored.num_hit_tokens if stored else 0,
        pruned_blocks=pruner.num_dropped if pruner else None,
        migrated_blocks=migration.num_moved_blocks if migration else None,
        borrowed_blocks=loans.spill.borrowed_blocks(scheduler.running) if loans and loans.spill else None,
        sparsity_errors=references.errors if references else None,
    )
