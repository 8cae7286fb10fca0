"""Files that are kept from one start to the next, in a folder of this user. A file is ignored if it cannot be read, if
its name and bytes are not those of its digest, or if another user may have written it.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

VARIABLE = "LAMINA_CACHE"
OTHERS_WRITE = 0o022
DIGEST_BYTES = 32
_OWN_NAME = re.compile(r"[0-9a-f]{64}|new-\w{8}")  # without the suffix


def cache_directory(room: str) -> Path | None:
    """Return the folder below LAMINA_CACHE, or below its default; None if it is empty."""
    given = os.environ.get(VARIABLE)
    if given is None:
        given = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lamina")
    return Path(given) / room if os.path.isabs(given) else None


class CachedFile:
    """One file of at most ``largest`` bytes. Its folder keeps ``most_files`` files: the least recently used ones are
    removed. Neither reading nor writing fails.
    """

    def __init__(self, path: Path, *, largest: int, most_files: int) -> None:
        self.path, self._largest, self._most_files = path, largest, most_files

    def read(self) -> bytes | None:
        """Return the contents; None if there is no file, if it is damaged, or if another user may have written it."""
        with suppress(OSError), open(self.path, "rb", opener=_plainly) as file:
            status = os.fstat(file.fileno())
            own = _is_own(status) and _is_own(os.stat(self.path.parent))
            if own and stat.S_ISREG(status.st_mode) and status.st_size <= self._largest + DIGEST_BYTES:
                digest, data = file.read(DIGEST_BYTES), file.read()
                if self._digest(data) != digest:
                    return None
                with suppress(OSError):  # a file system that is read only
                    os.utime(self.path)
                return data
        return None

    def write(self, data: bytes) -> None:
        """Write the whole file or nothing, even if several processes do so at once."""
        folder = self.path.parent
        if len(data) > self._largest:
            return
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:
                try:
                    file.write(self._digest(data) + data)
                    file.close()
                    os.replace(file.name, self.path)
                except OSError:
                    os.unlink(file.name)
                    raise
            ours = (path for path in folder.iterdir() if self._is_ours(path))
            files = sorted(ours, key=lambda path: path.stat().st_mtime)
            for old in files[: max(0, len(files) - self._most_files)]:
                old.unlink(missing_ok=True)

    def _digest(self, data: bytes) -> bytes:
        return sha256(self.path.name.encode() + data).digest()

    def _is_ours(self, path: Path) -> bool:
        return path.suffix in (self.path.suffix, "") and _OWN_NAME.fullmatch(path.stem) is not None


def _plainly(path: str, flags: int) -> int:
    """Open the file without following a link and without waiting."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_own(status: os.stat_result) -> bool:
    """Return True if only this user may have written it."""
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
