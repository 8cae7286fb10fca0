"""The segment that follows a full one. A thread begins it, since a disk may block for long. Records written to the full
segment meanwhile are added to the new one before it replaces the full one.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .journal_directory import JournalDirectory
from .journal_records import SyncedRecord
from .segment import Segment, frame_record


class DiskFailedError(OSError):
    """A wait for the full segment's disk has failed, so its bytes on the disk are unknown."""


class NextSegment:
    """The next segment, until ``take`` or ``discard``. All methods belong to the journal's thread."""

    def __init__(self, number: int, folder: JournalDirectory, opening: bytes, before: Segment | None) -> None:
        """``opening``: its first bytes. ``before``: the full segment, which must be on disk first; None = that segment
        is not used any more.
        """
        self.number = number
        self._path = folder.path_of(number)
        self._behind: list[bytes] = []
        self.is_complete = before is None
        self._before_size = before.size if before else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-journal")

        def begin() -> Segment:
            if before is not None:
                try:
                    sync_path(before.path)
                except OSError as e:
                    raise DiskFailedError(*e.args) from e
            return begin_segment(Segment(self._path, 0), opening, folder)

        self.work: Future[Segment] = self._thread.submit(begin)
        self._thread.shutdown(wait=False)

    def add(self, data: bytes) -> None:
        """Add a record that was written to the full segment, or did not fit there."""
        self._behind.append(data)

    def take(self, before: Segment) -> Segment:
        """Wait for the segment and return it with all records. Then note in the full one how much of it is on disk.
        Raises OSError if the segment does not exist, and DiskFailedError.
        """
        try:
            segment = self.work.result()
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        try:
            segment.append(b"".join([*self._behind, frame_record(SyncedRecord(segment.size))]))
        except OSError:
            self._leave(segment)
            raise
        if self._before_size:
            before.note_synced(self._before_size)
        return segment

    def discard(self) -> None:
        """Discard it; waits for the thread."""
        if self.work.exception() is None:
            self._leave(self.work.result())
        else:
            self._path.unlink(missing_ok=True)

    def _leave(self, segment: Segment) -> None:
        segment.close()
        self._path.unlink(missing_ok=True)


def begin_segment(segment: Segment, opening: bytes, folder: JournalDirectory) -> Segment:
    """Write ``opening`` to an empty segment and wait until it is on disk. Raises OSError; then the segment
    is closed.
    """
    try:
        segment.append(opening)
        segment.sync()
        folder.sync()
    except OSError:
        segment.close()
        raise
    return segment


def sync_path(path: Path) -> None:
    """Wait until a file is on disk. Raises OSError, even if another descriptor got that error first."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def is_whole(records: Collection[object]) -> bool:
    """Return True if a segment of these records was completed and taken over."""
    return any(isinstance(record, SyncedRecord) for record in records)
