"""A channel over one reliable queue pair; ``verbs`` describes its messages, credit and signs of life."""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, exchanged
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.contract.base import BaseChannel, one_line
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT
from lamina.netstack.contract.fabric import (
    ChannelAborted,
    ChannelError,
    ChannelTimeout,
    NoResource,
    PeerFault,
    Slot,
)

from .card import ConnectionCard
from .device import Completion, Domain, Memory, QueuePair, RdmaDevice, pages
from .nic_backend import STALL_S, inbox_bytes, reaching, stride
from .sleeper import EventWaiter

LOOK_S = 0.1  # a caller that never waits checks completions and the life line this often
BEAT_S = 0.5
LINGER_S = 1.0  # how long close waits until the peer's NIC has all puts
WRITE_BYTES = 1 << 20  # the largest write; longer messages are several writes, so completions show that they move
REASON_BYTES = 256
HEADER = struct.Struct("<QQQ8x32s")  # seqno, length, seqno of the newest message that its sender has released, tag
CREDIT = 1 << 31  # in an immediate value: the rest counts released slots, not messages
COUNT = CREDIT - 1
DATA_SENT, CREDIT_SENT, BEAT_SENT, PIECE_SENT = 1, 2, 3, 4


class VerbsChannel(BaseChannel):
    """Owns ``sock``, whose peer has passed the handshake; usable once ``meeting`` has returned.

    Locks: ``_sending`` and ``_receiving`` are held by a role for the whole of its call, so that close knows when no
    call is running. Either role polls completions, under ``_polling``, and rings the other one for its completions.
    """

    def __init__(
        self, device: RdmaDevice, sock: socket.socket, peer: str, session: AuthenticatedTerms, *,
        listening: bool, spin_s: float,
    ) -> None:  # fmt: skip
        outbound, inbound = session.outbound, session.inbound
        if listening:
            outbound, inbound = inbound, outbound
        super().__init__(peer, session.epoch, outbound, inbound, session.peer_name(listening=listening))
        self._session, self._listening = session, listening
        self._sock, self._spin_s = sock, spin_s
        self._zero = session.epoch << EPOCH_SHIFT
        self._stride, self._in_stride = stride(outbound), stride(inbound)
        pieces = -(-self._stride // WRITE_BYTES)
        sends, receives = outbound.slots * pieces + inbound.slots + 1, outbound.slots + inbound.slots
        self._most = sends + receives  # most completions at once
        self._domain, self._packets = Domain(device), device.packets
        try:
            self._staging = self._domain.memory(pages(outbound.slots * self._stride))
            self._inbox = self._domain.memory(pages(inbound.slots * self._in_stride), inbox=True)
            self._pair = QueuePair(self._domain, sends, receives)
        except OSError:
            self._domain.close()
            raise
        self._theirs = (0, 0)  # key and address of the peer's inbox
        self._grants = self._sent = self._completed = self._credited = 0
        self._arrivals = self._released = self._credits_out = 0
        self._messages: deque[tuple[int, bytes, memoryview]] = deque()
        self._looked = self._beaten = self._heard = monotonic()
        self._beating = False
        self._stopped = self._closed = False
        self._peer_end: str | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._polling, self._looking = threading.Lock(), threading.Lock()
        self._crediting = threading.Lock()  # credit goes out in the order in which it was counted
        fds = sock.fileno(), self._pair.events_fd
        self._sender, self._receiver = EventWaiter(*fds), EventWaiter(*fds)

    def meeting(self) -> Meeting:
        """Exchange cards with the peer and connect the queue pairs; on failure the channel is closed."""
        card = ConnectionCard(self._pair.route, len(self._inbox.view), self._inbox.rkey, self._inbox.address).pack()
        try:
            reach = reaching(inbox_bytes(self.outbound), self._pair.route.lid, self._connect)
            yield from exchanged(self._sock, exchange_cards(self._session, card, reach, listening=self._listening))
        except BaseException:
            self.close()
            raise
        return self

    def abort(self, reason: str) -> None:
        if not self._stopped:
            self._stop()
            self._farewell(f"aborted: {reason}")

    def close(self) -> None:
        aborted = self._stopped
        self._stop()
        with self._sending, self._receiving:
            if self._closed:
                return
            self._closed = True
            if not aborted:
                self._linger()
                self._farewell("closed the channel")
            for part in (self._pair, self._domain, self._sock, self._sender, self._receiver):
                part.close()
            self._messages.clear()

    def _connect(self, card: ConnectionCard) -> None:
        self._theirs = card.key, card.address
        self._packets.compare(self._pair.route, card.route, self.peer)
        self._pair.connect(card.route)

    def _stop(self) -> None:
        self._stopped = True
        with suppress(ValueError):  # a bell that was closed already
            self._sender.ring()
            self._receiver.ring()

    def _farewell(self, why: str) -> None:
        with suppress(OSError):
            self._sock.send(why.encode()[:REASON_BYTES])
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _linger(self) -> None:
        """Let the NIC finish what was put, for at most LINGER_S."""
        deadline = monotonic() + LINGER_S
        while self._completed < self._sent and self._peer_end is None and (left := deadline - monotonic()) > 0:
            with suppress(OSError):
                self._pair.arm(wakers_only=False)
                self._poll()
                if self._completed < self._sent:
                    self._sender.sleep(min(left, LOOK_S))
                    self._pair.disarm()
            self._look()

    def _check(self, operation: str) -> None:
        """Raise if the channel is over, on either side."""
        if self._stopped:
            raise ChannelAborted(f"{self.peer}: {operation}: the channel was aborted or closed on this side")
        if self._peer_end is not None:
            raise PeerFault(f"{self.peer}: {operation}: {self._peer_end}")

    def _has_slot(self) -> bool:
        """Return True if the next slot is free at the peer, and our NIC no longer needs its staging."""
        return self._grants - min(self._credited, self._completed) < self.outbound.slots

    def _has_message(self) -> bool:
        return bool(self._messages)

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        with self._sending:
            if monotonic() - self._looked > LOOK_S:
                self._look()
                self._poll()
            self._check("reserve")
            if not self._wait(self._sender, self._has_slot, timeout_s, "reserve"):
                slots = self.outbound.slots
                raise NoResource(f"{self.peer}: reserve: none of {slots} slots became free within {timeout_s:g} s")
            index = self._grants % self.outbound.slots
            self._grants += 1
            start = index * self._stride + HEADER.size
            return index, self._staging.view[start : start + nbytes]

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        with self._receiving:
            if self._stopped:
                self._check("wait_signal")
            if not self._wait(self._receiver, self._has_message, timeout_s, "wait_signal"):
                raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
            return self._messages.popleft()

    def _publish(self, slot: Slot, tag: bytes) -> int:
        with self._sending:
            self._check("put_signal")
            try:
                self._sent += 1
                self._post(slot.index, slot.data.nbytes, tag)
            except OSError as error:
                self._lose(str(error))
            except BaseException:
                self._lose("a put was interrupted half-way")
                raise
            self._check("put_signal")
            return self._zero + self._sent

    def _post(self, index: int, nbytes: int, tag: bytes) -> None:
        """Write header and payload; all but the first piece go ahead, since the immediate must come last."""
        at, total = index * self._stride, HEADER.size + nbytes
        key, remote = self._theirs[0], self._theirs[1] + at

        def piece(start: int) -> tuple[Memory, int, int]:
            return self._staging, self._staging.address + at + start, min(WRITE_BYTES, total - start)

        for start in range(WRITE_BYTES, total, WRITE_BYTES):
            self._pair.write(PIECE_SENT, piece(start), (key, remote + start))
        with self._crediting:
            seqno, released = self._zero + self._sent, self._zero + self._released
            HEADER.pack_into(self._staging.view, at, seqno, nbytes, released, tag)
            self._pair.write(DATA_SENT, piece(0), (key, remote), self._sent & COUNT, wake=True)

    def _give_back(self) -> None:
        """Post one credit for each release; wait for the NIC only if it has not sent enough earlier ones."""
        self._released += 1
        if self._stopped or self._peer_end is not None:
            return
        with self._receiving, suppress(ChannelError):
            if self._wait(self._receiver, self._has_credit_request, STALL_S, "release"):
                self._credits_out += 1
                try:
                    with self._crediting:
                        self._pair.write(CREDIT_SENT, None, self._theirs, CREDIT | self._released & COUNT)
                except OSError as error:
                    self._lose(str(error))

    def _has_credit_request(self) -> bool:
        return self._credits_out < self.inbound.slots

    def _wait(self, sleeper: EventWaiter, ready: Callable[[], bool], timeout_s: float, operation: str) -> bool:
        """Poll, spin a little, then sleep until ``ready()``; False once ``timeout_s`` has passed."""
        if ready():
            return True
        start = monotonic()
        if start - self._looked > LOOK_S:
            self._look()  # a call without time to wait checks, too
        self._poll()
        while not ready():
            self._check(operation)
            waited = monotonic() - start
            if waited >= timeout_s:
                return False
            if waited > self._spin_s:
                self._sleep(sleeper, ready, timeout_s - waited)
                self._look()
            self._poll()
        if self._stopped:
            self._check(operation)
        return True

    def _sleep(self, sleeper: EventWaiter, ready: Callable[[], bool], left: float) -> None:
        """Sleep until something may have changed. A role that takes the NIC's event rings the other, which may need the
        next.
        """
        sleeper.asleep = True
        try:
            self._arm()
            self._poll()
            if not ready() and not self._stopped and self._peer_end is None:
                sleeper.sleep(min(left, BEAT_S))
                if self._pair.disarm():
                    (self._receiver if sleeper is self._sender else self._sender).ring()
        finally:
            sleeper.asleep = False

    def _arm(self) -> None:
        """Arm events: credit and completed sends are events only if the sender waits for them."""
        try:
            self._pair.arm(wakers_only=not self._sender.asleep)
        except OSError as error:
            self._lose(str(error))

    def _poll(self) -> None:
        """Handle completions, but no more than can be in flight at once: a lying peer can send as fast as they are
        handled. Lose a peer whose NIC gave no sign of life when tested.
        """
        asked, left = monotonic(), self._most  # before the poll: after a long stop it finds what came meanwhile
        with self._polling:
            try:
                while left > 0 and (completions := self._pair.poll()):
                    left -= len(completions)
                    for done in completions:
                        self._handle(done)
                    self._heard = asked
                if self._beating and asked - max(self._beaten, self._heard) > STALL_S:
                    self._lose(f"nothing was heard of the peer's NIC for {STALL_S:g} s")
            except OSError as error:
                self._lose(str(error))
            except BaseException:
                self._lose("a poll was interrupted half-way")
                raise

    def _handle(self, done: Completion) -> None:
        if done.error:
            self._look(beat=False)  # the peer's last message explains more than the NIC's error
            self._lose(f"the connection broke ({done.error})")
        elif done.immediate is not None:
            self._pair.post_receive()
            word = done.immediate
            why = self._credit((word - self._credited) & COUNT) if word & CREDIT else self._arrive(word)
            if why:
                self._lose(f"the peer broke the protocol: {why}")
        elif done.request == CREDIT_SENT:
            self._credits_out -= 1
        elif done.request == BEAT_SENT:
            self._beating = False
        elif done.request == DATA_SENT:
            self._completed += 1
            self._sender.ring()

    def _credit(self, more: int) -> str:
        """Add credit for ``more`` messages. Returns why it cannot come from an honest peer, "" if it can."""
        if not 0 <= more <= self._sent - self._credited:
            return f"credit for {more} messages when {self._sent - self._credited} were on loan"
        self._credited += more
        self._sender.ring()
        return ""

    def _arrive(self, immediate: int) -> str:
        """Add a message. Returns why it cannot come from an honest peer, "" if it can."""
        index = self._arrivals % self.inbound.slots
        start = index * self._in_stride
        seqno, length, credit, tag = HEADER.unpack(self._inbox.view[start : start + HEADER.size].tobytes())
        expected = self._zero + self._arrivals + 1
        if seqno != expected or immediate != expected & COUNT:
            return f"seqno {seqno:#x}, signal {immediate:#x} in place of {expected:#x}"
        if self._arrivals - self._released >= self.inbound.slots:
            return f"message {seqno:#x} without credit"
        if length > self.inbound.slot_bytes:
            return f"{length} bytes for a slot of {self.inbound.slot_bytes}"
        if why := self._credit(credit - self._zero - self._credited):
            return why
        self._arrivals += 1
        payload = self._inbox.view[start + HEADER.size : start + HEADER.size + length]
        self._messages.append((seqno, tag, payload.toreadonly()))
        self._receiver.ring()
        return ""

    def _look(self, *, beat: bool = True) -> None:
        """Check whether the life line has ended; test the peer's NIC if that is due."""
        with self._looking:
            now = self._looked = monotonic()
            if self._peer_end is not None:
                return
            try:
                reason = one_line(self._sock.recv(REASON_BYTES).decode(errors="replace"))
                self._lose(f"the peer {reason}" if reason else "the peer's process is gone")
            except BlockingIOError:
                if beat and now - self._beaten > BEAT_S and not self._beating and not self._closed:
                    self._beaten, self._beating = now, True  # in this order: another thread may be in _poll
                    with suppress(OSError):
                        self._pair.write(BEAT_SENT, None, self._theirs)
            except OSError as error:
                self._lose(f"the life line broke ({error.strerror})")

    def _lose(self, why: str) -> None:
        """Note that the peer is lost and why; wake both roles."""
        if self._peer_end is None:
            self._peer_end = why
        self._sender.ring()
        self._receiver.ring()
