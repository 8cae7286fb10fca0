"""A bound on connections, and a rule that chooses the one to close when there are more."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Protocol

RESERVED_FILES = 32  # files for everything else: the engine's link, the tokenizer's files, logs
LEAST, MOST = 8, 1 << 16
PLAIN_BYTES, TLS_BYTES = 40 << 10, 160 << 10  # bytes of a connection: measured, plus uncounted bytes of its requests


def max_connections(memory: int, *, tls: bool) -> int:
    """Return the number of connections that this process may have in ``memory`` bytes. Raises the process's limit on
    open files as far as allowed.
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
        """Close it at once, even if replies are not sent yet."""
        ...


class ConnectionLimiter:
    """Tracks all connections of a server. If there are too many, it closes the one that has owed a request
    for longest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: dict[Closable, None] = {}  # connections that owe a whole request, the longest first
        self._count = 0

    def on_open(self, one: Closable) -> None:
        """Count an accepted connection."""
        self._count += 1
        self._idle[one] = None
        if self._count > self._limit:
            next(iter(self._idle)).close_now()

    def on_request(self, one: Closable) -> None:
        """Note that the whole request of a connection has arrived."""
        self._idle.pop(one, None)

    def on_response(self, one: Closable) -> None:
        """Note that the connection's request has its reply, so it owes the next one."""
        self._idle[one] = None

    def on_close(self, one: Closable) -> None:
        """Forget a closed connection."""
        self._count -= 1
        self._idle.pop(one, None)
