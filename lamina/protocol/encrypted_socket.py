"""A socket whose peer has proven the cluster's key, and whose records are encrypted: control links beyond one host.

A record is a length and the data, each under AES-256-GCM with the sender's session key and a counter. So records cannot
be read, forged, changed, repeated, dropped or reordered. No memory is allocated for a length before its sender is known
to be the peer.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from lamina.netstack.host.native_module import seal, unseal

KEY_BYTES = 32
KEY_PAIR_BYTES = 2 * KEY_BYTES  # one to send with, one to receive with
TAG_BYTES = 16
MAX_RECORD_BYTES = 1 << 29
STALL_S = 10.0  # for the rest of a record whose beginning has arrived
KEEPALIVE_S = 3  # a lost host is noticed one second later
_LENGTH = struct.Struct("!I")


class EncryptedSocket(socket.socket):
    """The part of a socket that a control link uses, over a connected stream. One thread sends, one receives."""

    def __init__(self, fd: int, keys: bytes) -> None:
        """Take ownership of ``fd``. ``keys``: KEY_PAIR_BYTES of this session."""
        super().__init__(fileno=fd)
        self._send_key, self._receive_key = keys[:KEY_BYTES], keys[KEY_BYTES:KEY_PAIR_BYTES]
        self._sent = self._received = 0  # counts of lengths and data: the counters of the cipher
        self._data = memoryview(b"")
        self.timed_out = False  # whether the peer's host has stopped responding
        self.setblocking(True)
        enable_keepalive(self)

    @property
    def pending(self) -> int:
        """The bytes of a record that were read from the kernel and not yet returned to the caller."""
        return len(self._data)

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override] # bytes alone are sent here
        """Send one record."""
        length = _LENGTH.pack(len(data))
        record = b"".join(seal(self._send_key, self._sent + n, part) for n, part in enumerate((length, data)))
        self._sent += 2
        super().sendall(record, flags)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """Receive the rest of a record, else the next one, as far as it fits; 0 at the end. Raises ConnectionError."""
        if not self._data:
            self._data = memoryview(self._next())
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count

    def _next(self) -> bytes:
        head = self._read(_LENGTH.size + TAG_BYTES, wait_s=None)
        if not head:
            return b""
        (length,) = _LENGTH.unpack(self._opened(head))
        if length > MAX_RECORD_BYTES:
            raise ConnectionError(f"a record of {length} bytes")
        return self._opened(self._read(length + TAG_BYTES, wait_s=STALL_S))

    def _opened(self, sealed: bytes) -> bytes:
        try:
            data = unseal(self._receive_key, self._received, sealed)
        except ValueError as error:
            raise ConnectionError("a record with a wrong code") from error
        self._received += 1
        return data

    def _read(self, nbytes: int, wait_s: float | None) -> bytes:
        """Read ``nbytes``; nothing if the stream ends before. ``wait_s``: limit for the first byte; None: for ever."""
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            poller = select.poll()
            poller.register(self, select.POLLIN)
            if not poller.poll(None if wait_s is None else wait_s * 1000):
                raise ConnectionError("the peer stopped within a record")
            try:
                got = super().recv_into(view)
            except TimeoutError as error:  # from the kernel, see enable_keepalive; no deadline of this class
                self.timed_out = True
                raise ConnectionError("the peer's host does not answer") from error
            if not got:
                if len(view) == nbytes and wait_s is None:
                    return b""
                raise ConnectionError("the stream ended within a record")
            view, wait_s = view[got:], STALL_S
        return bytes(data)


def enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel probe whether a silent peer's host is there (tcp(7)); the stream ends if it is not."""
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: 1,
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_KEEPCNT: KEEPALIVE_S,  # one a second
        socket.TCP_USER_TIMEOUT: KEEPALIVE_S * 1000,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def read_key_pair(fd: int) -> bytes:
    """Read KEY_PAIR_BYTES from a pipe; returns fewer if it ended before."""
    keys = b""
    while len(keys) < KEY_PAIR_BYTES and (more := os.read(fd, KEY_PAIR_BYTES - len(keys))):
        keys += more
    return keys
