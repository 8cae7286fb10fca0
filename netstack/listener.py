"""Accepting peers on a stream socket: many handshakes at once, none of which can hold up the others."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from .fabric import Channel, ChannelAborted, ChannelError, ChannelTimeout, HandshakeError
from .handshake import Exchange, Session, answer

HANDSHAKE_S = 5.0
HALF_OPEN_MAX = 64  # handshakes in progress; one more drops the oldest
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # this host has no socket for a peer


@dataclass(frozen=True)
class Door:
    """A listening socket, and what becomes of those who come in by it; see StreamListener."""

    sock: socket.socket
    scheme: str
    screen: Callable[[socket.socket], None]
    welcome: Callable[[socket.socket, Session], Channel]
    must_seal: Callable[[socket.socket], bool]


class StreamListener:
    """Listens on ``sock`` (owned from here on) and turns each authenticated peer into a channel.

    ``screen(sock)`` may refuse a peer before the handshake by raising HandshakeError; ``welcome(sock, session)`` makes
    the channel, owning ``sock``, and may raise OSError when there is no memory for its terms. ``must_seal(sock)`` says
    whether that peer's terms need a seal. A refused peer is dropped; the reason of the last one is part of the text of
    accept's ChannelTimeout.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        key: bytes,
        scheme: str,
        *,
        screen: Callable[[socket.socket], None],
        welcome: Callable[[socket.socket, Session], Channel],
        must_seal: Callable[[socket.socket], bool] = lambda _: False,
    ) -> None:
        sock.setblocking(False)
        self.url = url
        self._key = key
        self._doors = {sock.fileno(): Door(sock, scheme, screen, welcome, must_seal)}
        self._half_open: dict[int, tuple[Exchange, float, Door]] = {}  # by descriptor, oldest first
        self._refusal = ""
        self._wake, self._waker = socket.socketpair()
        self._accepting = threading.Lock()

    def adopt(self, other: StreamListener) -> None:
        """Accept by the doors of ``other`` too, which is over. Before the first accept of either."""
        self._doors |= other._doors
        other._doors.clear()
        other.close()

    def accept(self, *, timeout_s: float) -> Channel:
        deadline = monotonic() + timeout_s
        with self._accepting:
            while True:
                sock, session, door = self._next(deadline)
                try:
                    return door.welcome(sock, session)
                except OSError as error:
                    sock.close()
                    self._refusal = f"no memory for its terms: {error}"

    def close(self) -> None:
        self._waker.close()  # ends an accept in progress
        with self._accepting:
            for exchange, _, _ in self._half_open.values():
                exchange.sock.close()
            self._half_open.clear()
            for door in self._doors.values():
                door.sock.close()
            self._wake.close()

    def _next(self, deadline: float) -> tuple[socket.socket, Session, Door]:
        """The next peer that has passed the handshake."""
        while self._wake.fileno() >= 0:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            for door in self._doors.values():
                poller.register(door.sock, select.POLLIN)
            until = deadline
            for exchange, expiry, _ in self._half_open.values():
                poller.register(exchange.sock, exchange.events)
                until = min(until, expiry)
            for fd, _ in poller.poll(max(0.0, until - monotonic()) * 1000):
                if fd == self._wake.fileno():
                    break
                if fd in self._doors:
                    self._admit(self._doors[fd])
                elif fd in self._half_open and (passed := self._advance(fd)):
                    return passed
            else:
                self._drop_late()
                if monotonic() >= deadline:
                    refusal = f"; the last one was refused: {self._refusal}" if self._refusal else ""
                    raise ChannelTimeout(f"{self.url}: accept: no peer came in time{refusal}")
                continue
            break
        raise ChannelAborted(f"{self.url}: accept: the listener was closed")

    def _admit(self, door: Door) -> None:
        try:
            sock, _ = door.sock.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise ChannelError(f"{self.url}: accept: {error.strerror}") from error
            return  # the peer is gone again (accept(2))
        try:
            door.screen(sock)
            must_seal = door.must_seal(sock)
        except (HandshakeError, OSError) as error:  # OSError: it is gone already, and has no address any more
            self._refusal = str(error)
            sock.close()
            return
        if len(self._half_open) >= HALF_OPEN_MAX:
            self._drop(next(iter(self._half_open)), "too many strangers at once")
        steps = answer(self._key, door.scheme, must_seal=must_seal)
        self._half_open[sock.fileno()] = (Exchange(sock, steps), monotonic() + HANDSHAKE_S, door)

    def _advance(self, fd: int) -> tuple[socket.socket, Session, Door] | None:
        exchange, _, door = self._half_open[fd]
        try:
            session = exchange.advance()
        except HandshakeError as error:
            self._drop(fd, str(error))
            return None
        if session is None:
            return None
        del self._half_open[fd]
        return exchange.sock, session, door

    def _drop_late(self) -> None:
        now = monotonic()
        for fd in [fd for fd, (_, expiry, _) in self._half_open.items() if expiry <= now]:
            self._drop(fd, f"it was silent for {HANDSHAKE_S:g} s")

    def _drop(self, fd: int, refusal: str) -> None:
        exchange, _, _ = self._half_open.pop(fd)
        exchange.sock.close()
        self._refusal = refusal
