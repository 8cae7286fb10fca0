"""Makes another transport slower: ``emulate+OTHER?latency_ms=0.05&gbps=100`` behaves as ``OTHER`` over such a link.

Each message carries, after its payload, the time at which the receiver may see it; the receiver sleeps until then. So
only the two ends run, and a sender continues at once, as it does when a network card sends for it. Both ends must be on
one host, whose monotonic clock they share. Free slots come back without delay.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, fields, replace
from time import monotonic, monotonic_ns
from urllib.parse import parse_qsl

from .contract.base import BaseChannel, BaseFabric
from .contract.channel_terms import DEFAULT_LISTEN_TERMS, Geometry, ListenTerms, Terms
from .contract.fabric import (
    CONNECT_S,
    Arrival,
    Channel,
    ChannelError,
    ChannelTimeout,
    Fabric,
    Listener,
    PeerFault,
    Slot,
)
from .schemes import open as open_transport

TRAILER_BYTES = 8  # nanoseconds of the monotonic clock, little-endian
NS_OF_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """The emulated link that an end sends through; each end has its own. Zeros: no delay and no limit."""

    latency_ms: float = 0.0
    jitter_ms: float = 0.0  # each message takes up to so much longer; they keep their order
    seed: int = 0  # of the jitter
    gbps: float = 0.0  # 10^9 bits of payload a second, one message after the other; 0 = no limit
    stall_ms: float = 0.0  # a pause of all messages ...
    stall_every: int = 0  # ... before each message whose number is a multiple of this

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < float("inf"):
                raise ValueError(f"emulate: {f.name} must be a number of at least 0, not {getattr(self, f.name)}")

    @staticmethod
    def parse(query: str) -> EmulatedLink:
        """Parse ``name=number&...``, by the names of the fields. Raises ValueError."""
        known = {f.name: int if f.type == "int" else float for f in fields(EmulatedLink)}
        values = dict(parse_qsl(query, keep_blank_values=True))
        for name, text in values.items():
            if name not in known:
                raise ValueError(f"emulate: unknown option {name!r}; choose from {', '.join(known)}")
            try:
                known[name](text)
            except ValueError:
                raise ValueError(f"emulate: {name} must be a number, not {text!r}") from None
        return EmulatedLink(**{name: known[name](text) for name, text in values.items()})  # type: ignore[arg-type]


class EmulatedWire:
    """One direction of a link: when a message becomes visible. A pure function of sizes and times."""

    def __init__(self, link: EmulatedLink, seed: int = 0) -> None:
        self._link = link
        self._jitter = random.Random(2 * link.seed + seed)
        self._free_ns = 0  # when the last byte of the messages so far has left
        self._last_ns = 0
        self._count = 0

    def due_ns(self, now_ns: int, nbytes: int) -> int:
        """Return when a message of ``nbytes`` that is sent now becomes visible; never before earlier messages."""
        link = self._link
        self._count += 1
        took = 8.0 * nbytes / link.gbps if link.gbps else 0.0
        if link.stall_every and self._count % link.stall_every == 0:
            took += link.stall_ms * NS_OF_MS
        self._free_ns = max(now_ns, self._free_ns) + round(took)
        way = (link.latency_ms + self._jitter.random() * link.jitter_ms) * NS_OF_MS
        self._last_ns = max(self._last_ns, self._free_ns + round(way))
        return self._last_ns


class EmulatedChannel(BaseChannel):
    """The channel of another transport, with an EmulatedWire for the messages that this end sends."""

    def __init__(self, inner: Channel, wire: EmulatedWire) -> None:
        out, into = _without_trailer(inner.outbound), _without_trailer(inner.inbound)
        super().__init__(inner.peer, inner.epoch, out, into, inner.peer_name)
        self._inner = inner
        self._wire = wire
        self._slots: deque[Slot] = deque()  # granted slots of the other transport
        self._held: deque[Arrival] = deque()  # unreleased arrivals of the other transport
        self._next: tuple[Arrival, int] | None = None  # the last one held, not visible before that time
        self._over = threading.Event()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)
        self._over.set()

    def close(self) -> None:
        self._inner.close()
        self._over.set()

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        slot = self._inner.reserve(nbytes + TRAILER_BYTES, timeout_s=timeout_s)
        self._slots.append(slot)
        return slot.index, slot.data[:nbytes]

    def _publish(self, slot: Slot, tag: bytes) -> int:
        inner, nbytes = self._slots[0], slot.data.nbytes
        if not self._over.is_set():  # views are invalid after the channel's end; the other transport reports it
            inner.data[nbytes:] = self._wire.due_ns(monotonic_ns(), nbytes).to_bytes(TRAILER_BYTES, "little")
        seqno = self._inner.put_signal(inner, tag)
        self._slots.popleft()
        return seqno

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        deadline = monotonic() + timeout_s
        arrival, due_ns = self._next = self._next or self._receive(timeout_s)
        wait_s = (due_ns - monotonic_ns()) / 1e9
        if wait_s > 0.0:
            self._over.wait(min(wait_s, max(0.0, deadline - monotonic())))
        if self._over.is_set():
            self._inner.wait_signal(timeout_s=0.0)  # raises
        if due_ns > monotonic_ns():
            raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
        self._next = None
        return arrival.seqno, arrival.tag, arrival.data[:-TRAILER_BYTES]

    def _receive(self, timeout_s: float) -> tuple[Arrival, int]:
        arrival = self._inner.wait_signal(timeout_s=timeout_s)
        if arrival.data.nbytes < TRAILER_BYTES:
            self.abort("a message without its time")
            raise PeerFault(f"{self.peer}: wait_signal: a message without its time: the peer does not emulate")
        self._held.append(arrival)
        return arrival, int.from_bytes(arrival.data[-TRAILER_BYTES:], "little")

    def _give_back(self) -> None:
        self._inner.release(self._held.popleft())


class EmulatedListener:
    """The listener of another transport."""

    def __init__(self, fabric: EmulatedFabric, inner: Listener) -> None:
        self.url = fabric.outer(inner.url)
        self._fabric = fabric
        self._inner = inner

    def accept(self, *, timeout_s: float) -> Channel:
        return self._fabric.wrap(self._inner.accept(timeout_s=timeout_s), 1)

    def close(self) -> None:
        self._inner.close()


class EmulatedFabric(BaseFabric):
    """``inner``, with ``link`` for all messages that this process sends."""

    def __init__(self, key: bytes, inner: Fabric, link: EmulatedLink) -> None:
        super().__init__(key)
        self.scheme = f"emulate+{inner.scheme}"
        self.in_process = inner.in_process
        self._inner = inner
        self._link = link

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> EmulatedListener:
        listener = EmulatedListener(self, self._inner.listen(address, _ListenTermsWithTrailer(**vars(reception))))
        self._opened.add(listener)
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        place = f"{self._inner.scheme}://{self._address(url)}"
        longer = replace(terms, outbound=_with_trailer(terms.outbound), inbound=_with_trailer(terms.inbound))
        try:
            return self.wrap(self._inner.connect(place, longer, timeout_s=timeout_s), 0)
        except ChannelError as error:
            raise type(error)(f"{url}: {error}") from error

    def close(self) -> None:
        super().close()
        self._inner.close()

    def wrap(self, channel: Channel, side: int) -> Channel:
        """Return an emulated ``channel``. ``side``: 0 connected, 1 was accepted; their jitter differs."""
        emulated = EmulatedChannel(channel, EmulatedWire(self._link, side))
        self._opened.add(emulated)
        return emulated

    def outer(self, url: str) -> str:
        """Return the URL under which peers find the listener of the other transport at ``url``."""
        return f"{self.scheme}://{url.partition('://')[2]}"


class _ListenTermsWithTrailer(ListenTerms):
    """Limits of the inboxes that the callers use, which have no trailers."""

    def exceeded_limit(self, terms: Terms, channels: int) -> str:
        shorter = replace(terms, outbound=_without_trailer(terms.outbound), inbound=_without_trailer(terms.inbound))
        return super().exceeded_limit(shorter, channels)


def _with_trailer(geometry: Geometry) -> Geometry:
    return Geometry(slots=geometry.slots, slot_bytes=geometry.slot_bytes + TRAILER_BYTES)


def _without_trailer(geometry: Geometry) -> Geometry:
    return Geometry(slots=geometry.slots, slot_bytes=geometry.slot_bytes - TRAILER_BYTES)


def open_fabric(key: bytes, other: str = "shm", *, device: str = "") -> Fabric:
    """Open the transport. ``other``: the transport to wrap, and after ``?`` the fields of EmulatedLink; ``device``: for
    that one. Raises ValueError for other options.
    """
    scheme, _, query = other.partition("?")
    link = EmulatedLink.parse(query)
    return EmulatedFabric(key, open_transport(scheme, key=key, device=device), link)
