"""The directory of a store: only its owner can read it, and only one server's workers have it open at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lamina.config.flag_groups import with_value
from lamina.kv.page_keys import ERA_BYTES, SECRET_BYTES

LOCK, SECRET, ERA, INDEX, KEY, SEGMENT, DRAFT = "lock", "secret", "era", "index.db", "key-", "segment-", "new-"
_LOCK_S = 10.0  # seconds for the first worker of a server to clean up after an earlier one
_POLL_S = 0.02
_SMALL_BYTES = 1 << 17  # of the index of an empty store, and its log
_NO_SPACE = errno.ENOSPC, errno.EDQUOT


class StoreDirectory:
    """An open directory. Files in it are opened by name alone, and no link is followed."""

    def __init__(self, path: str, flag: str = "--kv-offload dir=", *, make: bool = True) -> None:
        """``flag``: names the directory in errors. Raises ValueError if it is missing, another user's, or readable by
        others.
        """
        self.path = Path(path).expanduser().absolute()
        self.name = with_value(flag, path)
        try:
            if make:
                with suppress(FileExistsError):
                    self.path.mkdir(mode=0o700)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            raise ValueError(f"{self.name}: {e.strerror}: name a directory, no link, that you may write") from None
        self._lock = -1
        try:
            self._check(os.fstat(self.fd), str(self.path), 0o700)
        except ValueError:
            self.close()
            raise

    def open(self, name: str, flags: int) -> int:
        """Open a file of the store, with mode 0600 if it is created. Raises OSError; ValueError if it is not a store's
        file.
        """
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{self.name}: {name} is no file: name another directory")
            self._check(status, str(self.path / name), 0o600)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None if it is missing. Raises as ``open``."""
        try:
            fd = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(4096)

    def create(self, name: str, data: bytes) -> bytes:
        """Create a small file, whole or not at all, and return its contents: those of another process that created it
        first.
        """
        draft = self._draft(data)
        try:
            with suppress(FileExistsError):
                os.link(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        finally:
            os.unlink(draft, dir_fd=self.fd)
        self.sync()
        kept = self.read(name)
        if kept is None:
            raise FileNotFoundError(f"{self.path / name} has gone")
        return kept

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, which may exist: after a crash it has the old or the new contents. Raises OSError."""
        os.rename(self._draft(data), name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def _draft(self, data: bytes) -> str:
        """Write a new file with ``data`` to the disk, and return its name."""
        draft = f"{DRAFT}{secrets.token_hex(8)}"
        try:
            with os.fdopen(self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.remove(draft)
            raise
        return draft

    @property
    def is_full(self) -> bool:
        """Return whether the disk has no space for the store's small files."""
        disk = os.fstatvfs(self.fd)
        return disk.f_bavail * disk.f_frsize < _SMALL_BYTES

    @property
    def full_error(self) -> ValueError:
        return ValueError(f"{self.name}: no space is left on its disk: free some, or name another directory")

    def write_at_start(self, write: Callable[[], Any]) -> Any:
        """Return the result of ``write``. Raises ValueError if the disk has no space for it, OSError."""
        try:
            return write()
        except OSError as e:
            raise (self.full_error if e.errno in _NO_SPACE else e) from None

    def room_bytes(self) -> int:
        """Return the bytes that segments can have: those on the disk, and the free space of its file system."""
        names = [name for name in self.list_names() if name.startswith(SEGMENT)]
        taken = 0
        for name in names:
            with suppress(FileNotFoundError):  # another server may still remove some
                taken += os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512
        disk = os.fstatvfs(self.fd)
        return taken + disk.f_bavail * disk.f_frsize

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def list_names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(os.listdir(self.fd))

    def sync(self) -> None:
        """Write the directory to the disk, so that created and removed files survive a crash of the host. Raises
        OSError.
        """
        os.fsync(self.fd)

    def lock(self, server: str) -> bool:
        """Join the workers of ``server``. Returns True if no other worker can open the store before ``allow_others``.
        Raises ValueError if another server has it open.
        """
        self._lock = self.write_at_start(partial(self.open, LOCK, os.O_RDWR | os.O_CREAT))
        end = time.monotonic() + _LOCK_S
        while True:
            if self._try(fcntl.LOCK_EX):
                os.ftruncate(self._lock, 0)
                self.write_at_start(partial(os.pwrite, self._lock, server.encode(), 0))
                return True
            if self._try(fcntl.LOCK_SH):
                self._check_server(server)
                return False
            if time.monotonic() > end:
                raise ValueError(f"{self.name}: another process has it locked for more than {_LOCK_S:.0f} s: try again")
            time.sleep(_POLL_S)  # flock has no timeout

    def allow_others(self, server: str) -> None:
        """Admit the other workers of ``server``. Raises ValueError if another server was faster."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # unlocks for a moment
        self._check_server(server)

    def close(self) -> None:
        """Close the directory and its lock. Idempotent."""
        for fd in (self._lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self.fd = -1

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _check_server(self, server: str) -> None:
        if os.pread(self._lock, 4096, 0).decode(errors="replace") != server:
            raise ValueError(f"{self.name}: another server has it open; end that, or name another directory")

    def _check(self, status: os.stat_result, path: str, mode: int) -> None:
        if status.st_uid != os.geteuid():
            raise ValueError(f"{self.name}: {path} is another user's: name a directory of your own")
        if status.st_mode & 0o077:
            text = f"others may read {path} (mode {stat.S_IMODE(status.st_mode):o})"
            raise ValueError(f"{self.name}: {text}, and KV reveals prompts: chmod {mode:o} {path}")


def store_secret(
    folder: StoreDirectory, key_file: str = "", *, make: bool = True, flag: str = "--kv-offload key="
) -> bytes:
    """Return the secret, SECRET_BYTES long, from which page keys and data keys follow. It is read from ``key_file``, or
    from the directory, where ``make`` creates a missing one. Raises ValueError, which names ``flag``.
    """
    if not key_file:
        text = folder.read(SECRET)
        if text is None and not make:
            raise ValueError(f"{folder.name}: its secret is missing: name its file by {flag}")
        new = partial(folder.create, SECRET, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
        text = text or folder.write_at_start(new)
        return _decoded(text, f"{folder.name}: {folder.path / SECRET}")
    return read_secret(key_file, flag)


def read_secret(key_file: str, flag: str) -> bytes:
    """Return the secret in a user's own file, SECRET_BYTES long. Raises ValueError, which names ``flag``."""
    path = Path(key_file).expanduser()
    name = with_value(flag, key_file)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise ValueError(f"{name}: {e.strerror}: name a file, no link, made by openssl rand -hex 32") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise ValueError(f"{name}: it is another user's: name a file of your own")
        if status.st_mode & 0o077:
            raise ValueError(
                f"{name}: others may read it (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 {key_file}"
            )
        return _decoded(file.read(4096) if stat.S_ISREG(status.st_mode) else b"", name)


def store_era(folder: StoreDirectory) -> bytes:
    """Return the era of pages that can be found; empty before the first reset. Raises ValueError for a damaged file."""
    text = folder.read(ERA)
    with suppress(ValueError):
        era = bytes.fromhex((text or b"").decode("ascii").strip())
        if text is None or len(era) == ERA_BYTES:
            return era
    raise ValueError(
        f"{folder.name}: {folder.path / ERA} is damaged: remove it, and pages from before a reset are found"
    )


def begin_era(folder: StoreDirectory) -> bytes:
    """Begin a new era, in which no present page will be found. Raises OSError."""
    era = secrets.token_bytes(ERA_BYTES)
    folder.replace(ERA, era.hex().encode() + b"\n")
    return era


def _decoded(text: bytes, name: str) -> bytes:
    with suppress(ValueError):
        secret = bytes.fromhex(text.decode("ascii").strip())
        if len(secret) == SECRET_BYTES:
            return secret
    raise ValueError(f"{name}: a secret is {2 * SECRET_BYTES} hexadecimal digits: make one by openssl rand -hex 32")
