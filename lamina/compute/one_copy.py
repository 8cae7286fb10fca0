"""Memory that is filled once and then only read: a process's own, or one copy that processes of a host share.

Who shares meets at an abstract Unix socket (unix(7)) of a name that follows from what is shared. The first to bind it
fills a memfd, seals it and passes its descriptor to all that come, as long as it lives; should it end before, one that
waits takes its place. The kernel frees the memory with the last mapping, however the processes end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lamina.buffers import tensor_over

HUGE = 2 << 20
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
AGAIN_S = 0.002  # after a place was neither free nor listened at, as between bind and listen
LINE = 64  # connections that wait; more are those of another kind
_UCRED = struct.Struct("iII")  # pid, uid, gid
_MADE = b"M"

Check = Callable[[], None]
Fill = Callable[[Tensor], None]


def own_memory(nbytes: int, check: Check, fill: Fill) -> Tensor:
    """Flat bytes of this process, in huge pages where the kernel has them. Raises OSError, as ``check`` may, where
    there is no memory.
    """
    check()
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = _bytes(memory)
    made = whole[-whole.data_ptr() % HUGE :][:nbytes]
    fill(made)
    return made


class OneCopy:
    """``memory``: flat bytes, to be read alone. ``made``: whether this process has filled it."""

    def __init__(self, memory: Tensor, *, made: bool, server: _Server | None = None) -> None:
        self.memory = memory
        self.made = made
        self._server = server

    def close(self) -> None:
        """Nobody else gets the copy from here on; whoever has it keeps it. Idempotent."""
        if self._server:
            self._server.close()


def share(place: str, nbytes: int, check: Check, fill: Fill, timeout_s: float) -> OneCopy:
    """The one copy at ``place``, a name that nobody guesses and that says all that ``fill`` depends on.

    ``check``: raises OSError where this process is not to make it. Raises OSError, also where the host has no memory,
    where another user has the place, or after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if listener := _claim(place):
            return _made(listener, nbytes, check, fill)
        descriptor = _ask(place, deadline)
        if descriptor is not None:
            try:
                return OneCopy(_mapped(descriptor, nbytes), made=False)
            finally:
                os.close(descriptor)
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"nobody has made the shared copy in {timeout_s:g} s")
        select.select([], [], [], AGAIN_S)


def _claim(place: str) -> socket.socket | None:
    """A socket that listens there; None where another one does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{place}")
        listener.listen(LINE)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _made(listener: socket.socket, nbytes: int, check: Check, fill: Fill) -> OneCopy:
    with contextlib.ExitStack() as failed:
        failed.callback(listener.close)
        check()
        descriptor = os.memfd_create("lamina-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failed.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, nbytes)  # what is lacking is lacking now, not when a page is touched
        fill(_bytes(mmap.mmap(descriptor, nbytes)))  # which nobody holds any more: what can be written to has no seal
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        memory = _mapped(descriptor, nbytes)
        failed.pop_all()
    return OneCopy(memory, made=True, server=_Server(listener, descriptor))


def _bytes(memory: mmap.mmap) -> Tensor:
    return tensor_over(memoryview(memory), torch.uint8)


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Raises OSError for what is no sealed copy of so many bytes."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(descriptor).st_size != nbytes:
        raise OSError(errno.EPROTO, "what was sent is no sealed copy")
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return _bytes(mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ))


def _ask(place: str, deadline: float) -> int | None:
    """The descriptor, once it is made; None where nobody makes it any more. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(deadline - time.monotonic(), AGAIN_S))
        try:
            sock.connect(f"\0{place}")
            _check_user(sock)
            _, descriptors, _, _ = socket.recv_fds(sock, len(_MADE), 1, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionError, BlockingIOError):
            return None
        return descriptors[0] if descriptors else None


def _check_user(sock: socket.socket) -> None:
    """Raises PermissionError for a peer of another user."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"user {uid} has the place of the shared copy")


class _Server:
    """Passes a descriptor, which it owns, to each process of this user that comes."""

    def __init__(self, listener: socket.socket, descriptor: int) -> None:
        self._listener = listener
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._serve, name="lamina-one-copy", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            with sock, contextlib.suppress(OSError):  # whoever came is gone, or another user
                _check_user(sock)
                socket.send_fds(sock, [_MADE], [self._descriptor], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)
        self._descriptor = -1
