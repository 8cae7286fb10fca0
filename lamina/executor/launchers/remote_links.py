"""Control links to workers on other hosts: TCP between peers that have proven the cluster's key to each other."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from time import monotonic
from typing import Any

from lamina.netstack import Geometry, HandshakeError, ListenTerms
from lamina.netstack.bootstrap.handshake import SEAL, AuthenticatedTerms, Hello, offer, run
from lamina.netstack.bootstrap.listener import StreamListener
from lamina.protocol.encrypted_socket import EncryptedSocket

SCHEME = "control"
_NO_SLOTS = Geometry(slots=1, slot_bytes=64)  # the handshake covers an inbox of each side; here is none


class ControlListener:
    """Accepts control links on one interface of this host. Its creator owns it and closes it."""

    def __init__(self, host: str, key: bytes, name: str, driver: str, *, port: int = 0, links: int = 1) -> None:
        """``name``: of this end, which the other end expects. ``driver``: the only peer that ``accept`` admits.
        ``port``: 0: any free one. ``links``: the most at one time. Raises OSError, with the reason.
        """
        self._driver = driver
        sock = socket.socket(_family(host))
        try:
            if port:  # a chosen port, which a service that has just ended may have used
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen()
        except OSError as error:
            sock.close()
            raise OSError(f"cannot listen at {host_port(host, port)}: {error.strerror}") from error
        self.port: int = sock.getsockname()[1]
        self._listener = StreamListener(
            sock, f"{SCHEME}://{host_port(host, self.port)}", key, SCHEME, screen=lambda _: None, welcome=_welcome,
            must_seal=lambda _: True, reception=ListenTerms(name=name, inbox_bytes=128, channels=links),
        )  # fmt: skip

    def accept(self, timeout_s: float) -> tuple[socket.socket, bytes]:
        """Return the connection of the driver, which has proven the key, and its keys. Raises ChannelTimeout,
        ChannelAborted, and HandshakeError if another holder of the key connects.
        """
        name, sock, keys = self.accept_any(timeout_s)
        if name != self._driver:
            sock.close()
            raise HandshakeError(f"{name!r} came in place of the driver, {self._driver!r}")
        return sock, keys

    def accept_any(self, timeout_s: float) -> tuple[str, socket.socket, bytes]:
        """Return the next peer's name, connection and keys, once it has proven the key. Raises as ``accept``."""
        peer: Any = self._listener.accept(timeout_s=timeout_s)
        return peer.session.name, peer.sock, b"".join(peer.session.keys(listening=True))

    def close(self) -> None:
        """Close the listener, which also ends an accept in progress."""
        self._listener.close()


def connect(host: str, port: int, key: bytes, timeout_s: float, *, name: str, peer: str) -> EncryptedSocket:
    """Connect to a ControlListener and return the socket; ``name``, ``peer``: the names of both ends. Raises
    ChannelTimeout, HandshakeError, OSError.
    """
    sock, keys = connect_inheritable(host, port, key, timeout_s, name=name, peer=peer)
    return EncryptedSocket(sock.detach(), keys)


def connect_inheritable(
    host: str, port: int, key: bytes, timeout_s: float, *, name: str, peer: str
) -> tuple[socket.socket, bytes]:
    """Connect as ``connect`` does, for a process that inherits the socket. Returns the connection and its keys."""
    deadline = monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        hello = Hello(scheme=SCHEME, outbound=_NO_SLOTS, inbound=_NO_SLOTS, cipher=SEAL, name=name, peer=peer)
        session = run(sock, offer(key, hello), f"{SCHEME}://{host_port(host, port)}", deadline=deadline)
        return sock, b"".join(session.keys(listening=False))
    except BaseException:
        sock.close()
        raise


def any_port(host: str) -> str:
    """Return ``host``:0, as transports expect it."""
    return host_port(host, 0)


def host_port(host: str, port: int) -> str:
    """Return ``host``:``port``, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(eq=False)
class _Peer:
    sock: socket.socket
    session: AuthenticatedTerms


def _welcome(sock: socket.socket, session: AuthenticatedTerms) -> Any:
    return _Peer(sock, session)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
