"""The directory of a journal: its permissions, its model's digest, and a lock that admits one server at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_ENDS = 1 << 16  # bytes at each end of a weight file that the model's digest covers
_LOCK = "lock"
_NAME = "segment-{:08d}"


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

    def sync(self) -> None:
        """Wait until the list of files survives a crash of the host. Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

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
