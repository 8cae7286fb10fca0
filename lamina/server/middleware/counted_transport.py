"""A transport that knows how many of its bytes the client has taken, those that the kernel holds included.

asyncio counts only the bytes that the kernel has not accepted. The kernel may hold megabytes of a client that reads
nothing. It accepts more once a third of its buffer is free, which takes minutes with a slow reader.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class CountedTransport:
    """All of ``transport``, whose writes are counted."""

    def __init__(self, transport: asyncio.Transport, on_write: Callable[[], None]) -> None:
        """``on_write`` is called after each write."""
        self._transport = transport
        self._on_write = on_write
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data``, as soon as the kernel accepts it."""
        self._written += len(data)
        self._transport.write(data)
        self._on_write()

    @property
    def untaken(self) -> int:
        """Bytes in this process and in the kernel that the client's host has not acknowledged. For a Unix socket, the
        kernel's memory for bytes that the client has not read.
        """
        return self._transport.get_write_buffer_size() + _held_by_kernel(self._transport)

    @property
    def taken(self) -> int:
        """A number that grows when the client takes bytes."""
        return self._written - self.untaken


def _held_by_kernel(transport: asyncio.Transport) -> int:
    sock, held = transport.get_extra_info("socket"), bytearray(struct.calcsize("i"))
    with suppress(OSError, ValueError, AttributeError):  # it is closed
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, held)  # SIOCOUTQ of tcp(7) and unix(7)
    return int(struct.unpack("i", held)[0])
