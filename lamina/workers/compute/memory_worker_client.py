"""The compute worker's channel to one memory worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.codec import TensorSpan
from lamina.protocol.step_plan import (
    BindReply,
    BindRequest,
    DevicePathRequest,
    JoinRequest,
    MessageKey,
    MessageKind,
    ProtocolError,
    decode_bind_reply,
    encode,
)
from lamina.utils.tensor_buffers import part_of, tensor_over


class RefusedError(Exception):
    """A memory worker refused a Bind or a step; the text is its reason."""


class MissingKvError(ChannelError):
    """A peer is alive, but lacks KV that the driver expects there."""


def next_of_epoch(channel: Channel, epoch: int, timeout_s: float) -> Arrival:
    """Return the next message, dropping those of older epochs. Raises ChannelError."""
    while True:
        arrival = channel.wait_signal(timeout_s=timeout_s)
        if MessageKey.unpack(arrival.tag).epoch >= epoch:
            return arrival
        channel.release(arrival)


class MemoryWorkerClient:
    """The channel to one memory worker, and the messages that go over it."""

    def __init__(
        self,
        channel: Channel,
        worker: int,
        timeout_s: float,
        trace: Recorder = NULL_RECORDER,
        number: int | None = None,
    ) -> None:
        """``worker``: its number in the partition. ``number``: its number among all memory workers, if that differs."""
        self.channel = channel
        self.worker = worker
        self.number = worker if number is None else number
        self.timeout_s = timeout_s
        self.trace = trace

    def bind(self, bind: BindRequest) -> BindReply:
        """Send a Bind and return the reply. Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.BIND), encode(bind))

    def join(self, join: JoinRequest) -> BindReply:
        """Send a join and return the reply. Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.JOIN), encode(join))

    def set_device_path(self, direct: DevicePathRequest) -> BindReply:
        """Notify the memory worker if kernels use the channel of the Bind. Raises RefusedError with its reason."""
        return self._request(MessageKey(MessageKind.DIRECT), encode(direct))

    def _request(self, key: MessageKey, data: bytes) -> BindReply:
        self.send(key, data)
        arrival = self.channel.wait_signal(timeout_s=self.timeout_s)
        got, data = MessageKey.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if got.kind == MessageKind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return decode_bind_reply(data)

    def poll(self, timeout_s: float) -> MessageKey | None:
        """Return the key of the next message, whose data is dropped; None if none arrives in time. Raises RefusedError,
        ChannelError.
        """
        try:
            arrival = self.channel.wait_signal(timeout_s=timeout_s)
        except ChannelTimeout:
            return None
        key, data = MessageKey.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if key.kind == MessageKind.REFUSED:
            raise RefusedError(data.decode(errors="replace"))
        return key

    def send(self, key: MessageKey, data: bytes) -> None:
        """Copy ``data`` into the peer's inbox."""
        slot = self.channel.reserve(len(data), timeout_s=self.timeout_s)
        slot.data[:] = data
        self.channel.put_signal(slot, key.pack())

    def send_plan(self, key: MessageKey, data: bytes) -> None:
        """Send a plan, and record the time as a part of its step."""
        start = self.trace.now()
        self.send(key, data)
        self.trace.add(Event.SEND_PLAN, start, key, -1, self.number, len(data))

    def send_tensors(self, key: MessageKey, nbytes: int, parts: Sequence[tuple[Tensor, TensorSpan]]) -> None:
        """Write tensors directly into the peer's inbox, at their places in the message; they may be strided."""
        start = self.trace.now()
        slot = self.channel.reserve(nbytes, timeout_s=self.timeout_s)
        self.trace.add(Event.RESERVE, start, key, key.layer, self.number)
        flat = tensor_over(slot.data, parts[0][0].dtype)
        for tensor, part in parts:
            part_of(flat, *part).copy_(tensor)
        self.channel.put_signal(slot, key.pack())
        event = Event.SEND_Q if key.kind == MessageKind.Q else Event.SEND_KV
        self.trace.add(event, start, key, key.layer, self.number, nbytes)

    def receive(self, key: MessageKey, consume: Callable[[memoryview], None], nbytes: int) -> None:
        """Wait for the O that ``key`` names, and pass its bytes to ``consume``. Raises RefusedError, ProtocolError."""
        start = self.trace.now()
        arrival = next_of_epoch(self.channel, key.epoch, self.timeout_s)
        came = self.trace.add(Event.WAIT_O, start, key, key.layer, self.number)
        try:
            got = MessageKey.unpack(arrival.tag)
            if got.kind == MessageKind.REFUSED:
                raise RefusedError(bytes(arrival.data).decode(errors="replace"))
            if got != key or arrival.data.nbytes != nbytes:
                raise ProtocolError(f"memory worker {self.number}: {got} of {arrival.data.nbytes} B in place of {key}")
            consume(arrival.data)
            self.trace.add(Event.RECEIVE_O, came, key, key.layer, self.number, nbytes)
        finally:
            self.channel.release(arrival)
