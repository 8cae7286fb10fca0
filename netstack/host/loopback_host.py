"""Channels of ``loopback`` in the memory of one process. They keep the whole contract, views of one inbox included."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from mmap import mmap
from time import monotonic
from weakref import WeakSet, WeakValueDictionary

from lamina.netstack.bootstrap.handshake import REFUSALS
from lamina.netstack.contract.base import BaseChannel, BaseFabric, one_line
from lamina.netstack.contract.channel_terms import DEFAULT_LISTEN_TERMS, EPOCH_SHIFT, Geometry, ListenTerms, Terms
from lamina.netstack.contract.fabric import (
    CONNECT_S,
    TAG_BYTES,
    ChannelAborted,
    ChannelError,
    ChannelTimeout,
    HandshakeError,
    NoResource,
    PeerFault,
    Slot,
)

_NETWORK: WeakValueDictionary[str, LoopbackListener] = WeakValueDictionary()  # listeners by name; they own themselves


class _Inbox:
    """One direction: slots and their contents. Guarded by the link's condition."""

    def __init__(self, geometry: Geometry) -> None:
        self.slots = geometry.slots
        self._stride = (geometry.slot_bytes + 63) // 64 * 64
        self._memory = memoryview(mmap(-1, self.slots * self._stride))  # untouched pages cost nothing
        self.granted = self.published = self.released = 0
        self.waiting: deque[tuple[float, int, bytes, memoryview]] = deque()  # (visible from, seqno, tag, data)

    def view(self, index: int, nbytes: int) -> memoryview:
        return self._memory[index * self._stride :][:nbytes]


class LoopbackLink:
    """The shared state of both ends. ``gpu``: the one that both compute on; None = there is none."""

    def __init__(
        self, outbound: Geometry, inbound: Geometry, gpu: int | None, changed: threading.Condition | None = None
    ) -> None:
        self.changed = changed or threading.Condition()
        self.inboxes = (_Inbox(outbound), _Inbox(inbound))  # filled by the connector, by the listening side
        self.ends: list[str | None] = [None, None]  # why the connector, the listening side left
        self.gpu = gpu


class LoopbackChannel(BaseChannel):
    def __init__(
        self,
        link: LoopbackLink,
        side: int,
        peer: str,
        terms: Terms,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        geometries = (terms.outbound, terms.inbound)
        far = terms.peer_name(listening=side == 1)
        super().__init__(peer, terms.epoch, geometries[side], geometries[1 - side], far)
        self._link = link
        self._changed = link.changed
        self._side = side
        self._out = link.inboxes[side]
        self._in = link.inboxes[1 - side]
        self._clock = clock

    def abort(self, reason: str) -> None:
        self._end(f"the peer aborted: {one_line(reason)}")

    def close(self) -> None:
        self._end("the peer closed the channel")

    def delay_s(self) -> float:
        """Return how long the next message is on its way; a simulation has its own."""
        return 0.0

    def _end(self, why: str) -> None:
        with self._changed:
            if self._link.ends[self._side] is None:
                self._link.ends[self._side] = why
            self._changed.notify_all()

    def _check(self, operation: str) -> None:
        if self._link.ends[self._side] is not None:
            raise ChannelAborted(f"{self.peer}: {operation}: the channel was aborted or closed on this side")

    def _check_peer(self, operation: str) -> None:
        why = self._link.ends[1 - self._side]
        if why is not None:
            raise PeerFault(f"{self.peer}: {operation}: {why}")

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        out = self._out

        def ready() -> bool:
            self._check("reserve")
            self._check_peer("reserve")
            return out.granted - out.released < out.slots

        with self._changed:
            if not self._changed.wait_for(ready, max(0.0, timeout_s)):
                raise NoResource(f"{self.peer}: reserve: none of {out.slots} slots became free within {timeout_s:g} s")
            index = out.granted % out.slots
            out.granted += 1
            return index, out.view(index, nbytes)

    def _publish(self, slot: Slot, tag: bytes) -> int:
        out = self._out
        with self._changed:
            self._check("put_signal")
            self._check_peer("put_signal")
            data = out.view(slot.index, slot.data.nbytes)
            out.published += 1
            seqno = (self.epoch << EPOCH_SHIFT) + out.published
            visible_from = self._clock() + self.delay_s()
            out.waiting.append((visible_from, seqno, tag.ljust(TAG_BYTES, b"\0"), data.toreadonly()))
            self._changed.notify_all()
            return seqno

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        waiting = self._in.waiting
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._check("wait_signal")
                now = self._clock()
                if waiting and waiting[0][0] <= now:
                    _, seqno, tag, data = waiting.popleft()
                    return seqno, tag, data
                if not waiting:
                    self._check_peer("wait_signal")
                if now >= deadline:
                    raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
                self._changed.wait(min(deadline, waiting[0][0] if waiting else deadline) - now)

    def _give_back(self) -> None:
        with self._changed:
            self._in.released += 1
            self._changed.notify_all()


class LoopbackListener:
    def __init__(self, place: str, key: bytes, fabric: LoopbackFabric, reception: ListenTerms) -> None:
        self.url = f"loopback://{place}"
        self.gpu = fabric.gpu
        self._place, self._reception = place, reception
        self._accepted: WeakSet[LoopbackChannel] = WeakSet()  # those that are still in use count for the limit
        self._key = key
        self._fabric = fabric
        self._changed = fabric.condition()
        self._callers: deque[tuple[LoopbackLink, Terms]] = deque()
        self._refusal = ""
        self._closed = False

    def accept(self, *, timeout_s: float) -> LoopbackChannel:
        with self._changed:
            if not self._changed.wait_for(lambda: self._callers or self._closed, max(0.0, timeout_s)):
                raise ChannelTimeout(f"{self.url}: accept: no peer came in time{self._refusal}")
            if self._closed:
                raise ChannelAborted(f"{self.url}: accept: the listener was closed")
            link, terms = self._callers.popleft()
            channel = self._fabric.channel(link, 1, f"{self.url} (connector)", terms)
            self._accepted.add(channel)
            self._changed.notify_all()
            return channel

    def call(self, key: bytes, make: Callable[[], LoopbackLink], terms: Terms, timeout_s: float) -> LoopbackLink:
        """Connect; returns once accepted. ``make`` allocates the inboxes."""
        with self._changed:
            if why := self._objection(key, terms):
                self._refusal = f"; the last one was refused: {why}"
                raise HandshakeError(f"{self.url}: connect: {why}")
            link = make()
            caller = (link, terms)
            self._callers.append(caller)
            self._changed.notify_all()
            try:
                accepted = self._changed.wait_for(
                    lambda: self._closed or caller not in self._callers, max(0.0, timeout_s)
                )
            finally:
                if waits := caller in self._callers:
                    self._callers.remove(caller)
            if waits:
                error = ChannelTimeout if not accepted else ChannelError
                raise error(
                    f"{self.url}: connect: the listener {'was closed' if accepted else 'did not accept in time'}"
                )
        return link

    def _objection(self, key: bytes, terms: Terms) -> str:
        if not hmac.compare_digest(key, self._key):
            return "the keys differ"
        channels = len(self._accepted) + len(self._callers)
        reason = "name" if terms.peer != self._reception.name else self._reception.exceeded_limit(terms, channels)
        return REFUSALS[reason].format(terms=terms) if reason else ""

    def close(self) -> None:
        _NETWORK.pop(self._place, None)
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class LoopbackFabric(BaseFabric):
    scheme = "loopback"
    in_process = True
    gpu: int | None = None

    def __init__(
        self,
        key: bytes,
        *,
        condition: Callable[[], threading.Condition] = threading.Condition,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``condition``, ``clock``: used for waits; a simulation has its own."""
        super().__init__(key)
        self.condition, self._clock = condition, clock

    def channel(self, link: LoopbackLink, side: int, peer: str, terms: Terms) -> LoopbackChannel:
        """Return an end of ``link``, which this fabric closes. ``side``: 0 connected, 1 was accepted."""
        channel = self._make(link, side, peer, terms)
        self._opened.add(channel)
        return channel

    def _link(self, outbound: Geometry, inbound: Geometry, gpu: int | None) -> LoopbackLink:
        return LoopbackLink(outbound, inbound, gpu, self.condition())

    def _make(self, link: LoopbackLink, side: int, peer: str, terms: Terms) -> LoopbackChannel:
        return LoopbackChannel(link, side, peer, terms, self._clock)

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> LoopbackListener:
        place = address or secrets.token_hex(8)
        listener = LoopbackListener(place, self._key, self, reception)
        if _NETWORK.setdefault(place, listener) is not listener:
            raise ChannelError(f"cannot listen at {listener.url}: the name is in use; choose another name")
        self._opened.add(listener)
        return listener

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> LoopbackChannel:
        listener = _NETWORK.get(self._address(url))
        if listener is None:
            raise ChannelError(f"{url}: connect: there is no such listener in this process")
        gpu = self.gpu if self.gpu == listener.gpu else None
        link = listener.call(
            terms.key or self._key, partial(self._link, terms.outbound, terms.inbound, gpu), terms, timeout_s
        )
        return self.channel(link, 0, url, terms)
