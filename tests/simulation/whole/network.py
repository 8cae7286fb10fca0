"""The network of simulated processes: channels of loopback on the virtual clock, and control links. A message takes a
while, and stays after the messages before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from lamina.netstack import Geometry, PeerFault, Terms
from lamina.netstack.contract.fabric import Slot
from lamina.netstack.host.loopback_host import LoopbackChannel, LoopbackFabric, LoopbackLink
from lamina.protocol.control import LinkClosedError

from .baton import Baton, BatonCondition

if TYPE_CHECKING:
    from .process import SimDriver, SimProcess

GONE = "the peer's process is gone"
_ENCODER = msgspec.msgpack.Encoder()


class SimFabric(LoopbackFabric):
    """The fabric of one process. Its channels end with that."""

    def __init__(self, key: bytes, baton: Baton, delay_s: Callable[[], float], process: SimProcess | None) -> None:
        """``delay_s`` of a message is drawn as it is sent. ``process``: None = one that is never killed."""
        super().__init__(key, condition=lambda: BatonCondition(baton), clock=baton.clock)
        self._delay_s, self.process = delay_s, process

    def _link(self, outbound: Geometry, inbound: Geometry, gpu: int | None) -> SimLink:
        return SimLink(outbound, inbound, gpu, self.condition())

    def _make(self, link: LoopbackLink, side: int, peer: str, terms: Terms) -> LoopbackChannel:
        channel = SimChannel(link, side, peer, terms, self._clock)
        channel.draw_delay_s, channel.process = self._delay_s, self.process
        return channel

    def die(self) -> None:
        """All channels end without a message, and nothing listens any more."""
        for opened in list(self._opened):
            if isinstance(opened, SimChannel):
                opened.die()
            else:
                opened.close()


class SimLink(LoopbackLink):
    """May be cut, while both ends live."""

    is_cut = False


class SimChannel(LoopbackChannel):
    """At each call of it something may happen to its process, or to itself."""

    _link: SimLink
    draw_delay_s: Callable[[], float]
    process: SimProcess | None

    def die(self) -> None:
        """Ends all as if the process were gone."""
        self._end(GONE)

    def delay_s(self) -> float:
        return self.draw_delay_s()

    def _publish(self, slot: Slot, tag: bytes) -> int:
        self._act()
        seqno = super()._publish(slot, tag)
        self._act()
        return seqno

    def cut(self) -> None:
        """Both ends notice, and both processes live."""
        with self._changed:
            self._link.is_cut = True
            self._changed.notify_all()

    def _check(self, operation: str) -> None:
        super()._check(operation)
        if self._link.is_cut:
            raise PeerFault(f"{self.peer}: {operation}: the connection was cut")

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        arrival = super()._take(timeout_s)
        self._act()
        return arrival

    def _act(self) -> None:
        if self.process is not None:
            self.process.act(self)


class SimPipe:
    """One direction of a control link."""

    def __init__(self, baton: Baton, delay_s: Callable[[], float]) -> None:
        self._baton, self._delay_s = baton, delay_s
        self._last = 0.0  # when the newest message comes
        self.came = deque[bytes]()
        self.ended = False  # nothing more will come

    def put(self, data: bytes | None) -> None:
        """A message, which comes later; None: the end."""
        clock = self._baton.clock
        self._last = max(self._last, clock.now + self._delay_s())
        clock.later(self._last - clock.now, lambda: self._come(data))

    def _come(self, data: bytes | None) -> None:
        if data is None:
            self.ended = True
        else:
            self.came.append(data)


class SimControl:
    """One end of a control link; see ControlLink."""

    def __init__(
        self, baton: Baton, messages: Any, ways: tuple[SimPipe, SimPipe], process: SimProcess | SimDriver
    ) -> None:
        """``messages``: those that it takes. ``ways``: to here, and to the other end. ``process``: which has it."""
        self._baton, self.process = baton, process
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._in, self._out = ways
        self.closed = False

    @property
    def ready(self) -> bool:
        """Returns whether ``recv`` would return at once, or raise."""
        return bool(self._in.came or self._in.ended or self.closed)

    def limit_sends(self, seconds: float) -> None:
        """A message is always taken."""

    def send(self, message: Any) -> None:
        """Raises LinkClosedError."""
        self._act()
        if self.closed or self._in.ended:
            raise LinkClosedError("control link: the other end is gone")
        self._out.put(_ENCODER.encode(message))
        self.process.passed(message)
        self._act()

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises TimeoutError, LinkClosedError."""
        if not self._baton.wait(lambda: self.ready, timeout_s):
            raise TimeoutError("control link: no message in time")
        if self._in.came and not self.closed:
            self._act()
            message = self._decoder.decode(self._in.came.popleft())
            self.process.passed(message)
            return message
        raise LinkClosedError("control link: the other end is gone")

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.closed = True
            self._out.put(None)

    def _act(self) -> None:
        self.process.act()
