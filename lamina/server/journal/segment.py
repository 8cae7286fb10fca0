"""One file of a journal: consecutive records, each with its length and checksums."""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from .journal_records import JournalRecord, OpenedRecord

_HEAD = struct.Struct("<III")  # bytes of the record, checksum of that number, checksum of the record
_NUMBER = struct.Struct("<I")
_PROBE = bytes(1 << 16)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalRecord).decode


def frame_record(record: msgspec.Struct) -> bytes:
    """Return a record as it is written in a file."""
    data = _encode(record)
    return _HEAD.pack(len(data), zlib.crc32(_NUMBER.pack(len(data))), zlib.crc32(data)) + data


class SegmentContents:
    """The records of a file up to the first that is not whole. ``end``: where that one begins. ``is_known``: False if
    it is whole, and not a record of this version. ``opened``: the end of the segment's opening, if it is there.
    """

    def __init__(self, path: Path) -> None:
        """Read a file. Raises OSError."""
        data = path.read_bytes()
        self.path, self.size, self.end = path, len(data), 0
        self.records: list[Any] = []
        self.is_known = True
        try:
            while (entry := _record(data, self.end)) is not None:
                record, self.end = entry
                self.records.append(record)
        except msgspec.DecodeError:
            self.is_known = False
        self.opened = next((record for record in self.records if isinstance(record, OpenedRecord)), None)


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


class Segment:
    """A file that grows. A partial write is cut off again."""

    def __init__(self, path: Path, size: int) -> None:
        """``size``: valid bytes of the file; the rest is cut off. Raises OSError."""
        self.size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._torn = True  # there may be invalid bytes after the valid ones
        try:
            self._cut()
        except OSError:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing. Raises OSError."""
        self._write(data)
        self.size += len(data)

    def check_room(self) -> None:
        """Raises OSError if the file cannot grow. It stays as it is."""
        self._write(_PROBE)
        self._cut()

    def _write(self, data: bytes) -> None:
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

    def _cut(self) -> None:
        self._torn = True
        os.ftruncate(self._fd, self.size)
        os.lseek(self._fd, self.size, os.SEEK_SET)
        self._torn = False

    def sync(self) -> None:
        """Wait until all written bytes survive a crash of the host. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
