"""Shared memory where both peers are on one host and of one user, else TCP.

The listener has two doors: an IP address, and in the same network namespace a socket whose name contains that address.
The connector knocks at the second first. Where nobody answers there, or another user does, the peer is elsewhere.
"""

from __future__ import annotations

import logging
from time import monotonic

from .base import BaseFabric
from .fabric import Channel, ChannelError, ChannelTimeout, Fabric, Geometry
from .listener import StreamListener
from .shm import ShmFabric
from .tcp import TcpFabric

log = logging.getLogger(__name__)


class AutoFabric(BaseFabric):
    """``reason``: what the last connect took, and why. It is logged too."""

    scheme = "auto"

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._shm, self._tcp = ShmFabric(key), TcpFabric(key)
        self.reason = ""

    def listen(self, address: str = "") -> StreamListener:
        listener = self._tcp.listen(address)
        place = listener.url.partition("://")[2]
        try:
            listener.adopt(self._shm.listen(_name(place)))
        except ChannelError as error:
            log.warning("%s: no shared memory here: %s", listener.url, error)
        listener.url = f"{self.scheme}://{place}"
        return listener

    def connect(
        self, url: str, *, outbound: Geometry, inbound: Geometry, epoch: int = 0, timeout_s: float = 10.0
    ) -> Channel:
        deadline = monotonic() + timeout_s
        place = self._address(url)
        near, far = f"{self._shm.scheme}://{_name(place)}", f"{self._tcp.scheme}://{place}"
        try:
            channel = self._shm.connect(near, outbound=outbound, inbound=inbound, epoch=epoch, timeout_s=timeout_s)
        except ChannelTimeout:
            raise  # the listener is here; it does not accept
        except ChannelError as error:
            why = f"the listener is not within reach of memory ({error})"
            left_s = max(0.0, deadline - monotonic())
            try:
                other = self._tcp.connect(far, outbound=outbound, inbound=inbound, epoch=epoch, timeout_s=left_s)
            except ChannelError as last:
                raise type(last)(f"{url}: {why}, nor of the network: {last}") from last
            self._say(f"{url}: {self._tcp.scheme}, for {why}")
            return other
        self._say(f"{url}: {self._shm.scheme}, for the listener is on this host and of this user")
        return channel

    def close(self) -> None:
        self._shm.close()
        self._tcp.close()

    def _say(self, reason: str) -> None:
        self.reason = reason
        log.info("%s", reason)


def _name(place: str) -> str:
    return f"lamina-at-{place}"


def open_fabric(key: bytes) -> Fabric:
    return AutoFabric(key)
