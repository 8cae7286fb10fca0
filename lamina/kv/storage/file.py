"""File storage: pages in files of a directory, which all workers of one server on this host share (kv.disk_store)."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from lamina.kv.disk_store.encryption import DataKeys, IntegrityError
from lamina.kv.disk_store.index_schema import PageEntry, RecordExtent
from lamina.kv.disk_store.page_index import PageIndex
from lamina.kv.disk_store.page_records import Records
from lamina.kv.disk_store.segments import Segments
from lamina.kv.disk_store.store_directory import StoreDirectory, store_secret
from lamina.kv.eviction_policy import EvictionRank, PageUsage, eviction_rank
from lamina.kv.fetch_window import FetchWindow
from lamina.kv.pages import Page, PageFragment

from . import Bytes, FragmentLostError, PageGoneError, StorageConfig, StorageError, StorageFullError, StoredPage

_TRIES = 3  # attempts at a read whose records are replaced meanwhile
# At least one part in so many of a worker's share is freed at once, as each eviction ranks all of its pages.
_SPARE_PART = 64
_CLOSE_S = 60.0
_EXPIRES_PART = 1 / 64  # time between two checks for expired pages, as a part of ``ttl_s``


class FileStorage:
    """One worker's access to the store."""

    def __init__(self, config: StorageConfig, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds that continue while no process has the store open."""
        self._identity = config.identity
        self._encrypt = config.encrypt
        self._policy, self._expected = eviction_rank(config.policy), FetchWindow()
        self._ttl_s, self._clock, self._expires_s = config.ttl_s, clock, 0.0
        self._writing = threading.Lock()  # one thread at a time manages free space
        self._quiet = threading.Condition()
        self._num_calls = 0
        self._closed = False
        with ExitStack() as undo:
            folder = StoreDirectory(config.directory)
            undo.callback(folder.close)
            first = folder.lock(config.server)
            keys = DataKeys(folder, config.secret or store_secret(folder))
            self.page_index = PageIndex(folder, clock)
            undo.callback(self.page_index.close)
            self._segments = Segments(folder, self.page_index, config.total_bytes, config.workers)
            undo.callback(self._segments.close)
            if first:
                self._segments.recover()
                folder.allow_others(config.server)
            self._segments.lock_unowned()
            self._expire()
            self._records = Records(self._segments, keys)
            self._undo = undo.pop_all()

    def reserve(self, nbytes: int) -> list[bytes]:
        """Free ``nbytes`` bytes for fragments by evicting old pages. Raises StorageFullError, StorageError."""
        with self._call(), self._writing:
            given = self._expire()
            if nbytes > self._segments.share:
                raise StorageFullError(f"{nbytes} bytes are more than this worker's part of it, {self._segments.share}")
            if not self._segments.make_room(nbytes):
                rank = partial(self._rank, self.page_index.retained_keys())
                try:
                    given += self.page_index.evict(self._segments.own, self._enough(nbytes), rank)
                finally:
                    self._segments.refresh()
                if not self._segments.make_room(nbytes):
                    given += self._segments.rebuild(nbytes)
                if not self._segments.make_room(nbytes):
                    raise StorageFullError(f"no space for {nbytes} bytes in the segments that this worker writes")
            return given

    def _expire(self) -> list[bytes]:
        """Delete pages that were not used for long, now and then. Returns their keys."""
        now = self._clock()
        if not self._ttl_s or now < self._expires_s:
            return []
        self._expires_s = now + max(1.0, self._ttl_s * _EXPIRES_PART)
        return self.page_index.expire(self._ttl_s)

    def expire(self) -> list[bytes]:
        """Delete pages that were not used for ``ttl_s`` seconds, and return their keys."""
        with self._call(), self._writing:
            return self._expire()

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Encrypt the fragments and add them to the page. Raises StorageFullError, StorageError; ValueError for a
        different page.
        """
        if not fragments:
            raise ValueError("a write has at least one fragment")
        views = {fragment: memoryview(data).cast("B") for fragment, data in fragments.items()}
        nbytes = sum(view.nbytes for view in views.values())
        with self._call():
            with self._writing:
                extent = self._segments.allocate(nbytes)
            if extent is None:
                raise StorageFullError(f"no space for {nbytes} bytes")
            try:
                self.page_index.add(self._identity, page, self._records.put(page, extent, views, encrypt=self._encrypt))
            finally:
                with self._writing:
                    self._segments.commit(extent)

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Decrypt the page's fragments into the buffers. Raises FragmentLostError, StorageError; ValueError for a wrong
        length.
        """
        views = {fragment: memoryview(buffer).cast("B") for fragment, buffer in into.items()}
        with self._call():
            self._read(key, lambda entry: views)
            self.page_index.note_use(self._identity, key)

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Return a page and its bytes: of ``fragments``, or all. This is not counted as a use. Raises
        FragmentLostError.
        """

        def room(entry: PageEntry | None) -> dict[PageFragment, memoryview]:
            sizes = (
                {fragment: part.nbytes for record in entry.records for fragment, part in record.fragments.items()}
                if entry
                else {}
            )
            return {a: memoryview(bytearray(n)) for a, n in sizes.items() if fragments is None or a in fragments}

        with self._call():
            entry, views = self._read(key, room)
        if not views:
            raise FragmentLostError("no such fragment is here")
        return entry.page, {fragment: bytes(view) for fragment, view in views.items()}

    def lookup(self, key: bytes) -> StoredPage | None:
        """Return a page with its stored fragments; None if there are none."""
        with self._call():
            entry = self.page_index.lookup(self._identity, key)
        return None if entry is None else _held(entry)

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Note that waiting request ``turn`` also needs these pages; without keys, it needs none any more."""
        self._expected.hint(turn, keys)

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Note if other storage has all that is stored of a page, which is then evicted first."""
        (self._expected.copied_keys.add if yes else self._expected.copied_keys.discard)(key)

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Evict these pages after others for ``seconds``, even by the next server."""
        with self._call():
            self.page_index.set_retention(self._identity, keys, int(self._clock() + seconds))

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago."""
        with self._call():
            self.page_index.set_last_use(self._identity, keys, seconds_ago)

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Return None: there is one place, so no page is moved."""
        return None

    def _rank(self, retained: set[bytes], use: PageUsage) -> EvictionRank:
        return self._expected.rank(use, self._policy, retained)

    def _read(
        self, key: bytes, room: Callable[[PageEntry | None], dict[PageFragment, memoryview]]
    ) -> tuple[PageEntry, dict[PageFragment, memoryview]]:
        """Fill the buffers that ``room`` returns for a page."""
        entry = self.page_index.lookup(self._identity, key)
        for _ in range(_TRIES):
            views = room(entry)
            try:
                return self._fill(entry, views), views
            except IntegrityError as e:
                before, entry = entry, self.page_index.lookup(self._identity, key)
                if entry == before:
                    raise FragmentLostError(f"a fragment is damaged: {e}") from None
        raise FragmentLostError("the page is replaced again and again")

    def _fill(self, entry: PageEntry | None, views: Mapping[PageFragment, memoryview]) -> PageEntry:
        """Fill the buffers. Raises IntegrityError, FragmentLostError, OSError."""
        newest = {fragment: record for record in (entry.records if entry else []) for fragment in record.fragments}
        if entry is None:
            raise PageGoneError
        if not views.keys() <= newest.keys():
            raise FragmentLostError("no such fragment is here")
        for fragment, view in views.items():
            if view.nbytes != (nbytes := newest[fragment].fragments[fragment].nbytes):
                raise ValueError(f"a fragment of {nbytes} bytes, and a buffer of {view.nbytes}")
        for record in entry.records:
            self._records.get(entry.page, record, {a: view for a, view in views.items() if newest[a] is record})
        return entry

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete these pages, of all workers. Raises StorageError."""
        with self._call():
            self.page_index.drop(self._identity, keys)

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Share the size among ``workers`` workers in equal parts; other workers may take segments beyond it. Returns
        the keys of evicted pages. Raises StorageError.
        """
        with self._call(), self._writing:
            return self._segments.set_num_workers(workers)

    def pages(self) -> list[StoredPage]:
        """Return the pages of this identity, the most recently used last. Raises StorageError."""
        with self._call():
            return [_held(entry) for entry in self.page_index.entries(self._identity)]

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return keys of the last used pages that have all of ``fragments``, from the index. Raises StorageError."""
        with self._call():
            return self.page_index.keys(self._identity, fragments, most)

    def close(self) -> None:
        """Close the index; files stay for the next server. Waits for calls of other threads."""
        with self._quiet:
            self._closed = True
            if not self._quiet.wait_for(lambda: not self._num_calls, _CLOSE_S):
                return  # a disk that does not respond: the files stay open until the process ends
        self._undo.close()

    def _enough(self, nbytes: int) -> Callable[[RecordExtent], bool]:
        """Return a function that counts freed extents, and returns True when they are enough."""
        freed = 0

        def enough(extent: RecordExtent) -> bool:
            nonlocal freed
            self._segments.mark_free(extent)
            freed += extent.size
            return freed * _SPARE_PART >= self._segments.share and self._segments.has_room(nbytes)

        return enough

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._quiet:
            if self._closed:
                raise StorageError("the storage is closed")
            self._num_calls += 1
        try:
            yield
        except OSError as e:
            kind = StorageFullError if e.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            raise kind(f"the KV store: {e.strerror}") from e
        except sqlite3.Error as e:
            raise StorageError(f"the KV store's index: {e}") from e
        finally:
            with self._quiet:
                self._num_calls -= 1
                self._quiet.notify_all()


def _held(entry: PageEntry) -> StoredPage:
    fragments = frozenset[PageFragment]().union(*(record.fragments for record in entry.records))
    return StoredPage(entry.page, fragments, sum(record.extent.size for record in entry.records))


def open_storage(config: StorageConfig) -> FileStorage:
    """Open the store, which is created if missing. Raises ValueError."""
    return FileStorage(config)
