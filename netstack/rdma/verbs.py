"""RDMA through the verbs of libibverbs: InfiniBand, RoCE and Soft-RoCE; the CPU posts the work requests.

Peers meet over TCP, authenticate, and swap cards: queue pair, inbox, key. The connection stays open, silent, as the
life line. From there on the NICs move the data:

- A message is one RDMA write into a slot of the peer's inbox, header and payload side by side, whose immediate value
  completes a receive there. The completion is the signal; verbs promise that everything which the same queue pair wrote
  before is visible by then (InfiniBand 1.4, 10.8.3), so neither adaptive routing nor relaxed ordering matters. What
  exceeds one write goes ahead of it in pieces.
- Credit is an empty write whose immediate value counts the released slots.
- Receives are posted for every message and credit that may be under way, so no peer is ever told to come back later.
- While a call waits, an empty write now and then asks the peer's NIC whether it is still there. Ours says when it has
  tried in vain, but for Soft-RoCE, which never gives up: there a peer of whose NIC nothing is heard for a time is lost.

What NICs send is neither encrypted nor authenticated: use a network that strangers cannot write to. Only the inbox is
open to the peer, for writing. Each peer has a protection domain of its own, so that a key of one peer's inbox is of no
use to another.
"""

from __future__ import annotations

import os
import socket
from time import monotonic
from typing import cast

from lamina.netstack.contract.base import RDMA_DEVICE, SPIN_S, affordable_spin
from lamina.netstack.contract.fabric import CONNECT_S, ChannelError, Fabric, Region
from lamina.netstack.contract.terms import Terms
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.meeting.handshake import PeerSession
from lamina.netstack.meeting.listener import Meeting

from .device import RdmaDevice
from .verbs_channel import COPY_BYTES, WRITE_BYTES, VerbsChannel


class VerbsFabric(TcpFabric):
    """Listens and connects as ``tcp`` does, then leaves the wire to ``device`` (see ``RdmaDevice``)."""

    scheme = "verbs"

    def __init__(self, key: bytes, *, device: str = "", spin_s: float = SPIN_S) -> None:
        super().__init__(key)
        self._spin_s = affordable_spin(spin_s)
        self._device = RdmaDevice(device, least_message_bytes=WRITE_BYTES)
        self._sources: list[memoryview] = []

    def register(self, buffer: memoryview) -> Region:
        """Each channel that puts from it registers it with the NIC, which pins the memory, for its own peer."""
        region = super().register(buffer)
        if region.data.nbytes > COPY_BYTES:
            self._sources.append(region.data)
        return region

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> VerbsChannel:
        deadline = monotonic() + timeout_s
        try:
            channel = cast("VerbsChannel", super().connect(url, terms, timeout_s=timeout_s))
            channel.meet(deadline)
        except OSError as error:
            raise ChannelError(f"{url}: connect: {error}") from error
        return channel

    def close(self) -> None:
        super().close()
        self._sources.clear()
        self._device.close()

    def _hides(self, host: str) -> bool:
        """False: nothing encrypts messages that NICs send."""
        return False

    def _welcome(self, sock: socket.socket, session: PeerSession) -> Meeting:
        return self._channel(sock, self._url(sock.getpeername()), session, listening=True).meeting()

    def _channel(self, sock: socket.socket, peer: str, session: PeerSession, *, listening: bool) -> VerbsChannel:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = VerbsChannel(
            self._device, self._sources, sock, peer, session, listening=listening, spin_s=self._spin_s
        )
        self._opened.add(channel)
        return channel


def open_fabric(key: bytes) -> Fabric:
    return VerbsFabric(key, device=os.environ.get(RDMA_DEVICE, ""))
