"""Memory for packed weights: a worker's own, or a memory file that the workers of a host share.

Huge pages matter: with small ones a step of 8 rows takes a quarter longer (perf/DIARY.md).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import time
from bisect import bisect_right
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

LINE, SLAB, HUGE = 64, 64 << 20, 2 << 20  # bytes
POLL_S, SEAL_S = 0.02, 10.0
_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), from Linux 6.1 on
_FIXED = 0x10  # MAP_FIXED of mmap(2)
_LENGTH = 8  # bytes at the end of a file that hold the length of the index before them
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class PackedMemory(Protocol):
    """The memory for a worker's packed weights."""

    def allocate(self, w: Tensor, size: int) -> tuple[Tensor, bool]:
        """Return ``size`` bytes at a multiple of 64 for the packed form of w, and if they contain it already."""
        ...

    def seal(self) -> None:
        """Note that every weight has memory now, and is packed there."""
        ...


class PrivateMemory:
    """A worker's own memory, in huge pages if the system has them. Many tensors share slabs, since small ones alone
    would get none.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def allocate(self, w: Tensor, size: int) -> tuple[Tensor, bool]:
        room = -(-size // LINE) * LINE
        if room > len(self._left):
            whole = max(SLAB, room)
            memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # a kernel without huge pages uses small ones
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._left = self._left[:size], self._left[room:]
        return taken, False

    def seal(self) -> None: ...


class SharedMemory:
    """A memory file, which is empty at first. The first worker fills and seals it; the others wait, and find their
    weights.

    A weight is identified by its place in its own file. One that was copied when it was read, or that the first worker
    did not have, gets the worker's own memory. If a worker dies while it fills the file, the next one fills it.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        """``path``: of the memory file. Waits until it is sealed, or until this worker may fill it; it then must call
        ``seal``. Raises OSError if there is no such file, or if another worker fills it for longer than ``timeout_s``
        seconds.
        """
        self._own = PrivateMemory()
        self._places: dict[str, int] = {}  # name of a weight -> its place
        self._end = 0
        self.window: _MappedWindow | None = None
        self._mapped = _MappedFiles()
        self._path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._take_turn(time.monotonic() + timeout_s)
            self.is_filled = _is_sealed(self.fd)
            if self.is_filled:
                self._read()
        except BaseException:
            os.close(self.fd)
            raise

    def _take_turn(self, deadline: float) -> None:
        while not _is_sealed(self.fd):
            with suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this worker ends
                return
            if time.monotonic() > deadline:
                raise TimeoutError("another worker has packed weights for too long")
            time.sleep(POLL_S)

    def _read(self) -> None:
        size = os.fstat(self.fd).st_size
        length = int.from_bytes(os.pread(self.fd, _LENGTH, size - _LENGTH), "little")
        self._places, whole = json.loads(os.pread(self.fd, length, size - _LENGTH - length))
        self.window = _MappedWindow(whole)
        self._show_sealed(self.window)

    def _show_sealed(self, window: _MappedWindow) -> None:
        """Map the file by a read-only descriptor: before Linux 6.7, others may not map a file that is sealed like
        this.
        """
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            window.show(fd, mmap.PROT_READ)
        finally:
            os.close(fd)

    def name_of(self, w: Tensor) -> str:
        """Return the name of a weight, by its place and layout in its file; "" if it lies in none."""
        return self._mapped.name_of(w)

    def reserve(self, size: int) -> None:
        """Reserve ``size`` bytes in the file, unless it is filled."""
        if size and not self.is_filled:
            self.window = _MappedWindow(-(-size // HUGE) * HUGE)
            os.ftruncate(self.fd, 0)  # another worker may have died while it filled the file
            os.ftruncate(self.fd, self.window.size)
            self.window.show(self.fd, mmap.PROT_READ | mmap.PROT_WRITE)

    def allocate(self, w: Tensor, size: int) -> tuple[Tensor, bool]:
        name = self._mapped.name_of(w)
        if self.window and name in self._places:
            return self.window.part(self._places[name], size), True
        if self.is_filled or not self.window or not name or self._end + size > self.window.size:
            return self._own.allocate(w, size)
        at, self._end = self._end, self._end + -(-size // LINE) * LINE
        self._places[name] = at
        return self.window.part(at, size), False

    def seal(self) -> None:
        if self.fd < 0:
            return
        if self.window and not self.is_filled:
            self.window.collapse()
            self.window.hide()  # no process may have it mapped for writing when it is sealed
            index = json.dumps((self._places, self.window.size)).encode()
            os.pwrite(self.fd, index + len(index).to_bytes(_LENGTH, "little"), self.window.size)
            self._seal(time.monotonic() + SEAL_S)
            self._show_sealed(self.window)
            self.is_filled = True
        os.close(self.fd)
        self.fd = -1

    def _seal(self, deadline: float) -> None:
        """Seal the file; tries again while the kernel uses its pages, for example to move them. Raises OSError."""
        while True:
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)


class _MappedWindow:
    """A range of addresses from a multiple of 2 MiB in which a file is mapped: only there are its huge pages mapped as
    such.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._space = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._skipped = -ctypes.addressof(ctypes.c_char.from_buffer(self._space)) % HUGE
        self._bytes = torch.frombuffer(self._space, dtype=torch.uint8)[self._skipped :][:size]

    def part(self, at: int, size: int) -> Tensor:
        """Return a part of the window, which keeps the window alive."""
        return self._bytes[at : at + size]

    def show(self, fd: int, protection: int) -> None:
        """Map a file in the window. Raises OSError."""
        self._map(protection, mmap.MAP_SHARED, fd)

    def hide(self) -> None:
        self._map(mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def collapse(self) -> None:
        """Collapse the file into huge pages, if the system can."""
        _libc.madvise(ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(self.size), _COLLAPSE)

    def _map(self, protection: int, flags: int, fd: int) -> None:
        at = self._bytes.data_ptr()
        if _libc.mmap(at, self.size, protection, flags | _FIXED, fd, 0) != at:
            raise OSError(ctypes.get_errno(), "packed weights cannot be mapped")


class _MappedFiles:
    """The files that this process has mapped, with their addresses."""

    def __init__(self) -> None:
        ranges = list[tuple[int, int, str, int]]()
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, _, offset, device, inode, *_ = line.split()
                if inode != "0":
                    begin, end = (int(x, 16) for x in addresses.split("-"))
                    ranges.append((begin, end, f"{device} {inode}", int(offset, 16)))
        self._ranges = sorted(ranges)

    def name_of(self, w: Tensor) -> str:
        at = w.data_ptr()
        number = bisect_right(self._ranges, at, key=lambda r: r[0]) - 1
        if number < 0 or at >= self._ranges[number][1]:
            return ""
        begin, _, file, offset = self._ranges[number]
        return f"{file} {at - begin + offset} {tuple(w.shape)} {w.stride()} {w.dtype}"


def _is_sealed(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
