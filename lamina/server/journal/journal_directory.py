"""The directory of a journal: its permissions, its model's digest, and a lock that admits one server at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from .journal_records import HeaderRecord
from .segment import Segment, SegmentContents

_ENDS = 1 << 16  # bytes at each end of a weight file that the model's digest covers
_LOCK = "lock"
_NAME = "segment-{:08d}"
_MARK = struct.Struct("<qQI")  # in the lock file: number of a segment, its bytes that are on disk, checksum of these

log = logging.getLogger(__name__)


class JournalDirectory:
    """Holds the lock until ``close``, or until the process ends."""

    def __init__(self, path: str) -> None:
        """Make the directory if it does not exist. Raises ValueError if it belongs to another user, is readable by
        others, or is in use.
        """
        self.path = Path(path).expanduser()
        with suppress(FileExistsError):
            try:
                self.path.mkdir(mode=0o700)
            except (FileNotFoundError, NotADirectoryError, PermissionError) as e:
                raise ValueError(f"--journal {path}: {e.strerror}") from None
        _check_private(self.path, self.path, 0o700, stat.S_ISDIR)
        lock = self.path / _LOCK
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(
                f"--journal {path}: another server has it open; give each a directory of its own"
            ) from None

    def segments(self) -> list[tuple[int, Path]]:
        """Return numbers and paths of the segments, the oldest first. Raises ValueError if other users may read one."""
        paths = sorted(path for path in self.path.glob("segment-*") if path.name.partition("-")[2].isdecimal())
        for each in paths:
            _check_private(self.path, each, 0o600, stat.S_ISREG)
        return [(int(each.name.partition("-")[2]), each) for each in paths]

    def path_of(self, number: int) -> Path:
        """Return the path of segment ``number``, which may not exist."""
        return self.path / _NAME.format(number)

    def read(self, check: Callable[[HeaderRecord], None]) -> list[tuple[int, SegmentContents]]:
        """Return numbers and contents of the segments that count: the newest two, or one that has all. A segment that a
        crash of the host has cut is left out, as the one before has all of it. Raises ValueError if bytes are missing
        that were on disk, and what ``check`` raises for a segment's first record.
        """
        on_disk, size = self._mark()
        read = [(number, SegmentContents(path)) for number, path in self.segments()]
        for _, one in read:
            if one.records and isinstance(heading := one.records[0], HeaderRecord):
                check(heading)
        if on_disk >= 0 and on_disk not in dict(read):
            raise ValueError(f"--journal {self.path}: {self.path_of(on_disk).name} is missing: restore it")
        alone = [place for place, (_, one) in enumerate(read) if one.opened is not None and not one.opened.before]
        kept = list[tuple[int, SegmentContents]]()
        for number, one in read[alone[-1] if alone else 0 :]:
            last = kept[-1][1] if kept else None
            bad = one if one.opened is None else last if last and last.end < one.opened.before else None
            if bad is not None and (last is None or number <= on_disk):
                raise damaged(bad)
            if bad is not None:
                log.warning("--journal: %s was not begun whole: left out, as the one before has all of it", one.path)
                break
            if not one.is_known or (number == on_disk and one.end < size):
                raise damaged(one)
            kept.append((number, one))
        for number, one in read:
            if kept and number > kept[-1][0]:
                one.path.unlink()
        return kept[-2:]

    def begin(self, number: int, opening: bytes) -> Segment:
        """Write a segment up to the end of its opening; it has its name only then. Raises OSError."""
        path = self.path_of(number)
        fresh = path.with_suffix(".new")
        segment = Segment(fresh, 0)
        try:
            segment.append(opening)
            if not number:  # there is none before it
                segment.sync()
            fresh.rename(path)
        except OSError:
            segment.close()
            fresh.unlink(missing_ok=True)
            raise
        return segment

    def remove(self, before: int) -> None:
        """Remove the segments with numbers below ``before``."""
        try:
            for old, path in self.segments():
                if old < before:
                    path.unlink(missing_ok=True)
        except (OSError, ValueError) as e:
            log.error("--journal %s: old segments stay (%s)", self.path, e)

    def sync(self) -> None:
        """Wait until the list of files survives a crash of the host. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def note_synced(self, number: int, size: int) -> None:
        """Note, without a wait, that ``size`` bytes of a segment are on disk: if they are missing, that is damage."""
        mark = _MARK.pack(number, size, 0)[:-4]
        with suppress(OSError):
            os.pwrite(self._lock, mark + zlib.crc32(mark).to_bytes(4, "little"), 0)

    @property
    def newest_on_disk(self) -> int:
        """The number of the newest segment that was noted to be on disk; -1: none was. Raises ValueError."""
        return self._mark()[0]

    def _mark(self) -> tuple[int, int]:
        mark = os.pread(self._lock, _MARK.size, 0)
        if not any(mark):  # none was written, or it did not reach the disk
            return -1, 0
        if len(mark) < _MARK.size or zlib.crc32(mark[:-4]).to_bytes(4, "little") != mark[-4:]:
            raise ValueError(f"--journal {self.path}: {_LOCK} is damaged: restore it, or name another directory")
        number, size, _ = _MARK.unpack(mark)
        return number, size

    def close(self) -> None:
        """Release the lock, so that another server can open the journal. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def check_journal_directory(path: str) -> None:
    """Raises ValueError if ``JournalDirectory`` would; creates nothing."""
    folder = Path(path).expanduser()
    if os.path.lexists(folder):
        _check_private(folder, folder, 0o700, stat.S_ISDIR)
        if (folder / _LOCK).exists():
            JournalDirectory(path).close()
    elif not os.access(folder.parent, os.W_OK | os.X_OK):
        raise ValueError(f"--journal {path}: it cannot be made in {folder.parent}: name one that you may write")


def damaged(contents: SegmentContents) -> ValueError:
    """Return the error for a file that cannot be read beyond its ``end``."""
    text = "is damaged at byte {}, and more of it was on disk: move it away, or restore it"
    return ValueError(f"--journal: {contents.path} {text.format(contents.end)}")


def _check_private(folder: Path, path: Path, mode: int, is_kind: Callable[[int], bool]) -> None:
    status = path.lstat()
    if not is_kind(status.st_mode):
        raise ValueError(f"--journal {folder}: {path} is not what a journal has there: name another directory")
    if status.st_uid != os.geteuid():
        raise ValueError(f"--journal {folder}: {path} is another user's: name a directory of your own")
    if status.st_mode & 0o077:
        text = f"other users may read {path} (mode {stat.S_IMODE(status.st_mode):o}), and prompts stand there"
        raise ValueError(f"--journal {folder}: {text}: chmod {mode:o} {path}")


def model_digest(model: str) -> str:
    """Return a digest of the names, sizes and both ends of a model directory's files; for a hub id, of the name."""
    root, digest = Path(model).expanduser(), sha256()
    files = sorted(p for p in root.iterdir() if p.suffix in (".json", ".safetensors")) if root.is_dir() else []
    digest.update(b"" if files else model.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()
