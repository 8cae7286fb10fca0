"""Connections that cost nothing to hold open: one that has not sent a request is closed after a while, or for another.

Without this, whoever opens as many as the process may have files shuts out everybody, health checks included. A TLS
handshake counts too: an event loop tells of a connection only when its handshake has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

RESERVE = 32  # files for all else: the engine's link, the tokenizer's, logs
LEAST, MOST = 8, 1 << 16
AGAIN_S = 1.0  # until the next try to accept, where the system has no file for a connection
logger = logging.getLogger(__name__)


def room() -> int:
    """Connections that this process may have. Its limit on open files is raised as far as that is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than the kernel gives to any process (fs.nr_open)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST if soft == resource.RLIM_INFINITY else soft
    return max(LEAST, min(MOST, files - len(os.listdir("/proc/self/fd")) - RESERVE))


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
        """Its request has been answered."""
        self._owing[one] = None

    def went(self, one: Guest) -> None:
        """It was closed."""
        self._count -= 1
        self._owing.pop(one, None)


class Connection(HttpToolsProtocol):  # type: ignore[misc] # untyped for mypy
    """A connection whose headers have a deadline. ``handshake``: the one that it came by, over TLS."""

    def __init__(self, crowd: Crowd, header_s: float, handshake: Handshake | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._crowd = crowd
        self._handshake = handshake
        self._header_s = header_s
        self._late: asyncio.TimerHandle | None = None

    def give_up(self) -> None:
        """Close it, whatever it may still send."""
        self._crowd.asked(self)  # never chosen twice
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._begin()
        if self._handshake is not None:
            self._handshake.end()  # first, so that one connection never counts twice
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


class Handshake:
    """Of TLS, on an accepted socket. It counts as a connection that owes a request, until there is a connection."""

    def __init__(self, crowd: Crowd, sock: socket.socket) -> None:
        self._crowd = crowd
        self._sock = sock
        self._counted = True
        self._task: asyncio.Task[None] | None = None

    def begin(self, shaking: Coroutine[Any, Any, None]) -> None:
        """``shaking`` makes a connection, or ends."""
        self._task = asyncio.create_task(shaking)
        self._task.add_done_callback(self._done)
        self._crowd.came(self)

    def give_up(self) -> None:
        """See Guest."""
        assert self._task is not None
        self._crowd.asked(self)  # never chosen twice
        self._task.cancel()

    def end(self) -> None:
        """Count it no longer."""
        if self._counted:
            self._counted = False
            self._crowd.went(self)

    def _done(self, _: asyncio.Task[None]) -> None:
        if self._counted:  # no connection came of it; if it was given up before it began, nobody else closes the socket
            self._sock.close()
            self.end()


class TlsDoor:
    """A socket that listens, and whose handshakes are part of ``crowd``. uvicorn closes it as an asyncio.Server."""

    def __init__(
        self,
        crowd: Crowd,
        sock: socket.socket,
        make: Callable[[Handshake], Connection],
        context: ssl.SSLContext,
        limit_s: float,
    ) -> None:
        """``sock`` listens; ``limit_s``: of a handshake."""
        self._crowd = crowd
        self._sock = sock
        self._make = make
        self._context = context
        self._limit_s = limit_s
        self.accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept nobody more; connections stay."""
        self.accepting.cancel()

    async def wait_closed(self) -> None:
        """Until nobody is accepted."""
        await asyncio.wait([self.accepting])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:  # the client was quicker
                continue
            except OSError as error:
                logger.error("cannot accept a connection: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            handshake = Handshake(self._crowd, sock)
            handshake.begin(self._shake(handshake, sock))

    async def _shake(self, handshake: Handshake, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client went, spoke no TLS, or took too long
            await loop.connect_accepted_socket(
                lambda: self._make(handshake), sock, ssl=self._context, ssl_handshake_timeout=self._limit_s
            )
