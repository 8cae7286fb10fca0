"""The compute worker's channel to one memory worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lamina.buffers import part_of, tensor_over
from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout
from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.codec import Part
from lamina.protocol.plan import (
    Bind,
    Bound,
    Direct,
    Join,
    Key,
    Kind,
    ProtocolError,
    decode_bound,
    encode,
)


class RefusedError(Exception):
    """A memory worker refused a Bind or a step; its reason is the text."""


class LacksError(ChannelError):
    """A peer lives, and has not what the driver thinks that it has."""


def next_of_view(channel: Channel, view: int, timeout_s: float) -> Arrival:
    """The next message that is not of an older view; those are dropped. Raises ChannelError."""
    while True:
        arrival = channel.wait_signal(timeout_s=timeout_s)
        if Key.unpack(arrival.tag).view >= view:
            return arrival
        channel.release(arrival)


class MemoryLink:
    """The channel to one memory worker, and the messages that go over it."""

    def __init__(
        self, channel: Channel, worker: int, timeout_s: float, trace: Recorder = OFF, number: int | None = None
    ) -> None:
        """``worker``: by the partition; ``number``: among all memory workers, where that is another."""
        self.channel = channel
        self.worker = worker
        self.number = worker if number is None else number
        self.timeout_s = timeout_s
        self.trace = trace

    def bind(self, bind: Bind) -> Bound:
        """Raises RefusedError with the worker's reason."""
        return self._ask(Key(Kind.BIND), encode(bind))

    def join(self, join: Join) -> Bound:
        """Raises RefusedError with the worker's reason."""
        return self._ask(Key(Kind.JOIN), encode(join))

    def direct(self, direct: Direct) -> Bound:
        """Tell the memory worker whether kernels use the channel of the Bind. Raises RefusedError with its reason."""
        return self._ask(Key(Kind.DIRECT), encode(direct))

    def _ask(self, key: Key, data: bytes) -> Bound:
        self.send(key, data)
        arrival = self.channel.wait_signal(timeout_s=self.timeout_s)
        got, data = Key.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if got.kind == Kind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return decode_bound(data)

    def poll(self, timeout_s: float) -> Key | None:
        """The next message, one without data; None if there is none in time. Raises RefusedError, ChannelError."""
        try:
            arrival = self.channel.wait_signal(timeout_s=timeout_s)
        except ChannelTimeout:
            return None
        key, data = Key.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if key.kind == Kind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return key

    def send(self, key: Key, data: bytes) -> None:
        """Copy ``data`` into the peer's inbox."""
        slot = self.channel.reserve(len(data), timeout_s=self.timeout_s)
        slot.data[:] = data
        self.channel.put_signal(slot, key.pack())

    def send_plan(self, key: Key, data: bytes) -> None:
        """``send``, as part of a step."""
        start = self.trace.now()
        self.send(key, data)
        self.trace.add(Event.SEND_PLAN, start, key, -1, self.number, len(data))

    def send_tensors(self, key: Key, nbytes: int, parts: Sequence[tuple[Tensor, Part]]) -> None:
        """Write tensors straight into the peer's inbox, to their parts of the message; they may be strided."""
        start = self.trace.now()
        slot = self.channel.reserve(nbytes, timeout_s=self.timeout_s)
        self.trace.add(Event.RESERVE, start, key, key.layer, self.number)
        flat = tensor_over(slot.data, parts[0][0].dtype)
        for tensor, part in parts:
            part_of(flat, *part).copy_(tensor)
        self.channel.put_signal(slot, key.pack())
        event = Event.SEND_Q if key.kind == Kind.Q else Event.SEND_KV
        self.trace.add(event, start, key, key.layer, self.number, nbytes)

    def receive(self, key: Key, take: Callable[[memoryview], None], nbytes: int) -> None:
        """Wait for the O that ``key`` names, and hand its bytes over. Raises RefusedError, ProtocolError."""
        start = self.trace.now()
        arrival = next_of_view(self.channel, key.view, self.timeout_s)
        came = self.trace.add(Event.WAIT_O, start, key, key.layer, self.number)
        try:
            got = Key.unpack(arrival.tag)
            if got.kind == Kind.REFUSED:
                raise RefusedError(bytes(arrival.data).decode(errors="replace"))
            if got != key or arrival.data.nbytes != nbytes:
                raise ProtocolError(f"memory worker {self.number}: {got} of {arrival.data.nbytes} B in place of {key}")
            take(arrival.data)
            self.trace.add(Event.RECEIVE_O, came, key, key.layer, self.number, nbytes)
        finally:
            self.channel.release(arrival)
