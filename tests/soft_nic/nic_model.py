"""The transport ``nic-model``: the sender builds work requests of an mlx5 NIC, and a NIC in software executes them.

HARDWARE-UNVERIFIED. The code that posts and polls (csrc/netstack/mlx5.h, for GPUs and CPUs) has never run on a
ConnectX. Here the CPU runs it against the software NIC, which moves the bytes into the peer's memory. Peers are
processes of one user on one host.

Peers meet over TCP, as the control plane of a real queue pair would, and authenticate. Then each names its inbox
(address, key) and the memory that holds it. The connection stays open and silent as the life line.
"""

from __future__ import annotations

import socket
from time import monotonic

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Hello, offer, run
from lamina.netstack.bootstrap.listener import Meeting, StreamListener
from lamina.netstack.bootstrap.sockets import dial, open_place
from lamina.netstack.contract.base import BaseFabric
from lamina.netstack.contract.channel_terms import DEFAULT_LISTEN_TERMS, MAX_MESSAGE_BYTES, ListenTerms, Terms
from lamina.netstack.contract.fabric import CONNECT_S, ChannelError, Fabric

from .channel import NicModelChannel

LOCAL = "127.0.0.1"


class NicModelFabric(BaseFabric):
    scheme = "nic-model"
    spoken = "nicmodel"  # in a hello, which has 8 bytes for it
    proxied = False  # another thread rings for the one that posts

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> StreamListener:
        place = _endpoint(address or f"{LOCAL}:0")
        where = f"{self.scheme}://{place[0]}:{place[1]}"
        sock = open_place(socket.AF_INET, place, where, "port (0: any)")
        listener = StreamListener(
            sock, self._url(sock.getsockname()), self._key, self.spoken, screen=lambda _: None, welcome=self._welcome,
            reception=reception,
        )  # fmt: skip
        self._opened.add(listener)
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> NicModelChannel:
        deadline = monotonic() + timeout_s
        place = _endpoint(self._address(url))
        hello = Hello(**vars(terms), scheme=self.spoken)
        for geometry in (terms.outbound, terms.inbound):
            if geometry.slot_bytes > MAX_MESSAGE_BYTES:
                raise ValueError(f"{url}: slot_bytes is at most {MAX_MESSAGE_BYTES} here, not {geometry.slot_bytes}")
        sock = dial(socket.AF_INET, place, url, timeout_s)
        try:
            session = run(sock, offer(terms.key or self._key, hello), url, deadline=deadline)
            try:
                channel = self._channel(sock, url, session, listening=False)
            except (OSError, ValueError) as error:
                raise ChannelError(f"{url}: connect: {error}") from error
            channel.meet(deadline)
            return channel
        except BaseException:
            sock.close()
            raise

    def _welcome(self, sock: socket.socket, session: AuthenticatedTerms) -> Meeting:
        try:
            return self._channel(sock, self._url(sock.getpeername()), session, listening=True).meeting()
        except ValueError as error:
            raise OSError(str(error)) from error

    def _channel(
        self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool
    ) -> NicModelChannel:
        channel = NicModelChannel(sock, peer, session, listening=listening, proxied=self.proxied)
        self._opened.add(channel)
        return channel

    def _url(self, place: tuple[str, int]) -> str:
        return f"{self.scheme}://{place[0]}:{place[1]}"


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if host not in (LOCAL, "localhost") or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"address {address!r} must be {LOCAL}:PORT: the software NIC reaches this host only")
    return LOCAL, int(port)


def open_fabric(key: bytes) -> Fabric:
    """Open a software NIC for peers that hold ``key``."""
    return NicModelFabric(key)
