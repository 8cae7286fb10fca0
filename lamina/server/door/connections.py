"""Connections that cost nothing to hold open: one that has not sent a request is closed after a while, or for another.

Without this, whoever opens as many as the process may have files shuts out everybody, health checks included.
"""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RESERVE = 32  # files for all else: the engine's link, the tokenizer's, logs
LEAST, MOST = 8, 1 << 16


def room() -> int:
    """Connections that this process may have. Its limit on open files is raised as far as that is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than the kernel gives to any process (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST if soft == resource.RLIM_INFINITY else soft
    return max(LEAST, min(MOST, files - len(os.listdir("/proc/self/fd")) - RESERVE))


class Crowd:
    """All connections of a server. Where there are more than it has room for, the one goes that has owed a request for
    longest.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owing: dict[Connection, None] = {}  # a whole request, the longest first
        self._count = 0

    def came(self, one: Connection) -> None:
        """A connection was accepted."""
        self._count += 1
        self._owing[one] = None
        if self._count > self._limit:
            next(iter(self._owing)).give_up()

    def asked(self, one: Connection) -> None:
        """All of its request has come."""
        self._owing.pop(one, None)

    def answered(self, one: Connection) -> None:
        """Its request has been answered."""
        self._owing[one] = None

    def went(self, one: Connection) -> None:
        """It was closed."""
        self._count -= 1
        self._owing.pop(one, None)


class Connection(HttpToolsProtocol):  # type: ignore[misc] # untyped for mypy
    """A connection whose headers have a deadline."""

    def __init__(self, crowd: Crowd, header_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._crowd = crowd
        self._header_s = header_s
        self._late: asyncio.TimerHandle | None = None

    def give_up(self) -> None:
        """Close it, whatever it may still send."""
        self._crowd.asked(self)  # never chosen twice
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._begin()
        self._crowd.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._crowd.went(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._crowd.asked(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else there is another one, sent before this one was answered
            self._crowd.answered(self)

    def _begin(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._header_s, self.give_up)

    def _end(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
