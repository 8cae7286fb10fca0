"""Control links to workers on other hosts: TCP between peers that have proven the cluster's key to each other."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from time import monotonic
from typing import Any

from lamina.netstack import Ceiling, Geometry, HandshakeError
from lamina.netstack.meeting.handshake import SEAL, PeerSession, Terms, offer, run
from lamina.netstack.meeting.listener import StreamListener
from lamina.protocol.sealed import SealedSocket

SCHEME = "control"
_NO_SLOTS = Geometry(slots=1, slot_bytes=64)  # the handshake covers an inbox of each side; here is none
_CEILING = Ceiling(inbox_bytes=128, channels=1)


class ControlListener:
    """Where a driver comes, on one interface of this host and any free port. Owned by who made it; close it."""

    def __init__(self, host: str, key: bytes, name: str, driver: str) -> None:
        """``name``: of this end, which the driver wants; ``driver``: of the only one that may come. Raises OSError,
        with the reason.
        """
        self._driver = driver
        sock = socket.socket(_family(host))
        try:
            sock.bind((host, 0))
            sock.listen()
        except OSError as error:
            sock.close()
            raise OSError(f"cannot listen at {host}: {error.strerror}") from error
        self.port: int = sock.getsockname()[1]
        self._listener = StreamListener(
            sock, f"{SCHEME}://{host}:{self.port}", key, SCHEME, screen=lambda _: None, welcome=_welcome,
            must_seal=lambda _: True, name=name, ceiling=_CEILING,
        )  # fmt: skip

    def accept(self, timeout_s: float) -> tuple[socket.socket, bytes]:
        """The connection of the driver, who has proven the key, and its keys. Raises ChannelTimeout, ChannelAborted,
        and HandshakeError where another one comes who holds the key.
        """
        peer: Any = self._listener.accept(timeout_s=timeout_s)
        if peer.session.name != self._driver:
            peer.sock.close()
            raise HandshakeError(f"{peer.session.name!r} came in place of the driver, {self._driver!r}")
        return peer.sock, b"".join(peer.session.keys(listening=True))

    def close(self) -> None:
        """Ends an accept in progress too."""
        self._listener.close()


def connect(host: str, port: int, key: bytes, timeout_s: float, *, name: str, peer: str) -> SealedSocket:
    """The driver's end of a control link; ``name`` and ``peer``: of both ends. Raises ChannelTimeout, HandshakeError,
    OSError.
    """
    deadline = monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        terms = Terms(SCHEME, 0, _NO_SLOTS, _NO_SLOTS, SEAL, name, peer)
        session = run(sock, offer(key, terms), f"{SCHEME}://{host}:{port}", deadline=deadline)
        return SealedSocket(sock.detach(), b"".join(session.keys(listening=False)))
    except BaseException:
        sock.close()
        raise


def any_port(host: str) -> str:
    """``host``:0, as transports take it."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"


@dataclass(eq=False)
class _Peer:
    sock: socket.socket
    session: PeerSession


def _welcome(sock: socket.socket, session: PeerSession) -> Any:
    return _Peer(sock, session)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
