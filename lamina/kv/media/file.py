"""Pages in files of a directory, which all workers of one server on this host share (lamina.kv.store)."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from lamina.kv.media import AtomLostError, Bytes, HeldPage, MediumError, MediumPlace, NoRoomError
from lamina.kv.pages import Atom, Page
from lamina.kv.store.folder import StoreFolder, store_secret
from lamina.kv.store.index import PageIndex
from lamina.kv.store.records import Records
from lamina.kv.store.schema import PageEntry, RecordExtent
from lamina.kv.store.seal import DataKeys, SealBrokenError
from lamina.kv.store.segments import Segments
from lamina.kv.victims import PageUse, Rank, rank_of
from lamina.kv.windows import Expected

_TRIES = 3  # of a read whose records were replaced meanwhile
_SPARE_PART = 64  # of a worker's share that becomes free at once, at least: each time all of its pages are ranked
_CLOSE_S = 60.0
_EXPIRES_PART = 1 / 64  # of the time for which pages are kept, between two looks for those that are older


class File:
    """One worker's end of the store."""

    def __init__(self, place: MediumPlace, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds, which go on while nobody has the store open."""
        self._identity = place.identity
        self._encrypt = place.encrypt
        self._policy, self._expected = rank_of(place.policy), Expected()
        self._ttl_s, self._clock, self._expires_s = place.ttl_s, clock, 0.0
        self._writing = threading.Lock()  # free space has one keeper
        self._quiet = threading.Condition()
        self._num_calls = 0
        self._closed = False
        with ExitStack() as undo:
            folder = StoreFolder(place.directory)
            undo.callback(folder.close)
            first = folder.lock(place.server)
            keys = DataKeys(folder, place.secret or store_secret(folder))
            self._index = PageIndex(folder)
            undo.callback(self._index.close)
            self._segments = Segments(folder, self._index, place.size, place.workers)
            undo.callback(self._segments.close)
            if first:
                self._segments.recover()
                folder.share(place.server)
            self._segments.claim()
            self._expire()
            self._records = Records(self._segments, keys)
            self._undo = undo.pop_all()

    def reserve(self, nbytes: int) -> list[bytes]:
        """Make room for ``nbytes`` of atoms: old pages' files go. Raises NoRoomError, MediumError."""
        with self._call(), self._writing:
            given = self._expire()
            if nbytes > self._segments.share:
                raise NoRoomError(f"{nbytes} bytes are more than this worker's part of it, {self._segments.share}")
            if not self._segments.make_room(nbytes):
                self._expected.prolonged = self._index.prolonged(int(self._clock()))
                try:
                    given += self._index.free(self._segments.own, self._enough(nbytes), self._rank)
                finally:
                    self._segments.refresh()
                if not self._segments.make_room(nbytes):
                    given += self._segments.rebuild(nbytes)
                if not self._segments.make_room(nbytes):
                    raise NoRoomError(f"no room for {nbytes} bytes in the segments that this worker writes")
            return given

    def _expire(self) -> list[bytes]:
        """Now and then: what was not used for long. Their keys."""
        now = self._clock()
        if not self._ttl_s or now < self._expires_s:
            return []
        self._expires_s = now + max(1.0, self._ttl_s * _EXPIRES_PART)
        return self._index.expire(int(now), self._ttl_s)

    def write(self, page: Page, atoms: Mapping[Atom, Bytes]) -> None:
        """Seal the atoms and add them to the page's files. Raises NoRoomError, MediumError; ValueError for a page that
        is there otherwise.
        """
        if not atoms:
            raise ValueError("a write has at least one atom")
        views = {atom: memoryview(data).cast("B") for atom, data in atoms.items()}
        nbytes = sum(view.nbytes for view in views.values())
        with self._call():
            with self._writing:
                extent = self._segments.take(nbytes)
            if extent is None:
                raise NoRoomError(f"no room for {nbytes} bytes")
            try:
                self._index.add(self._identity, page, self._records.put(page, extent, views, encrypt=self._encrypt))
            finally:
                with self._writing:
                    self._segments.settle(extent)

    def read(self, key: bytes, into: Mapping[Atom, bytearray | memoryview]) -> None:
        """Open the page's atoms into the buffers. Raises AtomLostError, MediumError; ValueError for a wrong length."""
        views = {atom: memoryview(buffer).cast("B") for atom, buffer in into.items()}
        with self._call():
            self._read(key, lambda entry: views)
            self._index.touch(self._identity, key)

    def take(self, key: bytes, atoms: frozenset[Atom] | None = None) -> tuple[Page, dict[Atom, bytes]]:
        """A page and its bytes: of ``atoms``, or all. It is no use of the page. Raises AtomLostError."""

        def room(entry: PageEntry | None) -> dict[Atom, memoryview]:
            sizes = (
                {atom: part.nbytes for record in entry.records for atom, part in record.atoms.items()} if entry else {}
            )
            return {a: memoryview(bytearray(n)) for a, n in sizes.items() if atoms is None or a in atoms}

        with self._call():
            entry, views = self._read(key, room)
        if not views:
            raise AtomLostError("no such atom is here")
        return entry.page, {atom: bytes(view) for atom, view in views.items()}

    def held(self, key: bytes) -> HeldPage | None:
        """A page with its atoms that are here; None where there are none."""
        with self._call():
            entry = self._index.look_up(self._identity, key)
        return None if entry is None else _held(entry)

    def expect(self, turn: int, keys: Sequence[bytes]) -> None:
        """Waiting turn ``turn`` needs these pages too; without any, it needs none any more."""
        self._expected.expect(turn, keys)

    def copied(self, key: bytes, *, yes: bool) -> None:
        """Whether another place has all that is here of a page, which goes first then."""
        (self._expected.copied.add if yes else self._expected.copied.discard)(key)

    def prolong(self, keys: Iterable[bytes], seconds: float) -> None:
        """Have these pages give way behind others for so many seconds; the next server knows it too."""
        with self._call():
            now = self._clock()
            self._index.prolong(self._identity, keys, int(now), int(now + seconds))

    def fetch(self, atoms: frozenset[Atom]) -> list[bytes] | None:
        """None: there is one place, so no page is brought nearer."""
        return None

    def _rank(self, use: PageUse) -> Rank:
        return self._expected.rank(use, self._policy)

    def _read(
        self, key: bytes, room: Callable[[PageEntry | None], dict[Atom, memoryview]]
    ) -> tuple[PageEntry, dict[Atom, memoryview]]:
        """Fill buffers that ``room`` has for a page."""
        entry = self._index.look_up(self._identity, key)
        for _ in range(_TRIES):
            views = room(entry)
            try:
                return self._fill(entry, views), views
            except SealBrokenError as e:
                before, entry = entry, self._index.look_up(self._identity, key)
                if entry == before:
                    raise AtomLostError(f"an atom is damaged: {e}") from None
        raise AtomLostError("the page is replaced again and again")

    def _fill(self, entry: PageEntry | None, views: Mapping[Atom, memoryview]) -> PageEntry:
        """Raises SealBrokenError, AtomLostError, OSError."""
        newest = {atom: record for record in (entry.records if entry else []) for atom in record.atoms}
        if entry is None or not views.keys() <= newest.keys():
            raise AtomLostError("no such atom is here")
        for atom, view in views.items():
            if view.nbytes != (nbytes := newest[atom].atoms[atom].nbytes):
                raise ValueError(f"an atom of {nbytes} bytes, and a buffer of {view.nbytes}")
        for record in entry.records:
            self._records.get(entry.page, record, {a: view for a, view in views.items() if newest[a] is record})
        return entry

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove the files of these pages, of all workers. Raises MediumError."""
        with self._call():
            self._index.drop(self._identity, keys)

    def divide(self, workers: int) -> list[bytes]:
        """Have the part of one of so many: other segments are for others to take. Returns as reserve; raises
        MediumError.
        """
        with self._call(), self._writing:
            return self._segments.divide(workers)

    def pages(self) -> list[HeldPage]:
        """The pages of this identity on disk; the most recently used last. Raises MediumError."""
        with self._call():
            return [_held(entry) for entry in self._index.entries(self._identity)]

    def keys(self, atoms: frozenset[Atom], most: int) -> list[bytes]:
        """Keys of the last used pages that have all of ``atoms``, out of the index. Raises MediumError."""
        with self._call():
            return self._index.keys(self._identity, atoms, most)

    def close(self) -> None:
        """Close the index; files stay for the next one. Waits for calls of other threads."""
        with self._quiet:
            self._closed = True
            if not self._quiet.wait_for(lambda: not self._num_calls, _CLOSE_S):
                return  # a disk that does not answer: the files stay open until the process ends
        self._undo.close()

    def _enough(self, nbytes: int) -> Callable[[RecordExtent], bool]:
        """Whether the extents that it was told of are enough."""
        freed = 0

        def enough(extent: RecordExtent) -> bool:
            nonlocal freed
            self._segments.freed(extent)
            freed += extent.size
            return freed * _SPARE_PART >= self._segments.share and self._segments.has_room(nbytes)

        return enough

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._quiet:
            if self._closed:
                raise MediumError("the medium is closed")
            self._num_calls += 1
        try:
            yield
        except OSError as e:
            kind = NoRoomError if e.errno in (errno.ENOSPC, errno.EDQUOT) else MediumError
            raise kind(f"the KV store: {e.strerror}") from e
        except sqlite3.Error as e:
            raise MediumError(f"the KV store's index: {e}") from e
        finally:
            with self._quiet:
                self._num_calls -= 1
                self._quiet.notify_all()


def _held(entry: PageEntry) -> HeldPage:
    atoms = frozenset[Atom]().union(*(record.atoms for record in entry.records))
    return HeldPage(entry.page, atoms, sum(record.extent.size for record in entry.records))


def open_medium(place: MediumPlace) -> File:
    """Open the store, made where there is none. Raises ValueError."""
    return File(place)
