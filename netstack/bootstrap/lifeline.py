"""A channel that notices its peer's end on a connection that is otherwise silent."""

from __future__ import annotations

import select
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol

from lamina.netstack.contract.base import BaseChannel, one_line
from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import ChannelAborted, PeerFault

from .sockets import tune

SLICE_S = 0.05  # how often a wait checks the life line
ASK_S = 0.1  # how often a link that reports nothing itself is checked, while kernels wait
SILENCE_S = 10.0  # then the peer's host counts as gone: this side may have nothing in flight that could fail
REASON_BYTES = 256


class WatchedChannel(BaseChannel):
    """Owns ``sock``, the non-blocking life line. A transport ends its waits in ``_end_waits``."""

    def __init__(
        self, sock: socket.socket, peer: str, epoch: int, outbound: Geometry, inbound: Geometry, peer_name: str
    ) -> None:
        super().__init__(peer, epoch, outbound, inbound, peer_name)
        self._sock = sock
        if sock.family != socket.AF_UNIX:
            tune(sock, SILENCE_S)
        self._looked = monotonic()
        self._looking = threading.Lock()
        self._stopped = False
        self._peer_end: str | None = None

    def abort(self, reason: str) -> None:
        self._leave(f"aborted: {reason}", finishes=False)

    @abstractmethod
    def _end_waits(self) -> None:
        """End the calls in progress on this side soon; may be called from any thread."""

    def _finish(self) -> None:
        """Let messages that were put arrive, for a bounded time, before the peer learns that this side closes."""

    def _leave(self, why: str, *, finishes: bool = True) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._end_waits()
        if finishes:
            self._finish()
        self._say(why)

    def _say(self, why: str) -> None:
        """Send the last message on the life line."""
        with suppress(OSError):
            self._sock.send(why.encode()[:REASON_BYTES])
            self._sock.shutdown(socket.SHUT_RDWR)

    def _check(self, operation: str) -> None:
        if self._stopped:
            raise ChannelAborted(f"{self.peer}: {operation}: the channel was aborted or closed on this side")

    def _check_peer(self, operation: str) -> None:
        if self._peer_end is not None:
            raise PeerFault(f"{self.peer}: {operation}: {self._peer_end}")

    def _look(self) -> None:
        """Notice the peer's end: its last message, or the end of the connection."""
        with self._looking:
            self._looked = monotonic()
            try:
                farewell = self._sock.recv(REASON_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"the connection broke ({error.strerror})")
                return
            reason = one_line(farewell.decode(errors="replace"))
            self._lose(f"the peer {reason}" if reason else "the peer's process is gone")

    def _lose(self, why: str) -> None:
        if self._peer_end is None:
            self._peer_end = why


class LinkEvents(Protocol):
    """The events of a link, in addition to its life line."""

    def fileno(self) -> int:
        """A descriptor that is readable after an event. It stays open until this side has left. -1: the link reports
        nothing itself.
        """
        ...

    def failure(self) -> str:
        """Return the words for the event that has ended the link; "" if none has."""
        ...


def watch(sock: socket.socket, end_waits: Callable[[], None], events: LinkEvents | None = None) -> Callable[[], None]:
    """Start a thread that calls ``end_waits`` at the end of the life line ``sock``, from which it reads nothing, or
    once ``events`` report that the link is over. Returns a function that ends the line on this side, and with it the
    thread.
    """
    own = sock.dup()
    poller = select.poll()
    poller.register(own, select.POLLIN | select.POLLRDHUP)
    patience_ms = None
    if events is not None and (fd := events.fileno()) >= 0:
        poller.register(fd, select.POLLIN)
    elif events is not None:
        patience_ms = 1000 * ASK_S

    def run() -> None:
        with own:
            while own.fileno() not in {fd for fd, _ in poller.poll(patience_ms)}:  # until a side leaves
                if events is not None and events.failure():
                    break
            end_waits()

    def end() -> None:
        with suppress(OSError):  # it has ended
            own.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=run, name="lamina-lifeline", daemon=True).start()
    return end
