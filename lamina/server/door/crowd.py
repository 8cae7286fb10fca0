"""A bound on connections, and a rule which one goes where there are more."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Protocol

RESERVE = 32  # files for all else: the engine's link, the tokenizer's, logs
LEAST, MOST = 8, 1 << 16
PLAIN_BYTES, TLS_BYTES = 40 << 10, 160 << 10  # of a connection: measured, and what its requests have uncounted


def room(memory: int, *, tls: bool) -> int:
    """Connections that this process may have, in ``memory`` bytes. Its limit on open files is raised as far as that is
    allowed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than the kernel gives to any process (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST if soft == resource.RLIM_INFINITY else soft
    fitting = memory // (TLS_BYTES if tls else PLAIN_BYTES)
    return max(LEAST, min(MOST, fitting, files - len(os.listdir("/proc/self/fd")) - RESERVE))


class Guest(Protocol):
    """A connection, or a handshake that may become one."""

    def give_up(self) -> None:
        """Close it, whatever it may still send."""
        ...


class Crowd:
    """All connections of a server. Where there are more than it has room for, the one goes that has owed a request for
    longest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owing: dict[Guest, None] = {}  # a whole request, the longest first
        self._count = 0

    def came(self, one: Guest) -> None:
        """A connection was accepted."""
        self._count += 1
        self._owing[one] = None
        if self._count > self._limit:
            next(iter(self._owing)).give_up()

    def asked(self, one: Guest) -> None:
        """All of its request has come."""
        self._owing.pop(one, None)

    def answered(self, one: Guest) -> None:
        """The guest's request has been answered."""
        self._owing[one] = None

    def went(self, one: Guest) -> None:
        """The guest's connection was closed."""
        self._count -= 1
        self._owing.pop(one, None)
