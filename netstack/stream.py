"""A channel over a connected stream socket: frames, credit, and reading while writing.

A frame is a fixed header, then ``length`` bytes. The kernel copies a payload straight between the socket and the
slots; no thread of ours runs in the background. Instead every call that waits also reads: frames go to inbox slots,
which credit guarantees to be free, so two peers that put large messages to each other at once both get on.

A put returns when the kernel has taken all of its bytes. A peer that takes none of them for ``STALL_S`` is given up.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from mmap import mmap
from time import monotonic

from .base import BaseChannel
from .fabric import EPOCH_SHIFT, ChannelAborted, ChannelTimeout, Geometry, NoResource, PeerFault, Slot
from .handshake import Terms

STALL_S = 10.0
LOOK_S = 0.1  # a sender that never waits looks at the socket this often
REASON_BYTES = 256
HEADER = struct.Struct("!H6xQQQ32s")  # kind, length, seqno, credit (newest seqno released by the frame's sender), tag
DATA, CREDIT, FAREWELL = 1, 2, 3
POLLIN, POLLOUT = select.POLLIN, select.POLLOUT


class _Slots:
    """Page-aligned memory for one direction; pages that were never touched cost nothing."""

    def __init__(self, geometry: Geometry) -> None:
        self._stride = (geometry.slot_bytes + 63) // 64 * 64
        self._memory = memoryview(mmap(-1, geometry.slots * self._stride))

    def view(self, index: int, nbytes: int) -> memoryview:
        start = index * self._stride
        return self._memory[start : start + nbytes]


class _Sleeper:
    """Where one role, the sender or the receiver, waits for the socket or for a ring from another thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._events = 0
        self._bell = FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._poller = select.poll()
        self._poller.register(self._bell, POLLIN)
        self.asleep = False

    def ring(self) -> None:
        if self.asleep:
            os.eventfd_write(self._bell.fileno(), 1)

    def sleep(self, events: int, timeout_s: float) -> None:
        """Sleep until the socket or the bell. The caller has set ``asleep``, and looked again after that."""
        if events != self._events:
            self._poller.register(self._sock, events)
            self._events = events
        for fd, _ in self._poller.poll(max(0.0, timeout_s) * 1000):
            if fd == self._bell.fileno():
                self._bell.read(8)

    def close(self) -> None:
        self._bell.close()


class StreamChannel(BaseChannel):
    """Owns ``sock``, which is non-blocking.

    Locks: ``_sending`` and ``_receiving`` are held by a role for the whole of its call, so that close knows when
    nobody is inside. ``_reading`` and ``_writing`` guard the two halves of the socket: either role reads, and a
    release (receiver) writes credit while a put (sender) writes data.
    """

    def __init__(self, sock: socket.socket, peer: str, terms: Terms, *, listening: bool) -> None:
        outbound, inbound = terms.outbound, terms.inbound
        if listening:
            outbound, inbound = inbound, outbound
        super().__init__(peer, terms.epoch, outbound, inbound)
        self._sock = sock
        self._zero = terms.epoch << EPOCH_SHIFT
        self._out_slots, self._in_slots = outbound.slots, inbound.slots
        self._staging, self._inbox = _Slots(outbound), _Slots(inbound)
        self._grants = self._sent = self._credited = 0
        self._arrivals = self._released = self._reported = self._pushed = 0
        self._messages: deque[tuple[int, bytes, memoryview]] = deque()
        self._header = memoryview(bytearray(HEADER.size))
        self._rest = self._header  # of the header or payload that is being read
        self._frame: tuple[int, int, bytes, memoryview] | None = None  # kind, seqno, tag, payload that is being read
        self._tail = b""  # of a credit frame that the kernel took in part
        self._looked = monotonic()
        self._stopped = False
        self._peer_end: str | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._sender, self._receiver = _Sleeper(sock), _Sleeper(sock)

    def abort(self, reason: str) -> None:
        self._leave(f"aborted: {reason}")

    def close(self) -> None:
        self._leave("closed the channel")
        with self._sending, self._receiving:
            if self._sock.fileno() >= 0:
                self._sock.close()
                self._sender.close()
                self._receiver.close()

    def _leave(self, why: str) -> None:
        """Stop this side, tell the peer if the stream is at a frame's border, and wake both roles."""
        if self._stopped:
            return
        self._stopped = True
        if self._writing.acquire(blocking=False):
            with suppress(OSError):
                reason = why.encode()[:REASON_BYTES]
                if not self._tail:
                    self._sock.send(HEADER.pack(FAREWELL, len(reason), 0, self._zero + self._released, b"") + reason)
            self._writing.release()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sender.ring()
        self._receiver.ring()

    def _check(self, operation: str) -> None:
        """Raise if the channel is over, on either side."""
        if self._stopped:
            raise ChannelAborted(f"{self.peer}: {operation}: the channel was aborted or closed on this side")
        if self._peer_end is not None:
            raise PeerFault(f"{self.peer}: {operation}: {self._peer_end}")

    def _has_slot(self) -> bool:
        return self._grants - self._credited < self._out_slots

    def _has_message(self) -> bool:
        return bool(self._messages)

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        with self._sending:
            if monotonic() - self._looked > LOOK_S:
                self._read(_never)
            self._check("reserve")
            if not self._has_slot() and not self._wait(self._sender, self._has_slot, timeout_s, "reserve"):
                slots = self._out_slots
                raise NoResource(f"{self.peer}: reserve: none of {slots} slots became free within {timeout_s:g} s")
            index = self._grants % self._out_slots
            self._grants += 1
            return index, self._staging.view(index, nbytes)

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        with self._receiving:
            if self._stopped:
                self._check("wait_signal")
            if not self._messages and not self._wait(self._receiver, self._has_message, timeout_s, "wait_signal"):
                raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
            return self._messages.popleft()

    def _publish(self, slot: Slot, nbytes: int, tag: bytes, source: memoryview | None) -> int:
        payload = self._staging.view(slot.index, nbytes) if source is None else source
        with self._sending:
            self._check("put_signal")
            with self._writing:
                self._sent += 1
                seqno = self._zero + self._sent
                self._reported = self._pushed = self._released
                header = HEADER.pack(DATA, nbytes, seqno, self._zero + self._reported, tag)
                self._send([self._tail, header, payload], len(self._tail) + HEADER.size + nbytes)
                self._tail = b""
            if self._reported < self._released:
                self._report()  # what another thread released meanwhile
            return seqno

    def _give_back(self) -> None:
        self._released += 1
        if not self._stopped and self._peer_end is None:
            self._report()

    def _report(self) -> None:
        """Tell the peer what was released, unless another thread is writing, which then does so afterwards.

        As long as the peer has half of its slots for all we know, the kernel may hold the frame back (MSG_MORE, at
        most 200 ms), so that it leaves with the next message instead of waking the peer on its own.
        """
        while (self._tail or self._reported < self._released) and self._writing.acquire(blocking=False):
            try:
                if self._reported < self._released and not self._tail:
                    self._reported = self._released
                    self._tail = HEADER.pack(CREDIT, 0, 0, self._zero + self._reported, b"")
                scarce = self._scarce()
                self._tail = self._tail[self._sock.send(self._tail, 0 if scarce else socket.MSG_MORE) :]
                if scarce and not self._tail:
                    self._pushed = self._reported
            except BlockingIOError:
                return  # the next call that waits goes on
            except OSError:
                self._tail = b""  # the peer left; reading will say why
            finally:
                self._writing.release()

    def _scarce(self) -> bool:
        return 2 * (self._arrivals - self._pushed) >= self._in_slots

    def _push(self) -> None:
        """Let go of credit that the kernel holds back from a peer that may lack it."""
        if self._pushed < self._reported and self._scarce():
            self._pushed = self._reported
            with suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _wait(self, sleeper: _Sleeper, ready: Callable[[], bool], timeout_s: float, operation: str) -> bool:
        """Read, and in between sleep, until ``ready()``; False once ``timeout_s`` has passed."""
        deadline = monotonic() + timeout_s
        if timeout_s <= 0:
            self._read(ready)
        while not ready():
            self._check(operation)
            left = deadline - monotonic()
            if left <= 0:
                return False
            if self._tail or self._reported < self._released:
                self._report()
            if self._pushed < self._reported:
                self._push()
            sleeper.asleep = True
            try:
                if not ready() and not self._stopped and self._peer_end is None:
                    sleeper.sleep(POLLIN | POLLOUT if self._tail else POLLIN, left)
            finally:
                sleeper.asleep = False
            self._read(ready)
        if self._stopped:
            self._check(operation)
        return True

    def _send(self, pieces: list[bytes | memoryview], nbytes: int) -> None:
        """Hand all ``nbytes`` of the pieces to the kernel; reads while it cannot take more. With ``_writing`` held."""
        deadline = monotonic() + STALL_S
        try:
            while True:
                try:
                    taken = self._sock.sendmsg(pieces)
                except BlockingIOError:
                    self._stall(deadline)
                    continue
                nbytes -= taken
                if nbytes == 0:
                    return
                pieces = _after(pieces, taken)
                deadline = monotonic() + STALL_S
        except OSError as error:
            self._read(_never)  # its farewell, if there is one
            self._lose(f"the connection broke ({error.strerror})")
            self._check("put_signal")
        except BaseException:
            self._lose("a put was interrupted half-way", shut=True)
            raise

    def _stall(self, deadline: float) -> None:
        """The kernel takes no more: read, and sleep until it does. Raises when the peer is lost."""
        left = deadline - monotonic()
        if left <= 0:
            self._lose(f"the peer took no bytes for {STALL_S:g} s")
        self._read(_never)
        self._sender.asleep = True
        try:
            self._check("put_signal")
            self._sender.sleep(POLLIN | POLLOUT, left)
        finally:
            self._sender.asleep = False

    def _read(self, enough: Callable[[], bool]) -> None:
        """Read what has come, without waiting, until ``enough()`` or nothing is left."""
        with self._reading:
            self._looked = monotonic()
            try:
                while not enough() and self._peer_end is None:
                    rest = self._rest
                    got = self._sock.recv_into(rest)
                    if got < rest.nbytes:
                        self._rest = rest[got:]
                        if got == 0:
                            self._lose("the peer's process is gone")
                    elif self._frame is None:
                        self._open_frame()
                    else:
                        self._end_frame(self._frame)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"the connection broke ({error.strerror})")
            except BaseException:
                self._lose("a read was interrupted half-way", shut=True)
                raise

    def _open_frame(self) -> None:
        """A header is complete."""
        kind, length, seqno, credit, tag = HEADER.unpack(self._header)
        credit -= self._zero
        if why := self._why_bad(kind, length, seqno, credit):
            self._lose(f"the peer broke the protocol: {why}", shut=True)
            return
        if credit > self._credited:
            self._credited = credit
            self._sender.ring()
        if kind == CREDIT:
            self._rest = self._header
            return
        index = self._arrivals % self._in_slots
        payload = self._inbox.view(index, length) if kind == DATA else memoryview(bytearray(length))
        frame = kind, seqno, tag, payload
        if length:
            self._frame, self._rest = frame, payload
        else:
            self._end_frame(frame)

    def _end_frame(self, frame: tuple[int, int, bytes, memoryview]) -> None:
        """A payload is complete."""
        kind, seqno, tag, payload = frame
        self._frame, self._rest = None, self._header
        if kind == FAREWELL:
            self._lose(f"the peer {bytes(payload).decode(errors='replace')}")
            return
        self._arrivals += 1
        self._messages.append((seqno, tag, payload.toreadonly()))
        self._receiver.ring()

    def _why_bad(self, kind: int, length: int, seqno: int, credit: int) -> str:
        """Why a header cannot come from an honest peer; empty if it can."""
        if not self._credited <= credit <= self._sent:
            return f"credit {self._zero + credit:#x} when {self._zero + self._sent:#x} was sent"
        if kind == DATA:
            if seqno != self._zero + self._arrivals + 1:
                return f"seqno {seqno:#x} after {self._zero + self._arrivals:#x}"
            if self._arrivals - self._released >= self._in_slots:
                return f"message {seqno:#x} without credit"
            if length > self.inbound.slot_bytes:
                return f"{length} bytes for a slot of {self.inbound.slot_bytes}"
        elif (kind, length) != (CREDIT, 0) and not (kind == FAREWELL and length <= REASON_BYTES):
            return f"frame of kind {kind} with {length} bytes"
        return ""

    def _lose(self, why: str, *, shut: bool = False) -> None:
        """The peer is lost: remember why, wake both roles."""
        if self._peer_end is None:
            self._peer_end = why
        if shut:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sender.ring()
        self._receiver.ring()


def _after(pieces: list[bytes | memoryview], taken: int) -> list[bytes | memoryview]:
    """What is left of ``pieces`` behind the first ``taken`` bytes."""
    left: list[bytes | memoryview] = []
    for piece in pieces:
        if taken < len(piece):
            left.append(memoryview(piece)[taken:])
        taken = max(0, taken - len(piece))
    return left


def _never() -> bool:
    return False
