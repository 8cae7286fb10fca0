"""Host storage: pages in the memory of one process, with a checksum of each fragment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from lamina.kv.eviction_policy import EvictionQueue, eviction_rank
from lamina.kv.fetch_window import FetchWindow
from lamina.kv.pages import Page, PageFragment
from lamina.netstack.checksum import checksum

from . import Bytes, FragmentLostError, PageGoneError, StorageConfig, StorageError, StorageFullError, StoredPage


class _StoredFragment(NamedTuple):
    data: bytes
    sum: bytes


class _HostPage(NamedTuple):
    page: Page
    fragments: dict[PageFragment, _StoredFragment]
    used_at: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(len(copy.data) for copy in self.fragments.values())


class HostStorage:
    """The pages in this process's memory. A worker's part of the size counts their bytes, without the overhead of
    Python.
    """

    def __init__(self, config: StorageConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock, self._ttl_s = clock, config.ttl_s
        self._whole, self.size = (
            config.total_bytes,
            config.total_bytes // config.workers,
        )  # bytes: of all workers, of this one
        self._lock = threading.Lock()
        self._pages: dict[bytes, _HostPage] | None = {}  # the most recently used last
        self._expected, rank = FetchWindow(), eviction_rank(config.policy)
        self._until: dict[bytes, float] = {}  # ends of retention
        self._tier = EvictionQueue(config.policy, self.size, lambda use: self._expected.rank(use, rank, self._until))
        # A heap: when to check a page, at the end of its retention or earlier.
        self._ends: list[tuple[float, bytes]] = []

    def reserve(self, nbytes: int) -> list[bytes]:
        """Evict pages until ``nbytes`` bytes are free. Raises StorageFullError."""
        with self._lock:
            lying = self._open()
            if nbytes > self.size:
                raise StorageFullError(f"{nbytes} bytes are more than this worker's part of it, {self.size}")
            self._expire_retention()
            given = self._tier.evict(room=nbytes)
            for key in given:
                del lying[key]
                self._until.pop(key, None)
            return given

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Copy the fragments into the page. Raises StorageFullError, and ValueError for a different page of this
        key.
        """
        if not fragments:
            raise ValueError("a write has at least one fragment")
        new = {fragment: _StoredFragment(bytes(data), checksum(data)) for fragment, data in fragments.items()}
        with self._lock:
            old = self._open().get(page.key)
            if old is not None and not page.is_same_page(old.page):
                raise ValueError("another page has this key")
            lying = _HostPage(page, (old.fragments if old is not None and old.page == page else {}) | new)
            more = lying.nbytes - (old.nbytes if old is not None else 0)
            if self._tier.nbytes + more > self.size:
                raise StorageFullError(f"no space for {more} bytes: {self._tier.nbytes} of {self.size} are taken")
            self._use(lying)

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Copy the page's fragments into the buffers. Raises FragmentLostError, and ValueError for a wrong length."""
        views = {fragment: memoryview(buffer).cast("B") for fragment, buffer in into.items()}
        with self._lock:
            lying = self._open().get(key)
            if lying is None:
                raise PageGoneError
            if not into.keys() <= lying.fragments.keys():
                raise FragmentLostError("no such fragment is here")
            self._use(lying)
        for fragment, view in views.items():
            if view.nbytes != len(lying.fragments[fragment].data):
                raise ValueError(
                    f"a fragment of {len(lying.fragments[fragment].data)} bytes, and a buffer of {view.nbytes}"
                )
        for fragment, view in views.items():
            view[:] = lying.fragments[fragment].data
            if checksum(view) != lying.fragments[fragment].sum:
                raise FragmentLostError(f"a fragment is damaged: layer {fragment.layer}, head {fragment.head}")

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Return a page and its bytes: of ``fragments``, or all. This is not counted as a use. Raises
        FragmentLostError.
        """
        with self._lock:
            lying = self._open().get(key)
        if lying is None:
            raise PageGoneError
        there = {a: c for a, c in lying.fragments.items() if fragments is None or a in fragments}
        if not there:
            raise FragmentLostError("no such fragment is here")
        if any(checksum(copy.data) != copy.sum for copy in there.values()):
            raise FragmentLostError("a fragment is damaged")
        return lying.page, {fragment: copy.data for fragment, copy in there.items()}

    def lookup(self, key: bytes) -> StoredPage | None:
        """Return a page with its stored fragments; None if it is missing."""
        with self._lock:
            lying = self._open().get(key)
            return None if lying is None else StoredPage(lying.page, frozenset(lying.fragments), lying.nbytes)

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Note that waiting request ``turn`` also needs these pages; without keys, it needs none any more."""
        with self._lock:
            self._tier.update_ranks(self._expected.hint(turn, keys))

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Note if other storage has all that is stored of a page, which is then evicted first."""
        with self._lock:
            (self._expected.copied_keys.add if yes else self._expected.copied_keys.discard)(key)
            self._tier.update_ranks([key])

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Evict these pages after others for ``seconds``."""
        with self._lock:
            lying, end = self._open(), self._clock() + seconds
            for key in keys:
                if key in lying and self._until.get(key, 0.0) < end:
                    if key not in self._until:  # else its present entry is put back when it comes up too early
                        heappush(self._ends, (end, key))
                    self._until[key] = end
                    self._tier.update_ranks([key])
            if len(self._ends) > 2 * len(self._until) + 64:  # most are of pages that are gone
                self._ends = sorted((end, key) for key, end in self._until.items())

    def retention_left_s(self, key: bytes) -> float:
        """Return the seconds of retention that a page has left."""
        with self._lock:
            return max(0.0, self._until.get(key, 0.0) - self._clock())

    def idle_s(self, key: bytes) -> float:
        """Return the seconds since the last use of a page; 0 if it is missing."""
        with self._lock:
            lying = self._open().get(key)
            return 0.0 if lying is None else self._clock() - lying.used_at

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago."""
        with self._lock:
            lying, at = self._open(), self._clock() - seconds_ago
            for key in keys:
                if key in lying:
                    lying[key] = lying[key]._replace(used_at=at)

    def expire(self) -> list[bytes]:
        """Delete pages that were not used for ``ttl_s`` seconds, and return their keys."""
        with self._lock:
            lying, end = self._open(), self._clock() - self._ttl_s
            self._expire_retention()
            gone = [key for key, each in lying.items() if each.used_at <= end and key not in self._until]
            for key in gone if self._ttl_s else ():
                del lying[key]
                self._tier.forget(key)
            return gone if self._ttl_s else []

    def _expire_retention(self) -> None:
        """Rank pages whose retention has ended like others."""
        while self._ends and self._ends[0][0] <= self._clock():
            _, key = heappop(self._ends)
            end = self._until.get(key, 0.0)
            if end > self._clock():
                heappush(self._ends, (end, key))
            elif self._until.pop(key, None) is not None:
                self._tier.update_ranks([key])

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Return None: there is one place, so no page is moved."""
        return None

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Share the size among ``workers`` workers in equal parts; the next ``reserve`` evicts pages that no longer
        fit.
        """
        with self._lock:
            self.size = self._tier.size = self._whole // workers
        return []

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._open()

    def next_victim(self, room: int) -> bytes | None:
        """Return the page to evict next for ``room`` bytes; None if they are free."""
        with self._lock:
            self._open()
            self._expire_retention()
            return self._tier.next_victim(room=room)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete these pages, with all fragments of all workers."""
        with self._lock:
            lying = self._open()
            for key in keys:
                lying.pop(key, None)
                self._until.pop(key, None)
                self._tier.forget(key)

    def pages(self) -> list[StoredPage]:
        """Return the stored pages, the most recently used last."""
        with self._lock:
            return [StoredPage(each.page, frozenset(each.fragments), each.nbytes) for each in self._open().values()]

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return keys of the last used pages that have all of ``fragments``, the most recently used last."""
        with self._lock:
            there = [key for key, each in self._open().items() if fragments <= each.fragments.keys()]
        return there[-most:]

    def close(self) -> None:
        """Discard all pages; later calls raise StorageError."""
        with self._lock:
            self._pages = None

    def _open(self) -> dict[bytes, _HostPage]:
        if self._pages is None:
            raise StorageError("the storage is closed")
        return self._pages

    def _use(self, lying: _HostPage) -> None:
        known = self._open()
        known.pop(lying.page.key, None)
        known[lying.page.key] = lying._replace(used_at=self._clock())
        self._tier.record_use(lying.page.key, lying.page.number, lying.nbytes)


def open_storage(config: StorageConfig) -> HostStorage:
    """Open empty storage. Raises ValueError."""
    return HostStorage(config)
