"""Layer messages from device to device: kernels on a worker's own stream send Q, K, V and O, and wait for them.

A plan determines all messages of a step, so each host queues a step's kernels on its device ahead of time. A host waits
for no message. If a transport is not ``recordable``, it waits at most until the peer's host has queued its kernel.

Hosts do two things. They copy the lengths and tags of a step's messages to the device, for kernels to read. So a graph
of a slice serves any step, and a message has the step's rows, not the graph's. Once in a step they check what kernels
have noted. A kernel that receives another message than the expected one fails, and all later ones on its channel do
nothing. Results computed from then on are never sent.

Plans, and all messages that belong to no layer, remain messages of the hosts, on their usual channel. Timelines do not
show messages of kernels, as no host sees them.

HARDWARE-UNVERIFIED: run with a device, a driver and graphs that a CPU stands in for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from lamina.netstack import Channel, DeviceChannel, DeviceSide
from lamina.netstack.contract.fabric import TAG_BYTES
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError
from lamina.utils.tensor_buffers import bytes_of

from .staging import DeviceStaging, Queue, Staging

_LINE = struct.Struct(f"<2Q{TAG_BYTES}s")  # a message's one or two lengths in bytes, and its tag
TAG_AT = 16
DESCRIPTOR_WORDS = _LINE.size // 8
# Length and tag of the message that arrived, then of the expected one.
_NOTE = struct.Struct(f"<Q{TAG_BYTES}sQ{TAG_BYTES}s")
# Sent on the lane for bulk messages: a Q, on which an O waits, must not queue after them.
BULK_KINDS = (MessageKind.KV,)


def can_use_device_path(channel: Channel, staging: Staging) -> bool:
    """Return whether kernels on the worker's device can use ``channel``."""
    queue = _queue(staging)
    return queue is not None and isinstance(channel, DeviceChannel) and channel.gpu == queue.gpu


class DeviceTransport:
    """The layer messages of one channel, for one thread of a worker. Opened only if ``can_use_device_path`` allows
    it.
    """

    def __init__(self, channel: Channel, staging: Staging, wait_s: float) -> None:
        """``wait_s``: the longest time that a kernel waits for a message or a slot. The device owns the channel from
        now on.
        """
        queue = _queue(staging)
        if not isinstance(staging, DeviceStaging) or not isinstance(channel, DeviceChannel) or queue is None:
            raise ValueError(f"{channel.peer}: kernels on {staging.device} cannot use this channel")
        self.channel = channel
        self._staging, self.device_side, self._stream = staging, channel.hand_to_device(), queue.stream
        self.recordable = self.device_side.recordable  # if its messages may be parts of graphs
        self._wait_ns = int(wait_s * 1e9)
        self._notes = torch.zeros(1 + _NOTE.size // 8, dtype=torch.int64, device=staging.device)  # status, then a note

    def send(self, kind: MessageKind, line: Tensor, first: Tensor, second: Tensor | None = None) -> None:
        """Send contiguous tensors: as many bytes as the descriptor ``line``, which is on the device, says."""
        at, lane, most = line.data_ptr(), self._lane(kind), first.nbytes + (0 if second is None else second.nbytes)
        rest = at, at + TAG_AT, self._wait_ns, self._notes.data_ptr(), most
        if second is None:
            lane.send(self._stream, first.data_ptr(), *rest)
        else:
            lane.send_two(self._stream, first.data_ptr(), second.data_ptr(), *rest)

    def receive(self, kind: MessageKind, line: Tensor, target: Tensor) -> None:
        """Receive the next message of that kind's lane into ``target``, which is contiguous and as long as the message.
        It must be the message of the descriptor ``line``.
        """
        at, status = line.data_ptr(), self._notes.data_ptr()
        rest = at, at + TAG_AT, status + 8, self._wait_ns, status, target.nbytes
        self._lane(kind).receive_due(self._stream, target.data_ptr(), *rest)

    def share(self, kind: MessageKind, line: Tensor, spans: Sequence[range]) -> bytes:
        """Return the entry of a table of shares for the message of that kind: of each row of a launch's tensors, the
        bytes ``spans``, one range for each tensor.
        """
        at, status, (first, second) = line.data_ptr(), self._notes.data_ptr(), (*spans, range(1))[:2]
        places, width = (first.start, second.start), (len(first), len(second))
        return self._lane(kind).share(at, at + TAG_AT, status + 8, status, places, width)

    def send_all(
        self, kind: MessageKind, table: Tensor, count: int, rows: tuple[int, int, int, int], most: int
    ) -> None:
        """Send the messages of a table of shares; see DeviceSide."""
        self._lane(kind).send_all(self._stream, table.data_ptr(), count, rows, self._wait_ns, most)

    def receive_all(self, kind: MessageKind, table: Tensor, count: int, rows: tuple[int, int], most: int) -> None:
        """Receive the messages of a table of shares; see DeviceSide."""
        self._lane(kind).receive_all(self._stream, table.data_ptr(), count, rows, self._wait_ns, most)

    def launching(self) -> AbstractContextManager[bool]:
        """Surround the launch of a graph that holds messages, or of messages of several channels. Yields False if it
        must not be launched.
        """
        return self.device_side.launching()

    @property
    def fuses_with(self) -> object:
        """A value that transports have in common whose messages may be parts of one launch; None: there are none."""
        return self.device_side.fuses_with

    def _lane(self, kind: MessageKind) -> DeviceSide:
        return self.device_side.bulk if kind in BULK_KINDS else self.device_side

    def check_errors(self) -> None:
        """Wait for the device and raise its errors: ChannelError, ProtocolError."""
        (notes,) = self._staging.to_host(self._notes)
        status, note = int(notes[0]), bytes_of(notes[1:])
        if status and any(note):
            came, tag, due, due_tag = _NOTE.unpack(note)
            text = f"{MessageKey.unpack(tag)} of {came} bytes in place of {MessageKey.unpack(due_tag)} of {due} bytes"
            raise ProtocolError(f"{self.channel.peer}: {text}")
        self.device_side.check(status)


class FusedMessages:
    """The messages of one kind of several transports, which are one launch. Each is a part of every row of the same
    tensors.
    """

    def __init__(
        self, kind: MessageKind, shares: Sequence[tuple[DeviceTransport, Tensor, Sequence[range]]], staging: Staging
    ) -> None:
        """``shares``: different transports, whose ``fuses_with`` is equal, with the descriptor and the spans of
        ``DeviceTransport.share``. Raises ValueError if one comes twice: its messages have an order, and blocks of a
        launch have none.
        """
        self._transports = [transport for transport, *_ in shares]
        if len({*self._transports}) < len(shares):
            raise ValueError("a launch has one message for each channel")
        table = b"".join(transport.share(kind, line, spans) for transport, line, spans in shares)
        host = staging.empty_host(len(table) // 8, dtype=torch.int64)
        bytes_of(host)[:] = table
        self._table = staging.to_device(host)
        self._row_bytes = max(sum(map(len, spans)) for *_, spans in shares)  # of the longest message
        self._first, self._kind = self._transports[0], kind

    def send(self, first: Tensor, second: Tensor | None = None) -> None:
        """Send tensors [R, heads, width], whose rows are contiguous: as many rows as descriptors say."""
        rows = _row_places(first) + (_row_places(second) if second is not None else (0, 0))
        with self._launching() as may_be:
            if may_be:
                self._first.send_all(self._kind, self._table, len(self._transports), rows, self._row_bytes * len(first))

    def receive(self, target: Tensor) -> None:
        """Receive into a contiguous tensor, whose rows are those of the messages."""
        rows, most = _row_places(target), self._row_bytes * len(target)
        with self._launching() as may_be:
            if may_be:
                self._first.receive_all(self._kind, self._table, len(self._transports), rows, most)

    @contextmanager
    def _launching(self) -> Iterator[bool]:
        with ExitStack() as held:
            yield all(held.enter_context(transport.launching()) for transport in self._transports)


def _row_places(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


def message_descriptors(staging: Staging, messages: Sequence[tuple[MessageKey, int, int]]) -> Tensor:
    """Return the descriptors of messages in host memory, to be copied to the device. The second length may be 0."""
    table = staging.empty_host(len(messages), DESCRIPTOR_WORDS, dtype=torch.int64)
    data = bytes_of(table)
    for i, (key, first, second) in enumerate(messages):
        _LINE.pack_into(data, i * _LINE.size, first, second, key.pack())
    return table


def _queue(staging: Staging) -> Queue | None:
    return staging.current_queue() if isinstance(staging, DeviceStaging) else None
