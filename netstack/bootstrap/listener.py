"""Accepts peers on a stream socket: many at once. None can delay another one, before its handshake or after."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from time import monotonic
from weakref import WeakSet

from lamina.netstack.contract.channel_terms import DEFAULT_LISTEN_TERMS, ListenTerms, Terms
from lamina.netstack.contract.fabric import Channel, ChannelAborted, ChannelError, ChannelTimeout, HandshakeError

from .handshake import AuthenticatedTerms, Steps, Wants, answer, exchanged

HANDSHAKE_S = 5.0  # and as long again for a transport's setup after it
HALF_OPEN_MAX = 64  # peers without a channel yet; one more drops the oldest
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # this host has no socket for a peer

Meeting = Generator[Wants, None, Channel]  # raises HandshakeError, OSError
Visit = Generator[Wants, None, Channel | None]  # the same; None: the peer wanted no channel
MustSeal = Callable[[socket.socket], bool]
Welcome = Callable[[socket.socket, AuthenticatedTerms], Channel | Visit]


@dataclass(frozen=True)
class ListeningSocket:
    """A listening socket, and its functions to screen and welcome peers (see StreamListener)."""

    sock: socket.socket
    scheme: str
    screen: Callable[[socket.socket], None]
    welcome: Welcome
    must_seal: MustSeal
    others: tuple[tuple[str, Welcome, MustSeal], ...] = ()  # for peers at this socket that use another scheme

    @property
    def welcome_by_scheme(self) -> dict[str, tuple[Welcome, MustSeal]]:
        """Scheme -> function that welcomes its peers, and whether they must encrypt."""
        own = self.scheme, self.welcome, self.must_seal
        return {scheme: (welcome, must_seal) for scheme, welcome, must_seal in (own, *self.others)}


class _HalfOpen:
    """A peer that connected at ``door`` and has no channel yet."""

    def __init__(self, sock: socket.socket, door: ListeningSocket, steps: Steps) -> None:
        self.proven = False  # whether the peer has shown that it holds the key
        self.expiry = monotonic() + HANDSHAKE_S
        self.wants: Wants = {sock.fileno(): select.POLLIN}
        self.channel: Channel | None = None
        self._sock = sock
        self._way = self._go(door, steps)

    def advance(self) -> bool:
        """Continue as far as possible. Returns True at the end, when the socket has a new owner. Raises as Visit."""
        try:
            self.wants = next(self._way)
        except StopIteration as end:
            self.channel = end.value
            return True
        return False

    def close(self) -> None:
        self._way.close()
        self._sock.close()

    def _go(self, door: ListeningSocket, steps: Steps) -> Visit:
        session = yield from exchanged(self._sock, steps)
        self.proven, self.expiry = True, monotonic() + HANDSHAKE_S
        welcome, _ = door.welcome_by_scheme[session.scheme]
        made = welcome(self._sock, session)
        return (yield from made) if isinstance(made, Generator) else made


class StreamListener:
    """Listens on ``sock`` (owned from here on) and turns each authenticated peer into a channel.

    ``screen(sock)`` may refuse a peer before the handshake by raising HandshakeError. ``welcome(sock, session)`` makes
    the channel, which owns ``sock``; it may raise OSError when there is no memory for its terms. If the peer has to
    send something first, it returns a Visit, which runs next to all others and over several calls of accept.
    ``must_seal(sock)`` returns whether that peer's terms need a cipher. A refused peer is dropped; the reason of the
    last one is part of the text of accept's ChannelTimeout.
    ``refusal``: that reason.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        key: bytes,
        scheme: str,
        *,
        screen: Callable[[socket.socket], None],
        welcome: Welcome,
        must_seal: MustSeal = lambda _: False,
        reception: ListenTerms = DEFAULT_LISTEN_TERMS,
    ) -> None:
        sock.setblocking(False)
        self.url = url
        self._reception = reception
        self._accepted: WeakSet[Channel] = WeakSet()  # those that are still in use count for the limit
        self._key = key
        self._doors = {sock.fileno(): ListeningSocket(sock, scheme, screen, welcome, must_seal)}
        self._half_open: dict[int, _HalfOpen] = {}  # by descriptor, oldest first
        self.refusal = ""
        self._heard = monotonic()  # until when half-open peers were last served
        self._wake, self._waker = socket.socketpair()
        self._accepting = threading.Lock()

    @property
    def half_open(self) -> int:
        """The number of peers that have connected and have no channel yet."""
        return len(self._half_open)

    def adopt(self, other: StreamListener) -> None:
        """Accept at the sockets of ``other`` too, which is closed. Call it before the first accept of either."""
        self._doors |= other._doors
        other._doors.clear()
        other.close()

    def add_scheme(self, scheme: str, welcome: Welcome, must_seal: MustSeal) -> None:
        """Accept peers of ``scheme`` at all present sockets, too."""
        for fd, door in self._doors.items():
            self._doors[fd] = replace(door, others=(*door.others, (scheme, welcome, must_seal)))

    def accept(self, *, timeout_s: float) -> Channel:
        with self._accepting:
            return self._next(monotonic() + timeout_s)

    def close(self) -> None:
        self._waker.close()  # ends an accept in progress
        with self._accepting:
            for peer in self._half_open.values():
                peer.close()
            self._half_open.clear()
            for door in self._doors.values():
                door.sock.close()
            self._wake.close()

    def _next(self, deadline: float) -> Channel:
        """Return the channel of the next peer that has passed the handshake and the setup of its transport."""
        while self._wake.fileno() >= 0:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            for door in self._doors.values():
                poller.register(door.sock, select.POLLIN)
            until, whose, deaf_s = deadline, dict[int, int](), monotonic() - self._heard
            for number, peer in self._half_open.items():
                peer.expiry += deaf_s  # time in which it may have sent something
                for fd, events in peer.wants.items():
                    poller.register(fd, events)
                    whose[fd] = number
                until = min(until, peer.expiry)
            ready = poller.poll(max(0.0, until - monotonic()) * 1000)
            self._heard = monotonic()
            for fd, _ in ready:
                if fd == self._wake.fileno():
                    break
                if fd in self._doors:
                    self._admit(self._doors[fd])
                elif (number := whose[fd]) in self._half_open and (channel := self._advance(number)) is not None:
                    return channel
            else:
                self._drop_late()
                if monotonic() >= deadline:
                    refusal = f"; the last one was refused: {self.refusal}" if self.refusal else ""
                    raise ChannelTimeout(f"{self.url}: accept: no peer came in time{refusal}")
                continue
            break
        raise ChannelAborted(f"{self.url}: accept: the listener was closed")

    def _admit(self, door: ListeningSocket) -> None:
        try:
            sock, _ = door.sock.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise ChannelError(f"{self.url}: accept: {error.strerror}") from error
            return  # the peer is gone again (accept(2))
        try:
            door.screen(sock)
            must_seal = [scheme for scheme, (_, must) in door.welcome_by_scheme.items() if must(sock)]
        except (HandshakeError, OSError) as error:  # OSError: it is gone already, and has no address any more
            self.refusal = str(error)
            sock.close()
            return
        if len(self._half_open) >= HALF_OPEN_MAX:
            oldest = min(self._half_open, key=lambda fd: self._half_open[fd].proven)  # an unproven one, if there is one
            self._drop(oldest, "too many strangers at once")
        steps = answer(
            self._key, *door.welcome_by_scheme, name=self._reception.name, must_seal=must_seal, refuses=self._refuses
        )
        self._half_open[sock.fileno()] = _HalfOpen(sock, door, steps)

    def _refuses(self, terms: Terms) -> str:
        """Return the part of the limit that ``terms`` exceed. Peers that have proven the key count: they may have
        memory.
        """
        channels = len(self._accepted) + sum(peer.proven for peer in self._half_open.values())
        return self._reception.exceeded_limit(terms, channels)

    def _advance(self, fd: int) -> Channel | None:
        peer = self._half_open[fd]
        try:
            if peer.advance():
                del self._half_open[fd]
        except HandshakeError as error:
            self._drop(fd, str(error))
        except OSError as error:
            self._drop(fd, f"no memory for its terms: {error}")
        if peer.channel is not None:
            self._accepted.add(peer.channel)
        return peer.channel

    def _drop_late(self) -> None:
        now = monotonic()
        for fd in [fd for fd, peer in self._half_open.items() if peer.expiry <= now]:
            self._drop(fd, f"it was silent for {HANDSHAKE_S:g} s")

    def _drop(self, fd: int, refusal: str) -> None:
        self._half_open.pop(fd).close()
        self.refusal = refusal
