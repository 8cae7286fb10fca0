"""One file of a journal: records behind each other, each with its length and checksums."""

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
_SYNCED = _encode(SyncedRecord(0))[:-1]  # the beginning of each such record


def frame_record(record: msgspec.Struct) -> bytes:
    """A record as it stands in a file."""
    data = _encode(record)
    return _HEAD.pack(len(data), zlib.crc32(_NUMBER.pack(len(data))), zlib.crc32(data)) + data


class SegmentContents:
    """The records of a file, and the offset at which the last whole one ends.

    A host that loses its power may leave holes in bytes that were not on the disk yet, with whole records after them.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError where it is damaged before its end, OSError."""
        data = path.read_bytes()
        self.records: list[Any] = []
        self.end = 0
        try:
            while (entry := _record(data, self.end)) is not None:
                record, self.end = entry
                self.records.append(record)
        except msgspec.DecodeError:  # it is whole, and nothing that this version writes
            raise damaged(path, self.end) from None
        self.num_torn_bytes = len(data) - self.end  # bytes behind a record that was not written whole
        if self.num_torn_bytes and _synced(data, self.end) > self.end:
            raise damaged(path, self.end)


def _record(data: bytes, at: int) -> tuple[Any, int] | None:
    """The record at a place, and where it ends; None where none is whole there. Raises msgspec.DecodeError."""
    if at + _HEAD.size > len(data):
        return None
    length, own, sum_ = _HEAD.unpack_from(data, at)
    begin, end = at + _HEAD.size, at + _HEAD.size + length
    if zlib.crc32(_NUMBER.pack(length)) != own or end > len(data) or zlib.crc32(data[begin:end]) != sum_:
        return None
    return _decode(data[begin:end]), end


def _synced(data: bytes, at: int) -> int:
    """Bytes that were on the disk, by the records behind a place that cannot be read."""
    most, at = 0, data.find(_SYNCED, at)
    while at >= 0:
        with suppress(msgspec.DecodeError):
            entry = _record(data, at - _HEAD.size)
            if entry is not None and isinstance(entry[0], SyncedRecord):
                most = max(most, entry[0].size)
        at = data.find(_SYNCED, at + 1)
    return most


def damaged(path: Path, at: int) -> ValueError:
    """The error where a file cannot be read on from byte ``at``."""
    return ValueError(f"--journal: {path} is damaged at byte {at}, not at its end: move it away, or restore it")


class Segment:
    """A file that grows. What was not written whole is taken back."""

    def __init__(self, path: Path, size: int) -> None:
        """``size``: bytes of it that count; the rest is cut off. Raises OSError."""
        self.path = path
        self.size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._torn = True  # there may be bytes that do not count
        self._cut()

    def append(self, data: bytes) -> None:
        """All of ``data``, or nothing. Raises OSError."""
        done = 0
        if self._torn:  # on some disks a full one has no room for a cut either
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
        """Wait until all written bytes outlive a crash of the host. Raises OSError."""
        os.fdatasync(self._fd)

    def note_synced(self, size: int) -> None:
        """Write that so many bytes are on the disk, where that can be: without it a hole there counts as a tail."""
        with suppress(OSError):
            self.append(frame_record(SyncedRecord(size)))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
