"""One file of a journal: consecutive records, each with its length and checksums."""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from .journal_records import JournalRecord, SyncedRecord

_HEAD = struct.Struct("<III")  # bytes of the record, checksum of that number, checksum of the record
_NUMBER = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalRecord).decode
_SYNCED = _encode(SyncedRecord(0))[:-1]  # the first bytes of each SyncedRecord


def frame_record(record: msgspec.Struct) -> bytes:
    """Return a record as it is written in a file."""
    data = _encode(record)
    return _HEAD.pack(len(data), zlib.crc32(_NUMBER.pack(len(data))), zlib.crc32(data)) + data


class SegmentContents:
    """The records of a file, and the offset at which the last whole one ends.

    A host that loses power may leave holes in bytes that were not on disk yet, with whole records after them.
    """

    def __init__(self, path: Path) -> None:
        """Read a file. Raises ValueError if it is damaged before its end, and OSError."""
        data = path.read_bytes()
        self.records: list[Any] = []
        self.end = 0
        try:
            while (entry := _record(data, self.end)) is not None:
                record, self.end = entry
                self.records.append(record)
        except msgspec.DecodeError:  # the record is whole, but this version does not write such records
            raise damaged(path, self.end) from None
        self.num_torn_bytes = len(data) - self.end  # bytes after the last whole record
        if self.num_torn_bytes and _synced(data, self.end) > self.end:
            raise damaged(path, self.end)


def _record(data: bytes, at: int) -> tuple[Any, int] | None:
    """Return the record at an offset, and where it ends; None if no whole record is there. Raises
    msgspec.DecodeError.
    """
    if at + _HEAD.size > len(data):
        return None
    length, own, sum_ = _HEAD.unpack_from(data, at)
    begin, end = at + _HEAD.size, at + _HEAD.size + length
    if zlib.crc32(_NUMBER.pack(length)) != own or end > len(data) or zlib.crc32(data[begin:end]) != sum_:
        return None
    return _decode(data[begin:end]), end


def _synced(data: bytes, at: int) -> int:
    """Return how many bytes were on disk, by the SyncedRecords after an unreadable place."""
    most, at = 0, data.find(_SYNCED, at)
    while at >= 0:
        with suppress(msgspec.DecodeError):
            entry = _record(data, at - _HEAD.size)
            if entry is not None and isinstance(entry[0], SyncedRecord):
                most = max(most, entry[0].size)
        at = data.find(_SYNCED, at + 1)
    return most


def damaged(path: Path, at: int) -> ValueError:
    """Return the error for a file that cannot be read beyond byte ``at``."""
    return ValueError(f"--journal: {path} is damaged at byte {at}, not at its end: move it away, or restore it")


class Segment:
    """A file that grows. A partial write is cut off again."""

    def __init__(self, path: Path, size: int) -> None:
        """``size``: valid bytes of the file; the rest is cut off. Raises OSError."""
        self.path = path
        self.size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._torn = True  # there may be invalid bytes after the valid ones
        self._cut()

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing. Raises OSError."""
        done = 0
        if self._torn:  # on some disks a full one cannot be cut either
            self._cut()
        try:
            while done < len(data):
                done += os.write(self._fd, memoryview(data)[done:])
        except OSError:
            self._torn = True
            with suppress(OSError):
                self._cut()
            raise
        self.size += len(data)

    def _cut(self) -> None:
        os.ftruncate(self._fd, self.size)
        os.lseek(self._fd, self.size, os.SEEK_SET)
        self._torn = False

    def sync(self) -> None:
        """Wait until all written bytes survive a crash of the host. Raises OSError."""
        os.fdatasync(self._fd)

    def note_synced(self, size: int) -> None:
        """Try to write that ``size`` bytes are on disk. Without this record a hole in them looks like a torn end."""
        with suppress(OSError):
            self.append(frame_record(SyncedRecord(size)))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
