"""The transport ``auto``: uses the first of TRANSPORT_CHOICES that reaches the peer, and logs the choice and its
reason.

The listener listens at an IP address for TCP and perhaps RDMA, and in its network namespace at a Unix socket whose name
contains that address. A connector tries each transport that it has itself. If no process listens there, another user
does, or the listener lacks that transport, it tries the next one.

RDMA is tried only if a device is named on both sides, for all hosts or by each host. NICs do not authenticate messages,
so an operator must confirm that the network is isolated. It is used after a trial in which messages pass both ways.
``mlx5`` is for channels whose messages kernels send, if both sides compute on a GPU. ``cuda`` is not tried: it connects
processes of one host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic

from .bootstrap.listener import StreamListener
from .contract.base import NAMED_BY, RDMA_FLAG, BaseFabric, rdma_device
from .contract.channel_terms import DEFAULT_LISTEN_TERMS, ListenTerms, Terms
from .contract.fabric import CONNECT_S, Channel, ChannelError, ChannelTimeout, Fabric
from .host.shm import ShmFabric
from .host.tcp import TcpFabric
from .rdma.verbs import VerbsFabric

log = logging.getLogger(__name__)
RETRY_S = 60.0  # a trial's result for an address is valid for so long


def listener_name(place: str) -> str:
    return f"lamina-at-{place}"


@dataclass(frozen=True)
class TransportChoice:
    scheme: str
    at: Callable[[str], str]  # the listener's address for this transport, from its IP:PORT
    reach: str  # what both sides share
    because: str = ""
    kernels: bool = False  # for channels of kernels only


TRANSPORT_CHOICES = (
    TransportChoice("shm", listener_name, "memory", "the listener is on this host and of this user"),
    TransportChoice(
        "mlx5", str, "RDMA by kernels", "both sides name a device, have a GPU, and messages pass", kernels=True
    ),
    TransportChoice("verbs", str, "RDMA", "both sides name a device for it, and messages pass"),
    TransportChoice("tcp", str, "the network"),
)


class AutoFabric(BaseFabric):
    """``reason``: the transport that the last connect chose, and why; it is logged too. ``gpu``: the one that the
    caller computes on; ``device``: an RDMA device, which must exist, as it was named. Raises ImportError if it does
    not. ``rdma``: the transports by RDMA that it tries, by scheme.
    """

    scheme = "auto"

    def __init__(self, key: bytes, gpu: int | None = None, device: str = "") -> None:
        super().__init__(key)
        self._shm, self._tcp = ShmFabric(key), TcpFabric(key)
        self._lacks: dict[str, str] = {}
        self.rdma: dict[str, VerbsFabric] = {}
        opened: dict[str, Callable[[], VerbsFabric]] = {
            "mlx5": partial(_mlx5, key, gpu, device),
            "verbs": partial(_verbs, key, device),
        }
        for scheme, open_way in opened.items():
            try:
                self.rdma[scheme] = open_way()
            except ImportError as error:
                self._lacks[scheme] = str(error)
        if device and "verbs" not in self.rdma:
            self.close()
            raise ImportError(f"{RDMA_FLAG} {device}: {self._lacks['verbs']}")
        self.remarks = [f"{scheme}: {words}" for scheme, fabric in self.rdma.items() for words in fabric.remarks]
        self._tried: dict[str, tuple[float, str]] = {}  # URL -> (expiry, reason why messages do not pass)
        self.reason = ""

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> StreamListener:
        listener = self._tcp.listen(address, reception)
        for fabric in self.rdma.values():
            fabric.join(listener)
        place = listener.url.partition("://")[2]
        try:
            listener.adopt(self._shm.listen(listener_name(place)))
        except ChannelError as error:
            log.warning("%s: no shared memory here: %s", listener.url, error)
        listener.url = f"{self.scheme}://{place}"
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        deadline = monotonic() + timeout_s
        place = self._address(url)
        fabrics: dict[str, Fabric] = {"shm": self._shm, "tcp": self._tcp, **self.rdma}
        beyond: list[str] = []
        for way in TRANSPORT_CHOICES:
            if way.kernels and not terms.kernels:
                continue
            fabric = fabrics.get(way.scheme)
            if fabric is None:
                beyond.append(f"{way.reach} ({self._lacks[way.scheme]})")
                continue
            there = f"{way.scheme}://{way.at(place)}"
            accepts = way is not TRANSPORT_CHOICES[0]
            try:
                if isinstance(fabric, VerbsFabric):
                    begun, accepts = monotonic(), False
                    self._try_out(fabric, there, terms, (deadline - begun) / 2)
                    accepts, deadline = True, deadline + monotonic() - begun  # a trial's time does not count
                channel = fabric.connect(there, terms, timeout_s=max(0.0, deadline - monotonic()))
            except ChannelError as error:
                if isinstance(error, ChannelTimeout) and not accepts:
                    raise  # the listener is there, but does not accept
                beyond.append(f"{way.reach} ({error})")
                last = error
                continue
            self._say(url, way, beyond)
            return channel
        raise type(last)(f"{url}: {_not_within(beyond)}") from last

    def close(self) -> None:
        with ExitStack() as parts:
            for fabric in (self._tcp, *self.rdma.values(), self._shm):
                parts.callback(fabric.close)

    def _try_out(self, fabric: VerbsFabric, url: str, terms: Terms, timeout_s: float) -> None:
        """Raises ChannelError if messages to ``url`` and back do not pass, or recently did not; ChannelTimeout if the
        listener does not accept within ``timeout_s``.
        """
        until, why = self._tried.get(url, (0.0, ""))
        if monotonic() >= until:
            why = fabric.self_test(url, terms, timeout_s=max(0.0, timeout_s))
            self._tried[url] = monotonic() + RETRY_S, why
        if why:
            raise ChannelError(f"a trial failed: {why}")

    def _say(self, url: str, way: TransportChoice, beyond: list[str]) -> None:
        because = "; ".join(filter(None, (_not_within(beyond), way.because)))
        self.reason = f"{url}: {way.scheme}, for {because}"
        log.info("%s", self.reason)


def _not_within(beyond: list[str]) -> str:
    return f"the listener is not within reach of {', nor of '.join(beyond)}" if beyond else ""


def _named(text: str) -> str:
    """Return the named RDMA device. Raises ImportError if none is named."""
    device = rdma_device(text)
    if not device:
        raise ImportError(f"{NAMED_BY} names no device here")
    return device


def _verbs(key: bytes, device: str) -> VerbsFabric:
    return VerbsFabric(key, device=_named(device))


def _mlx5(key: bytes, gpu: int | None, device: str) -> VerbsFabric:
    if gpu is None:
        raise ImportError("no GPU computes here")
    named = _named(device)
    from .mlx5.mlx5 import open_fabric

    return open_fabric(key, gpu=gpu, device=named)


def open_fabric(key: bytes, *, gpu: int | None = None, device: str = "") -> Fabric:
    return AutoFabric(key, gpu, device)
