"""TCP (RFC 9293): any two processes that can reach each other. Frames and their engine: csrc/netstack/host/stream.h.

Within one host, over loopback addresses, frames carry checksums. Beyond it they are encrypted under keys of the
session, by libcrypto. Without libcrypto, no connection leaves this host. The listener refuses a peer that does not
encrypt.
"""

from __future__ import annotations

import ipaddress
import socket
from time import monotonic

from lamina.netstack.bootstrap.handshake import SEAL, AuthenticatedTerms, Hello, offer, run
from lamina.netstack.bootstrap.listener import StreamListener, Visit
from lamina.netstack.bootstrap.sockets import dial, open_place, tune
from lamina.netstack.contract.base import SPIN_S, BaseFabric, usable_spin
from lamina.netstack.contract.channel_terms import DEFAULT_LISTEN_TERMS, ListenTerms, Terms
from lamina.netstack.contract.fabric import CONNECT_S, Channel, ChannelError, Fabric

from .native_module import crypto_fault, open_stream

LIBCRYPTO = "LAMINA_LIBCRYPTO"  # see csrc/netstack/host/cipher.h
STALL_S = 10.0  # a peer that reads no byte of a put for so long is lost


class TcpFabric(BaseFabric):
    """``spin_s``: how long a wait spins before it sleeps; ``seal``: frames are encrypted within this host too."""

    scheme = "tcp"

    def __init__(self, key: bytes, *, spin_s: float = SPIN_S, stall_s: float = STALL_S, seal: bool = False) -> None:
        super().__init__(key)
        self._spin_s = usable_spin(spin_s)
        self._stall_s = stall_s
        self._seal = seal

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> StreamListener:
        host, port, family = self._endpoint(address or "127.0.0.1:0")
        where = f"{self.scheme}://{host}:{port}"
        self._cipher(host, f"cannot listen at {where}")
        sock = open_place(family, (host, port), where, "address of this host, or port (0: any)")
        listener = StreamListener(
            sock,
            self._url(sock.getsockname()),
            self._key,
            self.scheme,
            screen=lambda _: None,
            welcome=self._welcome,
            must_seal=self._must_seal,
            reception=reception,
        )
        self._opened.add(listener)
        return listener

    def join(self, listener: StreamListener) -> None:
        """Let peers of this transport connect to ``listener`` too."""
        listener.add_scheme(self.scheme, self._welcome, self._must_seal)

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        return self._connect(url, terms, self.scheme, timeout_s)

    def _connect(self, url: str, terms: Terms, scheme: str, timeout_s: float) -> Channel:
        """Connect to a listener. ``scheme``: the one in the hello."""
        deadline = monotonic() + timeout_s
        host, port, family = self._endpoint(self._address(url))
        hello = Hello(**vars(terms), scheme=scheme, cipher=self._cipher(host, f"{url}: connect"))
        sock = dial(family, (host, port), url, timeout_s)
        try:
            session = run(sock, offer(terms.key or self._key, hello), url, deadline=deadline)
            return self._connected(sock, url, session, deadline)
        except BaseException:
            sock.close()
            raise

    def hides(self, host: str) -> bool:
        """Return True if frames to and from ``host`` must be encrypted."""
        return self._seal or not _is_loopback(host)

    def _must_seal(self, sock: socket.socket) -> bool:
        return self.hides(sock.getpeername()[0])

    def _cipher(self, host: str, what: str) -> str:
        """Return the cipher for frames to and from ``host``. Raises ChannelError if it is missing; ``what`` begins its
        text.
        """
        if not self.hides(host):
            return ""
        if fault := crypto_fault():
            raise ChannelError(
                f"{what}: frames that leave this host are encrypted by libcrypto, which does not load ({fault}): "
                f"install OpenSSL 1.1.1 or newer (Debian: libssl3), or name its file in {LIBCRYPTO}"
            )
        return SEAL

    def _welcome(self, sock: socket.socket, session: AuthenticatedTerms) -> Channel | Visit:
        return self._channel(sock, self._url(sock.getpeername()), session, listening=True)

    def _connected(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, deadline: float) -> Channel:
        return self._channel(sock, peer, session, listening=False)

    def _channel(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Channel:
        sock.setblocking(True)
        tune(sock, self._stall_s)
        outbound, inbound = session.outbound, session.inbound
        if listening:
            outbound, inbound = inbound, outbound
        keys = session.keys(listening=listening) if session.cipher else None
        times, names = (self._spin_s, self._stall_s), (peer, session.peer_name(listening=listening))
        channel = open_stream(sock.fileno(), session.epoch, outbound, inbound, keys, *times, *names)
        sock.detach()
        self._opened.add(channel)
        return channel

    def _url(self, name: tuple[str, int]) -> str:
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"{self.scheme}://{host}:{name[1]}"

    def _endpoint(self, address: str) -> tuple[str, int, socket.AddressFamily]:
        """Return (host, port, family) of ``host:port``. Raises ValueError."""
        host, _, port = address.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"address {address!r} must be IP:PORT, such as 127.0.0.1:0 or [::1]:0") from None
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"address {address!r} needs a port 0..65535 after its last colon")
        if ip.is_unspecified or ip.is_multicast:
            raise ValueError(f"address {address!r} is no host's own: name the address of one interface")
        return host, int(port), socket.AF_INET6 if ip.version == 6 else socket.AF_INET


def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def open_fabric(key: bytes) -> Fabric:
    return TcpFabric(key)
