"""A message as launches of kernels (csrc/netstack/kernels): one, or for a long message several, a part each. So many
blocks share its copy, and none of them has to wait for another.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Modelled for NVLink 4, not measured: a block copies 64 GB/s at a latency of 1 us, eight of them the available 450
# GB/s. Two more kernels of a graph cost about 1 us each. At 256 KiB it is 4.1 us against 2.6.
LONG_BYTES, COPY_BLOCKS = 1 << 18, 8


class LaunchPart(NamedTuple):
    """``arguments``: after the channel's own; ``blocks``: of the launch."""

    kernel: str
    arguments: tuple[int, ...]
    blocks: int = 1


KERNELS_OF_CALLS = (
    "send", "send_two", "send_begin", "send_fill", "send_end",
    "receive", "receive_due", "receive_begin", "due_begin", "receive_drain", "receive_end",
)  # fmt: skip
KERNELS_OF_SEVERAL = (
    "send_all", "send_all_begin", "send_all_fill", "send_all_end",
    "receive_all", "receive_all_begin", "receive_all_drain", "receive_all_end",
)  # fmt: skip
KERNELS_AT_ONCE = KERNELS_OF_CALLS + KERNELS_OF_SEVERAL
SHARE = struct.Struct("<9Q")  # struct Share of kernels.cu


def send(first: int, second: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int) -> list[LaunchPart]:
    """Return the launches of a send, with arguments as in DeviceSide; ``second`` is 0 if there is none."""
    if most >= LONG_BYTES:
        return [
            LaunchPart("send_begin", (first, second, nbytes, timeout_ns, status)),
            LaunchPart("send_fill", (first, second, nbytes, status), COPY_BLOCKS),
            LaunchPart("send_end", (first, second, nbytes, tag, timeout_ns, status)),
        ]
    if second:
        return [LaunchPart("send_two", (first, second, nbytes, tag, timeout_ns, status))]
    return [LaunchPart("send", (first, nbytes, tag, timeout_ns, status))]


def receive(target: int, room: int, nbytes: int, tag: int, timeout_ns: int, status: int) -> list[LaunchPart]:
    """Return the launches that receive any message of up to ``room`` bytes; its length and tag go to ``nbytes`` and
    ``tag``.
    """
    if room < LONG_BYTES:
        return [LaunchPart("receive", (target, room, nbytes, tag, timeout_ns, status))]
    begin = LaunchPart("receive_begin", (room, nbytes, tag, timeout_ns, status))
    return [begin, *_received(target, nbytes, timeout_ns, status)]


def receive_due(
    target: int, nbytes: int, tag: int, note: int, timeout_ns: int, status: int, most: int
) -> list[LaunchPart]:
    """Return the launches of a receive, with arguments as in DeviceSide."""
    if most < LONG_BYTES:
        return [LaunchPart("receive_due", (target, nbytes, tag, note, timeout_ns, status))]
    begin = LaunchPart("due_begin", (nbytes, tag, note, timeout_ns, status))
    return [begin, *_received(target, nbytes, timeout_ns, status)]


def _received(target: int, nbytes: int, timeout_ns: int, status: int) -> list[LaunchPart]:
    return [
        LaunchPart("receive_drain", (target, nbytes, status), COPY_BLOCKS),
        LaunchPart("receive_end", (timeout_ns, status)),
    ]


def send_all(shares: int, count: int, rows: tuple[int, int, int, int], timeout_ns: int, most: int) -> list[LaunchPart]:
    """Return the launches that send ``count`` messages of the SHAREs at ``shares``. ``rows``: the addresses of the
    tensors, each followed by the bytes from row to row; zeros if there is no second one.
    """
    if most < LONG_BYTES:
        return [LaunchPart("send_all", (shares, *rows, timeout_ns), count)]
    return [
        LaunchPart("send_all_begin", (shares, *rows, timeout_ns), count),
        LaunchPart("send_all_fill", (shares, COPY_BLOCKS, *rows), count * COPY_BLOCKS),
        LaunchPart("send_all_end", (shares, *rows, timeout_ns), count),
    ]


def receive_all(shares: int, count: int, rows: tuple[int, int], timeout_ns: int, most: int) -> list[LaunchPart]:
    """Return the launches that receive ``count`` messages into one tensor; see ``send_all``."""
    if most < LONG_BYTES:
        return [LaunchPart("receive_all", (shares, *rows, timeout_ns), count)]
    return [
        LaunchPart("receive_all_begin", (shares, *rows, timeout_ns), count),
        LaunchPart("receive_all_drain", (shares, COPY_BLOCKS, *rows), count * COPY_BLOCKS),
        LaunchPart("receive_all_end", (shares, timeout_ns), count),
    ]
