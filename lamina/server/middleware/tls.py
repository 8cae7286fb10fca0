"""The door of a server with TLS: a handshake is a guest too, as an event loop tells of a connection only when its
handshake has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from .connection_limit import ConnectionLimiter
from .http_connection import Connection

RETRY_S = 1.0  # until the next try to accept, where the system has no file for a connection
logger = logging.getLogger(__name__)


class TlsHandshake:
    """Of TLS, on an accepted socket. It counts as a connection that owes a request, until there is a connection."""

    def __init__(self, crowd: ConnectionLimiter, sock: socket.socket) -> None:
        self._crowd = crowd
        self._sock = sock
        self._counted = True
        self._task: asyncio.Task[None] | None = None

    def begin(self, shaking: Coroutine[Any, Any, None]) -> None:
        """``shaking`` makes a connection, or ends."""
        self._task = asyncio.create_task(shaking)
        self._task.add_done_callback(self._done)
        self._crowd.on_open(self)

    def close_now(self) -> None:
        """Close the connection whose handshake is under way."""
        assert self._task is not None
        self._crowd.on_request(self)  # never chosen twice
        self._task.cancel()

    def end(self) -> None:
        """Count it no longer."""
        if self._counted:
            self._counted = False
            self._crowd.on_close(self)

    def _done(self, _: asyncio.Task[None]) -> None:
        if self._counted:  # no connection came of it; if it was given up before it began, nobody else closes the socket
            self._sock.close()
            self.end()


class TlsListener:
    """A socket that listens, and whose handshakes are part of ``crowd``. uvicorn closes it as an asyncio.Server."""

    def __init__(
        self,
        crowd: ConnectionLimiter,
        sock: socket.socket,
        make: Callable[[TlsHandshake], Connection],
        context: ssl.SSLContext,
        limit_s: float,
        rest_s: float,
    ) -> None:
        """``sock`` listens; ``limit_s``: of a handshake; ``rest_s``: for a client to read what a closed connection has
        left for it.
        """
        self._crowd = crowd
        self._sock = sock
        self._make = make
        self._context = context
        self._limit_s = limit_s
        self._rest_s = rest_s
        self.accept_task = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept nobody more; connections stay."""
        self.accept_task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is accepted any more."""
        await asyncio.wait([self.accept_task])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:  # the client was quicker
                continue
            except OSError as error:
                logger.error("cannot accept a connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            handshake = TlsHandshake(self._crowd, sock)
            handshake.begin(self._shake(handshake, sock))

    async def _shake(self, handshake: TlsHandshake, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client went, spoke no TLS, or took too long
            await loop.connect_accepted_socket(
                lambda: self._make(handshake), sock, ssl=self._context,
                ssl_handshake_timeout=self._limit_s, ssl_shutdown_timeout=self._rest_s,
            )  # fmt: skip
