"""A bound on connections, and a rule which one goes where there are more."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Protocol

RESERVED_FILES = 32  # files for all else: the engine's link, the tokenizer's, logs
LEAST, MOST = 8, 1 << 16
PLAIN_BYTES, TLS_BYTES = 40 << 10, 160 << 10  # of a connection: measured, and what its requests have uncounted


def max_connections(memory: int, *, tls: bool) -> int:
    """Connections that this process may have, in ``memory`` bytes. Its limit on open files is raised as far as that is
    allowed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than the kernel gives to any process (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST if soft == resource.RLIM_INFINITY else soft
    fitting = memory // (TLS_BYTES if tls else PLAIN_BYTES)
    return max(LEAST, min(MOST, fitting, files - len(os.listdir("/proc/self/fd")) - RESERVED_FILES))


class Closable(Protocol):
    """A connection, or a handshake that may become one."""

    def close_now(self) -> None:
        """Close it, whatever it may still send."""
        ...


class ConnectionLimiter:
    """All connections of a server. Where there are more than it has room for, the one goes that has owed a request for
    longest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: dict[Closable, None] = {}  # a whole request, the longest first
        self._count = 0

    def on_open(self, one: Closable) -> None:
        """A connection was accepted."""
        self._count += 1
        self._idle[one] = None
        if self._count > self._limit:
            next(iter(self._idle)).close_now()

    def on_request(self, one: Closable) -> None:
        """All of its request has come."""
        self._idle.pop(one, None)

    def on_response(self, one: Closable) -> None:
        """The guest's request has been answered."""
        self._idle[one] = None

    def on_close(self, one: Closable) -> None:
        """The guest's connection was closed."""
        self._count -= 1
        self._idle.pop(one, None)
