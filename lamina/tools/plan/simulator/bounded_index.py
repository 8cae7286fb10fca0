"""An index of prefill workers with room for so many pages each, which no engine bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lamina.kv.eviction_policy import EvictionQueue
from lamina.scheduler.prefix_index import Place, PrefixIndex


class BoundedPrefixIndex(PrefixIndex):
    """An index whose places evict pages: the least recently used one, the end of a prefix before its beginning."""

    def __init__(self, pages: int, policy: str = "lru") -> None:
        """``pages``: of each place."""
        super().__init__()
        self._queues = defaultdict[Place, EvictionQueue](lambda: EvictionQueue(policy, pages))

    def promise(self, place: Place, keys: Sequence[bytes]) -> None:
        super().promise(place, keys)
        queue = self._queues[place]
        for number in reversed(range(len(keys))):
            queue.record_use(keys[number], number, 1)
        self.drop(place, queue.evict())
