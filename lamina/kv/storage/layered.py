"""Layered storage: host memory in front of a directory (CachedAttention section 3.3, arXiv 2403.19708).

Pages are written to memory, move to the disk when memory is full, and return before they are needed. A page that was
fetched keeps its copy on the disk until that space is needed. If no request waits, a page that was read from the disk
moves to memory as well, so that pages in use stay there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from lamina.kv.fetch_window import FetchWindow, fetch_window_size, items_to_fetch
from lamina.kv.pages import Page, PageFragment

from . import (
    Bytes,
    FragmentLostError,
    PageGoneError,
    StorageBackend,
    StorageConfig,
    StorageError,
    StorageFullError,
    StoredPage,
    file,
)
from .host import HostStorage

_SPARE_PART = 16  # one part in so many of memory stays free between writes, so that no write waits for a disk
_CLOSE_S = 2.0  # seconds at the end for pages to move to the disk, the most recently used first
_MOST_READ = 256  # pages that were read from the disk and will move to memory


class TieredStorage:
    """Memory and disk as one storage. Reads of one page and moves of another do not wait for each other."""

    def __init__(self, memory: HostStorage, disk: StorageBackend, spare: int | None = None) -> None:
        """``spare``: bytes of memory to keep free; None for a fixed part of it."""
        self._memory, self._disk, self._spare = memory, disk, spare
        self._moves = threading.Lock()  # held while pages move between memory and disk
        self._reserved = 0  # bytes of memory for the next write
        self._page_bytes = 0  # bytes of the largest page so far
        self._change_lock = threading.Lock()  # protects the expected pages
        self._expected = FetchWindow()
        self._dirty: set[bytes] = set()  # pages of memory that the disk lacks, or has in an older form
        self._split: set[bytes] = set()  # pages of memory of which only the disk has some fragments
        self._lost: set[bytes] = set()  # keys of expected pages that are missing
        self._read: deque[bytes] = deque(maxlen=_MOST_READ)

    def reserve(self, nbytes: int) -> list[bytes]:
        """Free ``nbytes`` bytes of memory by moving pages to the disk. Returns the keys of pages that are now gone."""
        with self._moves:
            if nbytes > self._memory.size:
                return self._lost_of(self._disk.reserve(nbytes))
            given = self._make_room(nbytes)
            self._reserved = nbytes
            return given

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Add the fragments to the page in memory, or on the disk if memory has no space. Raises as both do."""
        with self._moves:
            self._reserved = 0
            old = self._disk.lookup(page.key)
            if old is not None and not page.is_same_page(old.page):
                raise ValueError("another page has this key")
            if old is not None and old.page != page:
                self._disk.delete([page.key])
            try:
                self._memory.write(page, fragments)
                self._dirty.add(page.key)
                here = self._memory.lookup(page.key)
                if old is not None and old.page == page and here is not None and not old.fragments <= here.fragments:
                    self._split.add(page.key)
            except StorageFullError:
                self._write_through(page, fragments)
            self._page_bytes = max(self._page_bytes, sum(memoryview(data).nbytes for data in fragments.values()))

    def _write_through(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        together = dict[PageFragment, Bytes]()
        with suppress(FragmentLostError):
            old, there = self._memory.read_page(page.key)
            together |= there if old == page else {}
        self._disk.write(page, together | dict(fragments))
        self._evict_from_memory(page.key)

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill the buffers from memory, and from the disk if memory lacks fragments. Raises FragmentLostError,
        ValueError.
        """
        held = self._memory.lookup(key)
        here = {
            fragment: buffer for fragment, buffer in into.items() if held is not None and fragment in held.fragments
        }
        is_in_memory = bool(here)
        try:
            if here:
                self._memory.read(key, here)
        except FragmentLostError as error:  # it has moved meanwhile, or is damaged
            here, is_in_memory = {}, not isinstance(error, PageGoneError)
        if len(here) < len(into) or held is None:
            try:
                self._disk.read(key, {fragment: buffer for fragment, buffer in into.items() if fragment not in here})
            except PageGoneError as error:
                raise FragmentLostError(str(error)) if is_in_memory else error from None
            self._read.append(key)

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Return a page and its bytes, the newer ones if both places have some. Raises FragmentLostError."""
        copy: tuple[Page, dict[PageFragment, bytes]] | None = None
        errors = list[FragmentLostError]()
        for place in (self._disk, self._memory):  # memory has the newer bytes
            try:
                page, there = place.read_page(key, fragments)
                copy = page, (copy[1] if copy is not None else {}) | there
            except FragmentLostError as e:
                errors.append(e)
        if copy is None:
            raise next((e for e in errors if not isinstance(e, PageGoneError)), errors[0])
        return copy

    def lookup(self, key: bytes) -> StoredPage | None:
        """Return a page with the fragments that either place has; None if neither has any."""
        return _both(self._disk.lookup(key), self._memory.lookup(key))

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Note that waiting request ``turn`` also needs these pages; without keys, it needs none any more."""
        self._memory.hint(turn, keys)
        self._disk.hint(turn, keys)
        with self._change_lock:
            self._expected.hint(turn, keys)
            self._lost.difference_update(keys)

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Note if other storage has all that is stored of a page, which is then evicted first."""
        self._memory.mark_copied(key, yes=yes)

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Evict these pages after others for ``seconds``, in both places."""
        pages = list(keys)
        self._memory.set_retention(pages, seconds)
        self._disk.set_retention(pages, seconds)

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago, in both places."""
        pages = list(keys)
        self._memory.set_last_use(pages, seconds_ago)
        self._disk.set_last_use(pages, seconds_ago)

    def expire(self) -> list[bytes]:
        """Delete pages that were not used for long, each place by its own uses. Returns the keys of pages that are now
        gone.
        """
        with self._moves:
            gone = self._memory.expire()
            split = self._split.intersection(gone)
            self._evict_from_memory(*gone)
            lost = dict.fromkeys(key for key in gone if key in split or not self._is_on_disk(key))
            with suppress(StorageError):  # what is gone from memory is returned all the same
                lost |= dict.fromkeys(self._lost_of(self._disk.expire()))
            return list(lost)

    def _is_on_disk(self, key: bytes) -> bool:
        with suppress(StorageError):
            return self._disk.lookup(key) is not None
        return False

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Copy the next page of the fetch window from the disk to memory, and return evicted keys; None if there is
        none.
        """
        with self._moves:
            while (key := self._next()) is not None:
                try:
                    page, there = self._disk.read_page(key, fragments)
                except FragmentLostError:
                    self._lost.add(key)
                    continue
                nbytes = sum(map(len, there.values()))
                self._page_bytes = max(self._page_bytes, nbytes)
                given = self._make_room(nbytes + self._kept_free)
                try:
                    self._memory.write(page, there)
                except StorageFullError:  # memory is smaller than a page
                    self._lost.add(key)
                else:
                    held = self._disk.lookup(key)
                    self._disk.mark_copied(key, yes=held is not None and held.fragments <= there.keys())
                return given
            return None

    @property
    def _kept_free(self) -> int:
        """The bytes of memory to keep free, for which no page of the fetch window is evicted."""
        spare = self._memory.size // _SPARE_PART if self._spare is None else self._spare
        return max(spare, self._reserved, self._page_bytes)

    def _next(self) -> bytes | None:
        """Return the page to copy to memory next."""
        room = self._memory.size - self._kept_free
        window = fetch_window_size(max(0, room), self._page_bytes) if self._page_bytes else 1
        with self._change_lock:
            for key in items_to_fetch(self._expected.first_pages(window), window, self._memory):
                if key not in self._lost:
                    return key
            while self._read and not self._expected:
                key = self._read.popleft()
                if key not in self._memory:
                    return key
        return None

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete these pages in both places."""
        gone = list(keys)
        with self._moves:
            self._evict_from_memory(*gone)
            self._disk.delete(gone)

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Share both sizes among ``workers`` workers in equal parts. The next ``reserve`` moves pages that memory
        cannot hold any more to the disk.
        """
        with self._moves:
            self._memory.set_num_workers(workers)
            return self._lost_of(self._disk.set_num_workers(workers))

    def pages(self) -> list[StoredPage]:
        """Return the pages of both places, each once; those of memory last."""
        pages = {each.page.key: each for each in self._disk.pages()}
        for each in self._memory.pages():
            both = _both(pages.pop(each.page.key, None), each)
            pages |= {each.page.key: both} if both is not None else {}
        return list(pages.values())

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return keys of the last used pages that have all of ``fragments`` in both places together, those of memory
        last.
        """
        keys = dict.fromkeys(self._disk.keys(fragments, most))
        for each in self._memory.pages():
            both = each if fragments <= each.fragments else self.lookup(each.page.key)
            if both is not None and fragments <= both.fragments:
                keys.pop(each.page.key, None)
                keys[each.page.key] = None
        return list(keys)[-most:]

    def close(self) -> None:
        """Write pages that only memory has to the disk, as far as space and time allow, and close both."""
        with self._moves, suppress(StorageError):
            limit = time.monotonic() + _CLOSE_S
            for each in reversed(self._memory.pages()):
                if time.monotonic() < limit:
                    self._demote(each.page.key)
        self._memory.close()
        self._disk.close()

    def _make_room(self, nbytes: int) -> list[bytes]:
        given = list[bytes]()
        while (key := self._memory.next_victim(nbytes)) is not None:
            given += self._demote(key)
        return given

    def _demote(self, key: bytes) -> list[bytes]:
        """Move a page from memory to the disk. Returns the keys of pages that are now gone."""
        given, left_s = list[bytes](), self._memory.retention_left_s(key)
        idle_s = self._memory.idle_s(key)
        try:
            page, fragments = self._memory.read_page(key)
            held = None if key in self._dirty else self._disk.lookup(key)
            if held is None or held.page != page or not fragments.keys() <= held.fragments:
                given += self._disk.reserve(sum(map(len, fragments.values())))
                # Else its other fragments were evicted, and it is not complete.
                if key not in given or key not in self._split:
                    self._disk.write(page, fragments)
                    if left_s:
                        self._disk.set_retention([key], left_s)
                    given = [each for each in given if each != key]
            self._disk.set_last_use([key], idle_s)
        except StorageError:
            given.append(key)
            with suppress(StorageError):
                self._disk.delete([key])
        self._evict_from_memory(key)
        return self._lost_of(given)

    def _evict_from_memory(self, *keys: bytes) -> None:
        """Remove pages from memory."""
        self._memory.delete(keys)
        self._dirty.difference_update(keys)
        self._split.difference_update(keys)
        for key in keys:
            self._disk.mark_copied(key, yes=False)

    def _lost_of(self, given: Sequence[bytes]) -> list[bytes]:
        """Return the pages, of those that the disk has evicted, that memory does not have completely; removes these."""
        self._evict_from_memory(*self._split.intersection(given))
        return [key for key in given if key not in self._memory]


def _both(disk: StoredPage | None, memory: StoredPage | None) -> StoredPage | None:
    if disk is None or memory is None:
        return memory or disk
    return StoredPage(memory.page, memory.fragments | disk.fragments, memory.nbytes + disk.nbytes)


def open_storage(config: StorageConfig) -> TieredStorage:
    """Open the directory, which is created if missing. Raises ValueError."""
    memory = HostStorage(config._replace(total_bytes=config.memory_bytes))
    return TieredStorage(memory, file.open_storage(config))
