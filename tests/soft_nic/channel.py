"""A channel whose sender builds work requests of an mlx5 NIC and rings its doorbell; a software NIC executes them."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from mmap import mmap
from time import monotonic

from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, drive, exchanged
from lamina.netstack.bootstrap.lifeline import SLICE_S, WatchedChannel
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, Geometry
from lamina.netstack.contract.fabric import ChannelAborted, ChannelTimeout, HandshakeError, NoResource, Slot

try:
    from . import _native as native
except ImportError as error:
    raise ImportError(
        f"transport 'nic-model' needs the native module soft_nic._native, which did not load ({error}): install a "
        "C++17 compiler, then run `python tests/soft_nic/setup.py build_ext --inplace`"
    ) from error

STALL_S = 10.0
# queue pair, key and address of the inbox; where the software NIC finds it: bytes, process, descriptor, inode
CARD = struct.Struct("!IIQQIIQ")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SYNDROMES = {
    0x01: "local length error",
    0x02: "local queue pair error",
    0x04: "local protection error",
    0x05: "work request flushed",
    0x13: "remote access error",
    0x15: "the peer does not acknowledge",
    0x100: "a completion that answers nothing",
}


class NicModelChannel(WatchedChannel):
    """Owns ``sock``, whose peer has passed the handshake, once this returns; usable once the two have met."""

    def __init__(
        self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool, proxied: bool = False
    ) -> None:
        outbound, inbound = session.outbound, session.inbound
        if listening:
            outbound, inbound = inbound, outbound
        super().__init__(sock, peer, session.epoch, outbound, inbound, session.peer_name(listening=listening))
        self._session, self._listening = session, listening
        self._zero = session.epoch << EPOCH_SHIFT
        self._number = secrets.randbelow(1 << 24)
        self._memory = _shared_memory(inbox_bytes(inbound))
        try:
            self._inbox = memoryview(mmap(self._memory, inbox_bytes(inbound)))
            self._staging = memoryview(mmap(-1, inbox_bytes(outbound)))
            shapes = (outbound.slots, outbound.slot_bytes), (inbound.slots, inbound.slot_bytes)
            self._endpoint: native.Endpoint | None = native.Endpoint(
                self._inbox, self._staging, *shapes, session.epoch, self._number, secrets.randbits(64), proxied
            )
        except BaseException:
            os.close(self._memory)
            raise
        self._sent = 0
        self._proxied = proxied
        # ends the proxy of one that is never closed
        self._unclosed: weakref.finalize[[], NicModelChannel] | None = None

    def meet(self, deadline: float) -> None:
        """Run ``meeting``, by ``deadline``. Raises ChannelError."""
        drive(self.meeting(), self.peer, deadline=deadline)

    def meeting(self) -> Meeting:
        """Swap cards with the peer and map its inbox; where that fails the channel is closed."""
        where = len(self._inbox), os.getpid(), self._memory, os.fstat(self._memory).st_ino
        card = CARD.pack(self._number, secrets.randbits(32), native.INBOX_ADDRESS, *where)
        try:
            yield from exchanged(
                self._sock, exchange_cards(self._session, card, self._reach, listening=self._listening)
            )
        except BaseException:
            self.close()
            raise
        endpoint = self._live("connect")
        if self._proxied:
            self._unclosed = weakref.finalize(self, endpoint.abort)
            threading.Thread(target=_ring_on, args=(endpoint,), name="nic-model-proxy", daemon=True).start()
        return self

    def close(self) -> None:
        self._leave("closed the channel")
        if self._endpoint is not None:
            if self._unclosed is not None:
                self._unclosed.detach()  # it holds the endpoint
            self._endpoint = None  # the memory goes with the last view and the last call
            self._inbox = self._staging = memoryview(b"")
            self._sock.close()
            os.close(self._memory)

    def _reach(self, card: bytes) -> None:
        """Map the peer's inbox."""
        _, key, address, size, process, descriptor, inode = CARD.unpack(card)
        nbytes = inbox_bytes(self.outbound)
        if size != nbytes:
            raise HandshakeError(f"the peer's inbox has {size} bytes, the terms say {nbytes}")
        try:
            memory = _open_memory(process, descriptor, inode, nbytes)
            try:
                self._live("connect").reach(mmap(memory, nbytes), address, key)
            finally:
                os.close(memory)
        except (OSError, ValueError) as error:
            raise HandshakeError(f"its inbox cannot be reached: {error}") from error

    def _end_waits(self) -> None:
        if self._endpoint is not None:
            if self._proxied:
                self._endpoint.ring(0.0)  # for the messages that were put
            self._endpoint.abort()

    def _live(self, operation: str) -> native.Endpoint:
        self._check(operation)
        endpoint = self._endpoint
        if endpoint is None:
            raise ChannelAborted(f"{self.peer}: {operation}: the channel was closed on this side")
        return endpoint

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        if monotonic() - self._looked > 2 * SLICE_S:
            self._look()
        self._live("reserve")
        self._check_peer("reserve")
        if not self._wait(native.Endpoint.wait_slot, timeout_s, "reserve"):
            slots = self.outbound.slots
            raise NoResource(f"{self.peer}: reserve: none of {slots} slots became free within {timeout_s:g} s")
        index, offset = self._live("reserve").grant()
        return index, self._staging[offset : offset + nbytes]

    def _publish(self, slot: Slot, tag: bytes) -> int:
        endpoint = self._live("put_signal")
        self._check_peer("put_signal")
        deadline = monotonic() + STALL_S
        while (status := endpoint.publish(slot.data.nbytes, tag)) == native.PENDING:
            self._look()
            self._live("put_signal")
            if monotonic() > deadline:
                self._lose(f"the NIC took no work request for {STALL_S:g} s")
            self._check_peer("put_signal")
        if status != native.OK:
            self._lose_to_nic(endpoint)
            self._check_peer("put_signal")
        self._sent += 1
        return self._zero + self._sent

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        if not self._wait(native.Endpoint.wait_message, timeout_s, "wait_signal"):
            raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
        inbox = self._inbox
        taken = self._live("wait_signal").take()
        if taken is None:
            self._lose("the peer broke the protocol: a header that is not that of the next message")
            self._check_peer("wait_signal")
            raise AssertionError("unreachable")
        seqno, tag, offset, length = taken
        return seqno, tag, inbox[offset : offset + length].toreadonly()

    def _give_back(self) -> None:
        endpoint = self._endpoint
        if not self._stopped and endpoint is not None:
            endpoint.release()
            endpoint.report()  # what does not fit the ring now goes with the next wait

    def _wait(self, wait: Callable[[native.Endpoint, float], int], timeout_s: float, operation: str) -> bool:
        """Call ``wait`` until it says OK; False once ``timeout_s`` has passed. Messages from before the peer's end
        count.
        """
        deadline = monotonic() + timeout_s
        pause = 0.0
        while True:
            endpoint = self._live(operation)
            over = self._peer_end is not None
            status = wait(endpoint, pause)
            if status == native.OK:
                return True
            self._live(operation)
            if status == native.FAULT:
                self._lose("the peer broke the protocol: a signal or credit out of its bounds")
                over = True
            if over:
                self._check_peer(operation)
            if endpoint.syndrome() or endpoint.report() == native.FAILED:
                self._lose_to_nic(endpoint)
            self._look()
            left = deadline - monotonic()
            if self._peer_end is None and left <= 0:
                return False
            pause = 0.0 if self._peer_end else min(left, SLICE_S)

    def _lose_to_nic(self, endpoint: native.Endpoint) -> None:
        syndrome = endpoint.syndrome()
        self._lose(f"the NIC reports error {syndrome:#x} ({SYNDROMES.get(syndrome, 'see the mlx5 manual')})")


def _ring_on(endpoint: native.Endpoint) -> None:
    while endpoint.ring(SLICE_S):
        pass


def inbox_bytes(geometry: Geometry) -> int:
    return native.inbox_bytes(geometry.slots, geometry.slot_bytes)


def _shared_memory(nbytes: int) -> int:
    memory = os.memfd_create("lamina-nic-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, nbytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _open_memory(process: int, descriptor: int, inode: int, nbytes: int) -> int:
    """A peer's shared memory; checked, because its size must never change under the mapping."""
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith("/memfd:lamina-nic-model"):
        raise OSError(f"{path} is no memory of this transport")
    memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    info = os.fstat(memory)
    if (info.st_ino, info.st_size) != (inode, nbytes) or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & SEALS != SEALS:
        os.close(memory)
        raise OSError(f"{path} is not the memory that the peer's card describes")
    return memory
