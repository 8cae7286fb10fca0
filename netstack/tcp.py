"""TCP (RFC 9293): any two processes that can reach each other; for now over loopback addresses only."""

from __future__ import annotations

import ipaddress
import socket
from time import monotonic

from .base import BaseFabric
from .fabric import Channel, ChannelError, ChannelTimeout, Fabric, Geometry
from .handshake import Terms, offer, run
from .listener import StreamListener
from .stream import STALL_S, StreamChannel


class TcpFabric(BaseFabric):
    scheme = "tcp"

    def listen(self, address: str = "") -> StreamListener:
        host, port, family = self._endpoint(address or "127.0.0.1:0")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports in TIME_WAIT are free
            sock.bind((host, port))
            sock.listen()
        except OSError as error:
            sock.close()
            where = f"{self.scheme}://{host}:{port}"
            raise ChannelError(f"cannot listen at {where}: {error.strerror}; choose another port (0: any)") from error
        listener = StreamListener(
            sock, self._url(sock.getsockname()), self._key, self.scheme, screen=lambda _: None, welcome=self._welcome
        )
        self._opened.add(listener)
        return listener

    def connect(
        self, url: str, *, outbound: Geometry, inbound: Geometry, epoch: int = 0, timeout_s: float = 10.0
    ) -> StreamChannel:
        deadline = monotonic() + timeout_s
        host, port, family = self._endpoint(self._address(url))
        terms = Terms(self.scheme, epoch, outbound, inbound)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            try:
                sock.connect((host, port))
            except TimeoutError as error:
                raise ChannelTimeout(f"{url}: connect: the listener took nobody in time") from error
            except OSError as error:
                raise ChannelError(f"{url}: connect: {error.strerror}; is the listener's process alive?") from error
            run(sock, offer(self._key, terms), url, deadline=deadline)
            return self._channel(sock, url, terms, listening=False)
        except BaseException:
            sock.close()
            raise

    def _welcome(self, sock: socket.socket, terms: Terms) -> Channel:
        return self._channel(sock, self._url(sock.getpeername()), terms, listening=True)

    def _channel(self, sock: socket.socket, peer: str, terms: Terms, *, listening: bool) -> StreamChannel:
        _tune(sock)
        channel = StreamChannel(sock, peer, terms, listening=listening)
        self._opened.add(channel)
        return channel

    def _url(self, name: tuple[str, int]) -> str:
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"{self.scheme}://{host}:{name[1]}"

    def _endpoint(self, address: str) -> tuple[str, int, socket.AddressFamily]:
        """(host, port, family) of ``host:port``. Raises ValueError, also for an address beyond this host."""
        host, _, port = address.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"address {address!r} must be IP:PORT, such as 127.0.0.1:0 or [::1]:0") from None
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"address {address!r} needs a port 0..65535 behind its last colon")
        if not ip.is_loopback:
            raise ValueError(
                f"address {address!r} is not a loopback address: frames are not yet protected by a MAC, so tcp binds "
                "and connects within one host only; use 127.0.0.1"
            )
        return host, int(port), socket.AF_INET6 if ip.version == 6 else socket.AF_INET


def _tune(sock: socket.socket) -> None:
    """No batching of small frames; a host that vanished is noticed by the kernel (tcp(7))."""
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: 1,
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_USER_TIMEOUT: int(STALL_S * 1000),
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def open_fabric(key: bytes) -> Fabric:
    return TcpFabric(key)
