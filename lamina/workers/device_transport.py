"""Layer messages from device to device: kernels on a worker's own stream send Q, K, V and O, and wait for them.

A plan says all of a step's messages, so each side gives its device a step's kernels ahead of time, and no host waits
for a message: at most, where a wire is not ``recordable``, until its peer's host has given its kernel. Hosts do two
things: they bring the lengths and tags of a step's messages to the device, in one copy, for the kernels to read (so a
graph of a slice is of any step, and a message has the rows that there are, not the graph's); and once in a step they
look at what kernels have noted. A kernel to which another message comes than the one that is due fails, and all behind
it on its channel do nothing: what is computed from then on goes nowhere.

Plans, and all that is not of a layer, stay messages of the hosts, on the channel that they had anyway. Timelines show
nothing of what kernels move, as no host sees it.

HARDWARE-UNVERIFIED: run with a device, a driver and graphs that a CPU stands in for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lamina.netstack import Channel, DeviceChannel, DeviceSide
from lamina.netstack.contract.fabric import TAG_BYTES
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError
from lamina.utils.tensor_buffers import bytes_of

from .staging import DeviceStaging, Queue, Staging

_LINE = struct.Struct(f"<2Q{TAG_BYTES}s")  # of a message: one length or two, in bytes; tag
TAG_AT = 16
DESCRIPTOR_WORDS = _LINE.size // 8
_NOTE = struct.Struct(f"<Q{TAG_BYTES}sQ{TAG_BYTES}s")  # length and tag of a message that came, and of the due one
BULK_KINDS = (MessageKind.KV,)  # by the lane of bulk: Q, on which an O waits, must not queue behind them


def can_use_device_path(channel: Channel, staging: Staging) -> bool:
    """Whether kernels on the worker's device can use ``channel``."""
    queue = _queue(staging)
    return queue is not None and isinstance(channel, DeviceChannel) and channel.gpu == queue.gpu


class DeviceTransport:
    """The layer messages of one channel, for the thread of a worker. Opened once ``can_use_device_path`` says so."""

    def __init__(self, channel: Channel, staging: Staging, wait_s: float) -> None:
        """``wait_s``: at most, of a kernel for a message or a slot. The channel is the device's from here on."""
        queue = _queue(staging)
        if not isinstance(staging, DeviceStaging) or not isinstance(channel, DeviceChannel) or queue is None:
            raise ValueError(f"{channel.peer}: kernels on {staging.device} cannot use this channel")
        self.channel = channel
        self._staging, self._device_side, self._stream = staging, channel.hand_to_device(), queue.stream
        self.recordable = self._device_side.recordable  # whether its messages may be parts of graphs
        self._wait_ns = int(wait_s * 1e9)
        self._notes = torch.zeros(1 + _NOTE.size // 8, dtype=torch.int64, device=staging.device)  # status, then a note

    def send(self, kind: MessageKind, line: Tensor, first: Tensor, second: Tensor | None = None) -> None:
        """Of contiguous tensors, as many bytes as ``line`` says, which is on the device."""
        at, lane, most = line.data_ptr(), self._lane(kind), first.nbytes + (0 if second is None else second.nbytes)
        rest = at, at + TAG_AT, self._wait_ns, self._notes.data_ptr(), most
        if second is None:
            lane.send(self._stream, first.data_ptr(), *rest)
        else:
            lane.send_two(self._stream, first.data_ptr(), second.data_ptr(), *rest)

    def receive(self, kind: MessageKind, line: Tensor, target: Tensor) -> None:
        """The next message of that kind's lane, which must be that of ``line``, into ``target``, contiguous and of its
        length.
        """
        at, status = line.data_ptr(), self._notes.data_ptr()
        rest = at, at + TAG_AT, status + 8, self._wait_ns, status, target.nbytes
        self._lane(kind).receive_due(self._stream, target.data_ptr(), *rest)

    def launching(self) -> AbstractContextManager[bool]:
        """Around the launch of a graph that holds messages; False: it must not be launched."""
        return self._device_side.launching()

    def _lane(self, kind: MessageKind) -> DeviceSide:
        return self._device_side.bulk if kind in BULK_KINDS else self._device_side

    def check_errors(self) -> None:
        """Wait for the device, and raise what has gone wrong: ChannelError, ProtocolError."""
        (notes,) = self._staging.to_host(self._notes)
        status, note = int(notes[0]), bytes_of(notes[1:])
        if status and any(note):
            came, tag, due, due_tag = _NOTE.unpack(note)
            text = f"{MessageKey.unpack(tag)} of {came} bytes in place of {MessageKey.unpack(due_tag)} of {due} bytes"
            raise ProtocolError(f"{self.channel.peer}: {text}")
        self._device_side.check(status)


def message_descriptors(staging: Staging, messages: Sequence[tuple[MessageKey, int, int]]) -> Tensor:
    """Host memory, to go up: what kernels must know of each message. The second length may be 0."""
    table = staging.empty_host(len(messages), DESCRIPTOR_WORDS, dtype=torch.int64)
    data = bytes_of(table)
    for i, (key, first, second) in enumerate(messages):
        _LINE.pack_into(data, i * _LINE.size, first, second, key.pack())
    return table


def _queue(staging: Staging) -> Queue | None:
    return staging.current_queue() if isinstance(staging, DeviceStaging) else None
