"""The control link between the driver (engine, launcher) and one worker: small typed messages over a stream socket.

Layer messages never pass here. The link is also the worker's life line: when the driver dies, the link reaches its end and the
worker goes too, so nothing is left behind whatever killed the driver.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from typing import Any

import msgspec

MAX_FRAME = 1 << 28
_LENGTH = struct.Struct("<I")


class LinkClosed(Exception):
    """The other end is gone."""


class StartMemory(msgspec.Struct, frozen=True, kw_only=True, tag="start-memory"):
    """Driver -> memory worker, first message. Answered by MemoryReady or Failed."""

    scheme: str
    address: str  # where to listen, "" = any private place
    key: bytes
    threads: int  # of the attention backend


class MemoryReady(msgspec.Struct, frozen=True, kw_only=True, tag="memory-ready"):
    url: str  # where compute workers connect


class AskStats(msgspec.Struct, frozen=True, tag="ask-stats"):
    """Driver -> any worker. Answered by Stats, also while a step is running."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Seconds and bytes by name since the worker started, for instance attend_s, wait_s, steps, bytes_received."""

    values: dict[str, float]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Driver -> any worker: finish and exit with status 0. The end of the link means the same."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Worker -> driver: what happened, in one line for people. ``user_error``: bad input, not a defect (exit code 2)."""

    text: str
    user_error: bool = False


class ControlLink:
    """One end of the link. ``send`` is safe from any thread; one thread receives."""

    def __init__(self, sock: socket.socket, messages: Any) -> None:
        """``messages`` is the union of message types that this end accepts; anything else closes the link."""
        self._sock = sock
        self._sock.setblocking(True)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    def send(self, message: msgspec.Struct) -> None:
        """Raises LinkClosed when the other end is gone."""
        data = self._encoder.encode(message)
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as e:
            raise LinkClosed(f"control link: {e}") from e

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message. None waits for ever, which is right only where the end of the link is the deadline.

        Raises TimeoutError, LinkClosed at the end of the link or on a frame that does not decode.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > MAX_FRAME:
            raise LinkClosed(f"control link: frame of {length} bytes")
        try:
            return self._decoder.decode(self._read(length, deadline))
        except msgspec.MsgspecError as e:
            raise LinkClosed(f"control link: {e}") from e

    def fileno(self) -> int:
        """For select and poll."""
        return self._sock.fileno()

    def close(self) -> None:
        """Ends the link in both directions and wakes a blocked recv. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def _read(self, nbytes: int, deadline: float | None) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if not select.select([self._sock], [], [], max(0.0, left))[0]:
                        raise TimeoutError("control link: no message in time")
                got = self._sock.recv_into(view)
            except (OSError, ValueError) as e:
                if isinstance(e, TimeoutError):
                    raise
                raise LinkClosed(f"control link: {e}") from e
            if got == 0:
                raise LinkClosed("control link: the other end is gone")
            view = view[got:]
        return data
