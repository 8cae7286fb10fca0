"""Control links to workers on other hosts: TCP between peers that have proven the cluster's key to each other."""

from __future__ import annotations

import ipaddress
import socket
from time import monotonic
from typing import Any

from lamina.netstack import Geometry
from lamina.netstack.handshake import Session, Terms, offer, run
from lamina.netstack.listener import StreamListener
from lamina.protocol.sealed import SealedSocket

SCHEME = "control"
_NO_SLOTS = Geometry(slots=1, slot_bytes=64)  # the handshake covers an inbox of each side; here is none


class ControlListener:
    """Where a driver comes, on one interface of this host and any free port. Owned by who made it; close it."""

    def __init__(self, host: str, key: bytes) -> None:
        """Raises OSError, with the reason."""
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
            must_seal=lambda _: True,
        )  # fmt: skip

    def accept(self, timeout_s: float) -> tuple[socket.socket, bytes]:
        """The connection of the first who has proven the key, and its keys. Raises ChannelTimeout, ChannelAborted."""
        peer: Any = self._listener.accept(timeout_s=timeout_s)
        sock, session = peer
        return sock, b"".join(session.keys(listening=True))

    def close(self) -> None:
        """Ends an accept in progress too."""
        self._listener.close()


def connect(host: str, port: int, key: bytes, timeout_s: float) -> SealedSocket:
    """The driver's end of a control link. Raises ChannelTimeout, HandshakeError, OSError."""
    deadline = monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        terms = Terms(SCHEME, 0, _NO_SLOTS, _NO_SLOTS, sealed=True)
        session = run(sock, offer(key, terms), f"{SCHEME}://{host}:{port}", deadline=deadline)
        return SealedSocket(sock.detach(), b"".join(session.keys(listening=False)))
    except BaseException:
        sock.close()
        raise


def any_port(host: str) -> str:
    """``host``:0, as transports take it."""
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def _welcome(sock: socket.socket, session: Session) -> Any:
    return sock, session


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
