"""Kernels that are kept from one start to the next, in the folder of LAMINA_CACHE, beside captures of models.

A file bears the name of all that its kernels follow from, and begins with a digest of that and of them: one that is
torn, of another name, or not this user's alone is as good as none, and its kernels are compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "LAMINA_CACHE"
MOST_FILES = 16  # of the folder; those that have not been used for the longest time go
LARGEST = 256 << 20  # bytes of a file
OTHERS = 0o077  # what others may do with it
DIGEST_BYTES = 32
_OWN_NAME = re.compile(r"[0-9a-f]{64}\.cubin|new-\w{8}")


def kept_folder() -> Path | None:
    """What LAMINA_CACHE says, where it is set; empty = none."""
    given = os.environ.get(VARIABLE)
    if given is None:
        given = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lamina")
    return Path(given) / "kernels" if os.path.isabs(given) else None


class KeptImage:
    """The place of what follows from ``facts``. Neither reading nor writing fails."""

    def __init__(self, folder: Path, facts: Sequence[str]) -> None:
        self._name = hashlib.sha256(json.dumps(list(facts)).encode()).hexdigest()
        self.path = folder / f"{self._name}.cubin"

    def read(self) -> bytes | None:
        """None where there is none, or where it is not as this user wrote it."""
        with suppress(OSError), open(self.path, "rb", opener=_plainly) as file:
            status = os.fstat(file.fileno())
            own = _is_own(status) and _is_own(os.stat(self.path.parent))
            if own and stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
                digest, image = file.read(DIGEST_BYTES), file.read()
                if image and digest == self._digest(image):
                    with suppress(OSError):  # a file system that is read only
                        os.utime(self.path)
                    return image
        return None

    def write(self, image: bytes) -> None:
        """Whole or not at all, also where several processes do so at once; nothing where others may write, too."""
        folder = self.path.parent
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(image) + DIGEST_BYTES > LARGEST or not _is_own(os.stat(folder)):
                return
            with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:
                try:
                    file.write(self._digest(image) + image)
                    file.close()
                    os.replace(file.name, self.path)
                except OSError:
                    os.unlink(file.name)
                    raise
            own = (path for path in folder.iterdir() if _OWN_NAME.fullmatch(path.name))
            files = sorted(own, key=lambda path: path.stat().st_mtime)
            for old in files[: max(0, len(files) - MOST_FILES)]:
                old.unlink(missing_ok=True)

    def _digest(self, image: bytes) -> bytes:
        return hashlib.sha256(self._name.encode() + image).digest()


def _plainly(path: str, flags: int) -> int:
    """Open it where it is no link, and wait for nobody."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_own(status: os.stat_result) -> bool:
    """Whether nobody but this user may read or write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS
