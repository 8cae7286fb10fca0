"""Segments: files of a fixed size, allocated on the disk when they are created, that hold records.

A worker writes the segments that it has locked, and no other worker does, so only it uses their free space. Free space
is all that neither the index nor a pending write occupies. Reads and writes are whole blocks and bypass the page cache
if the file system can do so (O_DIRECT).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from .index_schema import RecordExtent
from .page_index import PageIndex
from .store_directory import DRAFT, SEGMENT, StoreDirectory

BLOCK = 4096  # a multiple of the blocks of every disk
SEGMENT_BYTES = 256 << 20  # the size of a segment, at most, unless records are large
_MOST_SEGMENTS = 32  # about: small enough to be shared out if the number of workers changes
_RECORDS = 4  # records that fit in a segment, at least
_SPARE_BUFFERS = 4


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Buffers:
    """A pool of buffers that begin at a block's boundary, as O_DIRECT requires; a few are kept for reuse."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[memoryview]:
        """Lend a buffer of at least ``nbytes`` bytes, with any contents."""
        with self._lock:
            fit = next((b for b in self._spare if len(b) >= nbytes), None)
            if fit is not None:
                self._spare.remove(fit)
        memory = fit or mmap.mmap(-1, padded(nbytes))
        with memoryview(memory) as view:
            yield view
        with self._lock:
            self._spare.append(memory)
            self._spare.sort(key=len)
            del self._spare[:-_SPARE_BUFFERS]


class Segments:
    """The segments of a store, as seen by one worker. Any thread may read; one at a time allocates, writes and
    frees.
    """

    def __init__(self, folder: StoreDirectory, index: PageIndex, size: int, workers: int) -> None:
        """``size``: bytes of all segments. Each of ``workers`` workers has an equal part."""
        self._folder = folder
        self._index = index
        self._size = size // BLOCK * BLOCK
        self.share = self._size // workers // BLOCK * BLOCK
        self._own: dict[int, int] = {}  # number -> size
        self._files: dict[int, tuple[int, bool]] = {}  # number -> fd, if it is O_DIRECT
        self._lock = threading.Lock()
        self._free: dict[int, list[tuple[int, int]]] = {}  # number -> (at, size), of own segments
        self._pending: set[RecordExtent] = set()  # allocated, and perhaps not in the index

    @property
    def own(self) -> list[int]:
        """The numbers of segments that this worker writes."""
        return list(self._own)

    def recover(self) -> None:
        """Make files and index consistent, and reduce them to the size. Only while no other worker has the store
        open.
        """
        known = self._index.segments()
        files = {name for name in self._folder.list_names() if name.startswith(SEGMENT)}
        lost = [number for number, size in known.items() if _name(number) not in files or size > self.share]
        left = sum(known.values()) - sum(known[number] for number in lost)
        for number in self._index.segments_by_use():
            if left > self._size and number not in lost:
                lost.append(number)
                left -= known[number]
        self._index.drop_segments(lost)
        drafts = {name for name in self._folder.list_names() if name.startswith(DRAFT)}
        for name in drafts | files - {_name(number) for number in known.keys() - set(lost)}:
            self._folder.remove(name)

    def lock_unowned(self) -> None:
        """Lock segments that no worker writes, up to this worker's part."""
        for number, size in self._index.segments().items():
            if sum(self._own.values()) + size <= self.share and number not in self._own:
                with suppress(FileNotFoundError):  # another worker has just removed it
                    self._try_own(number, size)

    def make_room(self, nbytes: int) -> bool:
        """Return whether ``allocate`` will find ``nbytes`` bytes, if necessary in a new segment. Raises OSError if the
        disk lacks space for one.
        """
        if not self.has_room(nbytes):
            self.refresh()
        if not self.has_room(nbytes):
            self.lock_unowned()  # segments that other workers have unlocked since
        return self.has_room(nbytes) or self._grow(padded(nbytes))

    def allocate(self, nbytes: int) -> RecordExtent | None:
        """Allocate ``nbytes`` bytes until ``commit``; None if there is no space. Raises OSError."""
        extent = self._fit(padded(nbytes)) if self.make_room(nbytes) else None
        if extent is not None:
            self._pending.add(extent)
        return extent

    def rebuild(self, nbytes: int) -> list[bytes]:
        """Remove own segments, with their pages, so that one for ``nbytes`` bytes can be created. Returns the pages'
        keys. Raises OSError.
        """
        left, gone = self.share - sum(self._own.values()), []
        for number in self._settled():
            if left >= padded(nbytes):
                break
            gone.append(number)
            left += self._own[number]
        return self._give_up(gone)

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Share the size among ``workers`` workers in equal parts, and return the keys of removed pages. Segments that
        exceed this worker's part are unlocked for other workers. One that is larger than any part is removed with its
        pages. Raises OSError.
        """
        self.share = self._size // workers // BLOCK * BLOCK
        gone = self._give_up([number for number in self._settled() if self._own[number] > self.share])
        settled = sorted(self._settled(), key=self._own.__getitem__, reverse=True)
        kept = sum(self._own.values()) - sum(self._own[number] for number in settled)
        for number in settled:
            if kept + self._own[number] <= self.share:
                kept += self._own[number]
            else:
                fcntl.flock(self._file(number)[0], fcntl.LOCK_UN)
                del self._own[number], self._free[number]
        self.lock_unowned()
        return gone

    def _settled(self) -> list[int]:
        """Return own segments without pending writes."""
        pending = {extent.segment for extent in self._pending}
        return [number for number in self._own if number not in pending]

    def _give_up(self, gone: list[int]) -> list[bytes]:
        """Remove own segments with their pages. Returns the pages' keys. Raises OSError."""
        keys = self._index.drop_segments(gone)
        for number in gone:
            os.ftruncate(self._file(number)[0], 0)  # other workers have it open
            self._folder.remove(_name(number))
            del self._own[number], self._free[number]
        return keys

    def commit(self, extent: RecordExtent) -> None:
        """Note that an extent is in the index now, or free again."""
        self._pending.discard(extent)

    def refresh(self) -> None:
        """Recompute the free space, as other workers may have evicted pages."""
        for number, size in self._own.items():
            pending = [e for e in self._pending if e.segment == number]
            self._free[number] = _gaps(size, [*self._index.extents(number), *pending])

    def mark_free(self, extent: RecordExtent) -> None:
        """Mark an extent as free whose record is leaving the index."""
        if extent.segment in self._own:
            taken = [RecordExtent(extent.segment, at, size) for at, size in self._free[extent.segment]]
            self._free[extent.segment] = _merged([*taken, extent])

    def has_room(self, nbytes: int) -> bool:
        """Return whether ``allocate`` finds space in what is known to be free."""
        size = padded(nbytes)
        return any(free >= size for gaps in self._free.values() for _, free in gaps)

    def write(self, extent: RecordExtent, data: memoryview) -> None:
        """Write all of an extent; ``data`` begins at a block's boundary. Raises OSError."""
        self._transfer(os.pwritev, extent, data)

    def read(self, extent: RecordExtent, into: memoryview) -> bool:
        """Read all of an extent of whole blocks; ``into`` begins at a block's boundary. Returns False if the file is
        too short. Raises OSError.
        """
        return self._transfer(os.preadv, extent, into)

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], extent: RecordExtent, memory: memoryview
    ) -> bool:
        fd, direct = self._file(extent.segment)
        done = 0
        while done < extent.size:
            try:
                count = call(fd, [memory[done : extent.size]], extent.at + done)
            except OSError as e:
                if not direct or e.errno != errno.EINVAL:
                    raise
                # Its file system opens with O_DIRECT, but does not support it.
                fd, direct = self._file(extent.segment, plain=True)
                continue
            if count == 0:
                return False
            done += count
            if direct and done % BLOCK:  # the file ends within a block
                return False
        return True

    def _file(self, number: int, *, plain: bool = False) -> tuple[int, bool]:
        """Return a segment's open file. ``plain``: from now on through the page cache. Raises OSError."""
        with self._lock:
            known = self._files.get(number)
            if known is not None and plain and known[1]:
                flags = fcntl.fcntl(known[0], fcntl.F_GETFL)
                fcntl.fcntl(known[0], fcntl.F_SETFL, flags & ~os.O_DIRECT)
                known = self._files[number] = (known[0], False)
            if known is None:
                try:
                    known = (self._folder.open(_name(number), os.O_RDWR | os.O_DIRECT), True)
                except OSError as e:
                    if e.errno != errno.EINVAL:
                        raise
                    known = (self._folder.open(_name(number), os.O_RDWR), False)
                self._files[number] = known
            return known

    def _fit(self, size: int) -> RecordExtent | None:
        for number, gaps in self._free.items():
            for i, (at, free) in enumerate(gaps):
                if free >= size:
                    gaps[i : i + 1] = [(at + size, free - size)] if free > size else []
                    return RecordExtent(number, at, size)
        return None

    def _grow(self, size: int) -> bool:
        """Create a segment with space for ``size`` bytes, if possible. Raises OSError."""
        left = self.share - sum(self._own.values())
        if left < size:
            return False
        usual = min(SEGMENT_BYTES, padded(self._size // _MOST_SEGMENTS))
        added = self._index.add_segment(size, min(max(usual, _RECORDS * size), left), self._size)
        if added is None:
            return False
        number, taken = added
        try:  # first added to the index, so every file is in the index
            fd = self._folder.open(_name(number), os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, taken)
            finally:
                os.close(fd)
        except OSError as e:
            self._folder.remove(_name(number))
            self._index.drop_segments([number])
            if e.errno == errno.ENOSPC and self._own:
                return False  # continues with the segments that it has
            raise
        self._try_own(number, taken)
        return True

    def _try_own(self, number: int, size: int) -> None:
        fd, _ = self._file(number)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if os.fstat(fd).st_size < size:  # the file was truncated: its contents are lost, its space is not
            os.posix_fallocate(fd, 0, size)
        self._own[number] = size
        self._free[number] = _gaps(size, self._index.extents(number))

    def close(self) -> None:
        """Close the files, which unlocks the segments. Idempotent."""
        with self._lock:
            for fd, _ in self._files.values():
                os.close(fd)
            self._files.clear()
        self._own.clear()
        self._free.clear()


def _name(number: int) -> str:
    return f"{SEGMENT}{number:06d}"


def _gaps(size: int, taken: Iterable[RecordExtent]) -> list[tuple[int, int]]:
    """Return the gaps between extents, in order."""
    gaps, at = [], 0
    for extent in sorted(taken):
        if extent.at > at:
            gaps.append((at, extent.at - at))
        at = max(at, extent.at + extent.size)
    return [*gaps, (at, size - at)] if at < size else gaps


def _merged(free: list[RecordExtent]) -> list[tuple[int, int]]:
    """Return free extents of one segment, with neighbours joined."""
    merged: list[tuple[int, int]] = []
    for extent in sorted(free):
        if merged and sum(merged[-1]) >= extent.at:
            at = merged[-1][0]
            merged[-1] = (at, max(sum(merged[-1]), extent.at + extent.size) - at)
        else:
            merged.append((extent.at, extent.size))
    return merged
