"""The TLS listener. It counts handshakes as connections, because asyncio reports a connection only after
its handshake.
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

RETRY_S = 1.0  # until the next try to accept, if the system has no file for a connection
logger = logging.getLogger(__name__)


class TlsHandshake:
    """A TLS handshake on an accepted socket. It counts as a connection that owes a request, until the connection
    exists.
    """

    def __init__(self, limiter: ConnectionLimiter, sock: socket.socket) -> None:
        self._limiter = limiter
        self._sock = sock
        self._counted = True
        self._task: asyncio.Task[None] | None = None

    def begin(self, shaking: Coroutine[Any, Any, None]) -> None:
        """Start ``shaking``, which makes a connection or fails."""
        self._task = asyncio.create_task(shaking)
        self._task.add_done_callback(self._done)
        self._limiter.on_open(self)

    def close_now(self) -> None:
        """Cancel the handshake and close its socket."""
        assert self._task is not None
        self._limiter.on_request(self)  # never chosen twice
        self._task.cancel()

    def end(self) -> None:
        """Stop counting the handshake."""
        if self._counted:
            self._counted = False
            self._limiter.on_close(self)

    def _done(self, _: asyncio.Task[None]) -> None:
        if self._counted:  # no connection was made; a task that is cancelled before it begins does not close the socket
            self._sock.close()
            self.end()


class TlsListener:
    """A listening socket whose handshakes count in ``limiter``. uvicorn closes it as an asyncio.Server."""

    def __init__(
        self,
        limiter: ConnectionLimiter,
        sock: socket.socket,
        make: Callable[[TlsHandshake], Connection],
        context: ssl.SSLContext,
        limit_s: float,
        rest_s: float,
    ) -> None:
        """``sock`` listens. ``limit_s``: seconds for a handshake; ``rest_s``: seconds in which a client must read the
        last bytes of a closed connection.
        """
        self._limiter = limiter
        self._sock = sock
        self._make = make
        self._context = context
        self._limit_s = limit_s
        self._rest_s = rest_s
        self.accept_task = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting; existing connections stay."""
        self.accept_task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is accepted any more."""
        await asyncio.wait([self.accept_task])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:  # the client closed first
                continue
            except OSError as error:
                logger.error("cannot accept a connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            handshake = TlsHandshake(self._limiter, sock)
            handshake.begin(self._shake(handshake, sock))

    async def _shake(self, handshake: TlsHandshake, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the client left, did not use TLS, or took too long
            await loop.connect_accepted_socket(
                lambda: self._make(handshake), sock, ssl=self._context,
                ssl_handshake_timeout=self._limit_s, ssl_shutdown_timeout=self._rest_s,
            )  # fmt: skip
