"""The nearest way to a peer: WAYS, in their order; which one was taken is said, and why none before it.

The listener has two doors: an IP address, where TCP is spoken and RDMA may be, and in the same network namespace a
socket whose name contains that address. A connector goes each way that it has itself; where nobody answers, another
user does, or the listener lacks that way, it is the next one's turn.

RDMA is a way only where both sides name a device for it: NICs do not authenticate what they send, so somebody has to
say that the fabric is isolated. ``cuda`` is none: its kernels are for messages in GPU memory, and ours are elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from .contract.base import RDMA_DEVICE, BaseFabric
from .contract.fabric import CONNECT_S, Channel, ChannelError, ChannelTimeout, Fabric, Region
from .contract.terms import RECEPTION, Reception, Terms
from .host.shm import ShmFabric
from .host.tcp import TcpFabric
from .meeting.listener import StreamListener

log = logging.getLogger(__name__)


def _name(place: str) -> str:
    return f"lamina-at-{place}"


@dataclass(frozen=True)
class Way:
    scheme: str
    at: Callable[[str], str]  # the listener's address there, of its IP:PORT
    reach: str  # what the two are within
    because: str = ""


WAYS = (
    Way("shm", _name, "memory", "the listener is on this host and of this user"),
    Way("verbs", str, "RDMA", "both sides name a device for it"),
    Way("tcp", str, "the network"),
)


class AutoFabric(BaseFabric):
    """``reason``: what the last connect took, and why. It is logged too."""

    scheme = "auto"

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._shm, self._tcp = ShmFabric(key), TcpFabric(key)
        self._verbs, self._lacks_verbs = _verbs(key)
        self.reason = ""

    def register(self, buffer: memoryview) -> Region:
        return (self._verbs or self._tcp).register(buffer)

    def listen(self, address: str = "", reception: Reception = RECEPTION) -> StreamListener:
        listener = self._tcp.listen(address, reception)
        if self._verbs is not None:
            self._verbs.join(listener)
        place = listener.url.partition("://")[2]
        try:
            listener.adopt(self._shm.listen(_name(place)))
        except ChannelError as error:
            log.warning("%s: no shared memory here: %s", listener.url, error)
        listener.url = f"{self.scheme}://{place}"
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        deadline = monotonic() + timeout_s
        place = self._address(url)
        fabrics: dict[str, Fabric | None] = {"shm": self._shm, "verbs": self._verbs, "tcp": self._tcp}
        beyond: list[str] = []
        for way in WAYS:
            fabric = fabrics[way.scheme]
            if fabric is None:
                beyond.append(f"{way.reach} ({self._lacks_verbs})")
                continue
            there, left_s = f"{way.scheme}://{way.at(place)}", max(0.0, deadline - monotonic())
            try:
                channel = fabric.connect(there, terms, timeout_s=left_s)
            except ChannelError as error:
                if isinstance(error, ChannelTimeout) and way is WAYS[0]:
                    raise  # the listener is here; it does not accept
                beyond.append(f"{way.reach} ({error})")
                last = error
                continue
            self._say(url, way, beyond)
            return channel
        raise type(last)(f"{url}: {_not_within(beyond)}") from last

    def close(self) -> None:
        for fabric in (self._shm, self._verbs, self._tcp):
            if fabric is not None:
                fabric.close()

    def _say(self, url: str, way: Way, beyond: list[str]) -> None:
        because = "; ".join(filter(None, (_not_within(beyond), way.because)))
        self.reason = f"{url}: {way.scheme}, for {because}"
        log.info("%s", self.reason)


def _not_within(beyond: list[str]) -> str:
    return f"the listener is not within reach of {', nor of '.join(beyond)}" if beyond else ""


def _verbs(key: bytes) -> tuple[TcpFabric | None, str]:
    """The fabric, or why this side has none."""
    device = os.environ.get(RDMA_DEVICE, "")
    if not device:
        return None, f"{RDMA_DEVICE} names no device here"
    try:
        from .rdma.verbs import VerbsFabric

        return VerbsFabric(key, device=device), ""
    except ImportError as error:
        return None, str(error)


def open_fabric(key: bytes) -> Fabric:
    return AutoFabric(key)
