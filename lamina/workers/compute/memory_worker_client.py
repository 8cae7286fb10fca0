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
    """A memory worker refused a Bind or a step; its reason is the text."""


class MissingKvError(ChannelError):
    """A peer lives, and has not what the driver thinks that it has."""


def next_of_epoch(channel: Channel, epoch: int, timeout_s: float) -> Arrival:
    """The next message that is not of an older epoch; those are dropped. Raises ChannelError."""
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
        """``worker``: by the partition; ``number``: among all memory workers, where that is another."""
        self.channel = channel
        self.worker = worker
        self.number = worker if number is None else number
        self.timeout_s = timeout_s
        self.trace = trace

    def bind(self, bind: BindRequest) -> BindReply:
        """Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.BIND), encode(bind))

    def join(self, join: JoinRequest) -> BindReply:
        """Raises RefusedError with the worker's reason."""
        return self._request(MessageKey(MessageKind.JOIN), encode(join))

    def set_device_path(self, direct: DevicePathRequest) -> BindReply:
        """Tell the memory worker whether kernels use the channel of the Bind. Raises RefusedError with its reason."""
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
        """The next message, one without data; None if there is none in time. Raises RefusedError, ChannelError."""
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
        """``send``, as part of a step."""
        start = self.trace.now()
        self.send(key, data)
        self.trace.add(Event.SEND_PLAN, start, key, -1, self.number, len(data))

    def send_tensors(self, key: MessageKey, nbytes: int, parts: Sequence[tuple[Tensor, TensorSpan]]) -> None:
        """Write tensors straight into the peer's inbox, to their parts of the message; they may be strided."""
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
        """Wait for the O that ``key`` names, and hand its bytes over. Raises RefusedError, ProtocolError."""
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
