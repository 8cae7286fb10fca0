"""Ends a TCP connection between two running processes, under both of them."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438  # of Linux, for all processors; Python has no call for it
_ESTABLISHED = "01"


def cut(one: int, other: int) -> bool:
    """End a TCP connection between two processes of this host. Returns False if there was none. Raises OSError if this
    process may not access theirs.
    """
    theirs = {(far, near) for _, near, far in _connections(other)}
    for fd, near, far in _connections(one):
        if (near, far) in theirs:
            _shut(one, fd)
            return True
    return False


def _connections(pid: int) -> list[tuple[int, str, str]]:
    """Return descriptor, own address and the peer's, as the kernel prints them."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    known = {f[9]: (f[1], f[2]) for line in lines if (f := line.split())[3] == _ESTABLISHED}
    connections = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it has been closed meanwhile
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
            if kind == "socket" and (ends := known.get(inode.rstrip("]"))):
                connections.append((int(fd), *ends))
    return connections


def _shut(pid: int, fd: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, fd, 0)
    finally:
        os.close(handle)
    if own < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot cut a connection of process {pid}: {os.strerror(error)}")
    with socket.socket(fileno=own) as connection, suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
