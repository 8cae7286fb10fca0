"""Tells memory workers which pages the waiting sequences will load. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from lamina.scheduler.feature import Feature, Scheduling
from lamina.scheduler.sequence import Sequence

from .offload_index import OffloadIndex
from .prefetch import LoadableKv
from .prefix_cache import PrefixCache


class Prefetcher(Feature):
    """Hints for the pages of ``offload_index`` that ``prefix_cache`` does not have."""

    def __init__(self, offload_index: OffloadIndex, prefix_cache: PrefixCache) -> None:
        self._offload_index, self._prefix_cache = offload_index, prefix_cache

    def after_admission(self, scheduling: Scheduling) -> None:
        """Add the hints for those that wait on."""
        hints = self._offload_index.hints
        if scheduling.waiting or hints:
            scheduling.batches[0].ops += hints.next_ops([*scheduling.waiting], self._to_load)

    def _to_load(self, sequence: Sequence) -> LoadableKv | None:
        """The pages of a sequence that waits for its turn. Preempted ones come back soon, and truncated ones begin with
        their session's KV alone.
        """
        if sequence.discarded_ranges or sequence.num_preemptions:
            return None
        hit = self._prefix_cache.longest_cached(self._prefix_cache.lookup(sequence))
        return self._offload_index.find_loadable(sequence, hit.length if hit else 0)
