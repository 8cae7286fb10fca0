"""The pages of K and V that each prefill worker has. The driver decides which pages stay, so the directory is as new as
the stores. Pure policy: no torch, no I/O, no clock.

A page is *held* from when its prompt is given to a worker: its room is taken, and whatever the worker computes later
finds it. It is *ready* once it is computed or has come, and can be sent to others from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.kv.eviction_policy import EvictionQueue


class PrefixDirectory:
    """Workers by number, pages by key. Keys of a prompt are given from its first page on."""

    def __init__(self, num_workers: int, pages: int, policy: str = "lru") -> None:
        """``pages``: of each worker's store."""
        self._stores = [EvictionQueue(policy, pages) for _ in range(num_workers)]
        self._pages = pages
        self._held: dict[bytes, int] = {}  # key -> workers, a bit each
        self._ready: dict[bytes, int] = {}
        self.num_replicas = 0  # pages held in addition to the first holder's

    @property
    def num_workers(self) -> int:
        return len(self._stores)

    def num_cached_pages(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages from the first on that each worker holds."""
        return self._matches(keys, self._held)

    def num_sendable_pages(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages from the first on that each worker can send."""
        return self._matches(keys, self._ready)

    def add_pages(self, worker: int, keys: Sequence[bytes]) -> list[bytes]:
        """``worker`` will have the pages of ``keys``. Returns the keys of pages that it gives up for them."""
        store, bit = self._stores[worker], 1 << worker
        for number in reversed(range(len(keys))):
            key = keys[number]
            store.record_use(key, number, 1)
            before = self._held.get(key, 0)
            if not before & bit:
                self.num_replicas += bool(before)
                self._held[key] = before | bit
        given = store.evict()
        for key in given:
            self._forget(worker, key)
        return given

    def on_pages_ready(self, worker: int, keys: Sequence[bytes]) -> None:
        """``worker`` has computed or received these; what it has given up since then stays away."""
        bit = 1 << worker
        for key in keys:
            if self._held.get(key, 0) & bit:
                self._ready[key] = self._ready.get(key, 0) | bit

    def on_pages_failed(self, worker: int, keys: Sequence[bytes]) -> None:
        """The pages of ``keys`` that are not ready yet will not come."""
        bit = 1 << worker
        for key in keys:
            if self._held.get(key, 0) & bit and not self._ready.get(key, 0) & bit:
                self._stores[worker].forget(key)
                self._forget(worker, key)

    def remove_pages(self, worker: int, keys: Sequence[bytes]) -> None:
        """``worker`` has these no more."""
        bit = 1 << worker
        for key in keys:
            if self._held.get(key, 0) & bit:
                self._stores[worker].forget(key)
                self._forget(worker, key)

    def is_replicated(self, key: bytes) -> bool:
        """Return whether several workers have it."""
        holders = self._ready.get(key, 0)
        return holders & (holders - 1) != 0

    def clear_worker(self, worker: int) -> None:
        """``worker`` has nothing any more."""
        bit = 1 << worker
        for key in [key for key, holders in self._held.items() if holders & bit]:
            self._stores[worker].forget(key)
            self._forget(worker, key)

    def num_pages(self, worker: int) -> int:
        """The number of pages that ``worker`` holds."""
        return len(self._stores[worker])

    def _forget(self, worker: int, key: bytes) -> None:
        bit = 1 << worker
        left = self._held[key] & ~bit
        self.num_replicas -= bool(left)
        if left:
            self._held[key] = left
        else:
            del self._held[key]
        if self._ready.get(key, 0) & bit:
            self._ready[key] &= ~bit
            if not self._ready[key]:
                del self._ready[key]

    def _matches(self, keys: Sequence[bytes], holders: dict[bytes, int]) -> list[int]:
        lengths = [0] * len(self._stores)
        alive = (1 << len(self._stores)) - 1
        for number, key in enumerate(keys):
            here = alive & holders.get(key, 0)
            if here != alive:
                _set(lengths, alive & ~here, number)
                alive = here
                if not alive:
                    return lengths
        _set(lengths, alive, len(keys))
        return lengths


def _set(lengths: list[int], workers: int, length: int) -> None:
    while workers:
        low = workers & -workers
        lengths[low.bit_length() - 1] = length
        workers ^= low
