"""Between GPUs of one host, or two processes on one GPU: kernels put into the peer's inbox, in device memory.

HARDWARE-UNVERIFIED. What the kernels do (csrc/netstack/kernels.cu, memory_channel.h) is proven on CPUs against weak
memory, and this module runs against a stand-in of the CUDA driver; neither has run on a GPU.

Peers meet as those of ``shm`` do. Each makes an inbox in its GPU's memory and hands the other a descriptor of it, by
the driver's virtual memory management: the memory lives until both have let go, so nobody is left with a dead
mapping. From there on a message is a few stores of a kernel over NVLink or PCIe, or within the GPU.

A channel is used from one side of the machine at a time: by the host, through the calls of every channel, each of
which launches a kernel and waits for it, with payloads in pinned memory; or by the device, from ``lend``, whose view
puts kernels on a stream or into a CUDA graph, until ``take_back``. Two processes on one GPU take turns on it, unless
MPS runs: it works, slowly. Within a process, see loopback_gpu.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from time import monotonic

from lamina.netstack.contract.fabric import Channel, ChannelError, ChannelTimeout, Fabric, NoResource, PeerFault, Slot
from lamina.netstack.contract.terms import EPOCH_SHIFT, Terms
from lamina.netstack.host.native import CREDIT_AT, FAULT, LINE, OK, SLOTS_AT, TIMEOUT
from lamina.netstack.host.shm import ShmFabric
from lamina.netstack.meeting.handshake import PeerSession, drive
from lamina.netstack.meeting.lifeline import SLICE_S, WatchedChannel, watch
from lamina.netstack.meeting.listener import Meeting

from .driver import CudaError, CudaStream, Driver, Pinned, Shared
from .ends import ENDS, inbox_bytes, new_ends, stride

DEVICE = "LAMINA_CUDA_DEVICE"
STALL_NS = 1_000_000_000  # a put or release that takes so long has lost its memory
MAIL = struct.Struct("<Q32si")  # bytes, tag and status of a direction, in a line of pinned memory
TAG_OFFSET, STATUS_OFFSET = 8, 40
SENDER, RECEIVER = 0, 1
BROKEN = "the peer broke the protocol: a signal, credit or header out of its bounds"
KERNELS_OF_VIEW = "memory_send", "memory_send_two", "memory_receive", "memory_receive_due"
CARD = struct.Struct("!4sQ")  # magic, bytes of the inbox
MAGIC = b"CUDA"


@dataclass(frozen=True)
class DeviceView:
    """A DeviceSide whose calls launch kernels of ``driver``."""

    driver: Driver
    channel: int  # address of its struct Ends
    launch: Callable[..., None]  # (stream, kernel, its arguments behind the channel's own)
    check: Callable[[int], None]
    recordable: bool = True

    def send(self, stream: int, source: int, nbytes: int, tag: int, timeout_ns: int, status: int) -> None:
        self.launch(stream, "memory_send", source, nbytes, tag, timeout_ns, status)

    def send_two(
        self, stream: int, first: int, second: int, nbytes: int, tag: int, timeout_ns: int, status: int
    ) -> None:
        self.launch(stream, "memory_send_two", first, second, nbytes, tag, timeout_ns, status)

    def receive(self, stream: int, target: int, room: int, nbytes: int, tag: int, timeout_ns: int, status: int) -> None:
        self.launch(stream, "memory_receive", target, room, nbytes, tag, timeout_ns, status)

    def receive_due(
        self, stream: int, target: int, nbytes: int, tag: int, note: int, timeout_ns: int, status: int
    ) -> None:
        self.launch(stream, "memory_receive_due", target, nbytes, tag, note, timeout_ns, status)


class CudaChannel(WatchedChannel):
    """Owns ``sock`` and ``inbox`` once this returns; ``theirs`` is the descriptor of the peer's, the caller's."""

    def __init__(
        self, driver: Driver, inbox: Shared, theirs: int, sock: socket.socket, peer: str, terms: Terms, *,
        listening: bool,
    ) -> None:  # fmt: skip
        outbound, inbound = (terms.inbound, terms.outbound) if listening else (terms.outbound, terms.inbound)
        super().__init__(sock, peer, terms.epoch, outbound, inbound, terms.peer_name(listening=listening))
        self._driver = driver
        self._steps = stride(outbound), stride(inbound)
        self._zero = terms.epoch << EPOCH_SHIFT
        nbytes = 3 * LINE + outbound.slots * self._steps[SENDER] + inbound.slots * self._steps[RECEIVER]
        with ExitStack() as parts:
            reach = parts.enter_context(closing(Shared(driver, inbox_bytes(outbound), theirs)))
            # abort word, two mails, staging, what was received
            self._pinned = parts.enter_context(closing(Pinned(driver, nbytes)))
            pointers = reach.address, inbox.address, self._pinned.address
            self._channel = driver.allocate(new_ends(*pointers, outbound, inbound, self._zero))
            parts.callback(driver.free, self._channel)
            self._streams = tuple(parts.enter_context(closing(CudaStream(driver))) for _ in range(2))
            parts.callback(inbox.close)
            self._free = weakref.finalize(self, parts.pop_all().close)
        self._roles = threading.Lock(), threading.Lock()  # held by a role for the whole of its call
        self._grants = self._sent = self._received = self._released = 0
        self._launching = threading.Lock()  # held by a view's launch, of which none may come once memory is given back
        self._watched = self._closed = False

    @property
    def gpu(self) -> int:
        return self._driver.index

    def lend(self) -> DeviceView:
        if not self._watched:  # no call of the host looks at the life line from here on
            self._watched = True
            view = self._pinned.view

            def end_waits() -> None:
                view[0] = 1

            weakref.finalize(self, watch(self._sock, end_waits))
            for kernel in KERNELS_OF_VIEW:
                self._driver.load(kernel)
        return DeviceView(self._driver, self._channel, self._launch, self._check_kernels)

    def take_back(self) -> None:
        with self._launching:
            if self._closed:
                return
            ends = ENDS.unpack(self._driver.read(self._channel, ENDS.nbytes))
        self._grants, self._sent = ends["granted"], ends["published"]
        self._received, self._released = ends["received"], ends["released"]

    def close(self) -> None:
        self._leave("closed the channel")
        with self._roles[SENDER], self._roles[RECEIVER], self._launching:
            if self._watched:
                with suppress(CudaError):  # of whatever they were, kernels are over
                    self._driver.call("cuCtxSynchronize")
            self._closed = True
            self._free()
            self._sock.close()

    def _end_waits(self) -> None:
        self._pinned.view[0] = 1

    def _launch(self, stream: int, kernel: str, *arguments: int) -> None:
        with self._launching:
            if not self._closed:
                self._driver.launch(stream, kernel, self._channel, *arguments)

    def _check_kernels(self, status: int) -> None:
        """Raise the error that a view's ``status`` stands for, or that the channel was closed, after which nothing is
        launched.
        """
        if status == OK and not self._closed:
            return
        self._check("a kernel")
        self._look()
        self._check_peer("a kernel")
        if status == TIMEOUT:
            raise ChannelTimeout(f"{self.peer}: a kernel: no message, or no free slot, within its time")
        why = BROKEN if status == FAULT else f"status {status} of csrc/netstack/device.h"
        self._lose(why)
        raise PeerFault(f"{self.peer}: a kernel: {why}")

    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        with self._roles[SENDER]:
            if monotonic() - self._looked > 2 * SLICE_S:
                self._look()
            self._check("reserve")
            self._check_peer("reserve")
            message = self._grants

            def step(timeout_ns: int) -> int:
                return self._run(SENDER, "memory_reserve", message, timeout_ns)

            if not self._wait(step, timeout_s, "reserve"):
                slots = self.outbound.slots
                raise NoResource(f"{self.peer}: reserve: none of {slots} slots became free within {timeout_s:g} s")
            self._grants += 1
            index = message % self.outbound.slots
            return index, self._place(SENDER, index)[:nbytes]

    def _publish(self, slot: Slot, nbytes: int, tag: bytes, source: memoryview | None) -> int:
        with self._roles[SENDER]:
            self._check("put_signal")
            self._check_peer("put_signal")
            if source is not None:
                slot.data[:] = source
            mail = self._mail(SENDER)
            MAIL.pack_into(mail, 0, nbytes, tag, OK)
            address = self._address(mail)
            payload = self._address(self._place(SENDER, slot.index))
            try:
                status = self._run(SENDER, "memory_put", payload, address, address + TAG_OFFSET, STALL_NS)
            except BaseException:
                self._lose("a put was interrupted half-way")
                raise
            if status != OK:
                self._check("put_signal")
                self._lose("its memory takes nothing")
                self._check_peer("put_signal")
            self._sent += 1
            return self._zero + self._sent

    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        with self._roles[RECEIVER]:
            message = self._received
            mail, place = self._mail(RECEIVER), self._place(RECEIVER, message % self.inbound.slots)
            where = self._address(mail)
            room = self.inbound.slot_bytes

            def step(timeout_ns: int) -> int:
                rest = room, where, where + TAG_OFFSET, timeout_ns
                return self._run(RECEIVER, "memory_take", message, self._address(place), *rest)

            if not self._wait(step, timeout_s, "wait_signal"):
                raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
            self._received += 1
            nbytes, tag, _ = MAIL.unpack_from(mail)
            return self._zero + self._received, tag, place[:nbytes].toreadonly()

    def _give_back(self) -> None:
        with self._roles[RECEIVER]:
            if not self._stopped and self._peer_end is None:
                self._released += 1
                self._run(RECEIVER, "memory_release", self._released, STALL_NS)

    def _wait(self, step: Callable[[int], int], timeout_s: float, operation: str) -> bool:
        """Call ``step`` until it says OK; False once ``timeout_s`` has passed. Messages from before the peer's end
        count.
        """
        deadline, pause = monotonic() + timeout_s, 0.0
        while True:
            self._check(operation)
            over = self._peer_end is not None
            status = step(round(pause * 1e9))
            if status == OK:
                return True
            self._check(operation)
            if status == FAULT:
                self._lose(BROKEN)
                over = True
            if over:
                self._check_peer(operation)
            self._look()
            left = deadline - monotonic()
            if self._peer_end is None and left <= 0:
                return False
            pause = 0.0 if self._peer_end else min(left, SLICE_S)

    def _run(self, role: int, kernel: str, *arguments: int) -> int:
        """Launch, wait, and tell the status. A driver that fails has ended the channel."""
        mail = self._mail(role)
        mail[STATUS_OFFSET : STATUS_OFFSET + 4] = bytes(4)
        try:
            status = self._address(mail) + STATUS_OFFSET
            stream = self._streams[role]
            self._driver.launch(stream.number, kernel, self._channel, *arguments, status)
            stream.synchronize()
        except CudaError as error:
            self._lose(str(error))
            raise PeerFault(f"{self.peer}: {kernel}: {error}") from error
        return int(MAIL.unpack_from(mail)[2])

    def _mail(self, role: int) -> memoryview:
        return self._pinned.view[(1 + role) * LINE : (2 + role) * LINE]

    def _place(self, role: int, index: int) -> memoryview:
        """Pinned memory of the payload of a slot."""
        base = 3 * LINE + (self.outbound.slots * self._steps[SENDER] if role == RECEIVER else 0)
        start = base + index * self._steps[role]
        return self._pinned.view[start : start + self._steps[role]]

    def _address(self, part: memoryview) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(part))


class CudaFabric(ShmFabric):
    """Listens and connects as ``shm`` does, on this host and for this user alone."""

    scheme = "cuda"

    def __init__(self, key: bytes, driver: Driver) -> None:
        super().__init__(key)
        self._driver = driver

    def close(self) -> None:
        for opened in list(self._opened):
            if isinstance(opened, CudaChannel):  # all, before one waits for kernels, which may wait for peers of others
                opened._leave("closed the channel")
        super().close()
        self._driver.close()

    def _meet(self, sock: socket.socket, url: str, terms: PeerSession, deadline: float) -> Channel:
        try:
            return drive(sock, self._exchange(sock, url, terms, listening=False), url, deadline=deadline)
        except OSError as error:
            raise ChannelError(f"{url}: connect: {error}") from error

    def _welcome(self, url: str, sock: socket.socket, terms: PeerSession) -> Meeting:
        return self._exchange(sock, url, terms, listening=True)

    def _exchange(self, sock: socket.socket, url: str, terms: Terms, *, listening: bool) -> Meeting:
        """Hand the peer our inbox and take its."""
        inbound = terms.outbound if listening else terms.inbound
        outbound = terms.inbound if listening else terms.outbound
        inbox = Shared(self._driver, inbox_bytes(inbound))
        try:
            zero = (terms.epoch << EPOCH_SHIFT).to_bytes(8, "little")
            self._driver.call("cuMemsetD8_v2", inbox.address, 0, SLOTS_AT)
            for at in (0, CREDIT_AT):
                self._driver.write(inbox.address + at, zero)
            handle = inbox.export()
            try:
                socket.send_fds(sock, [CARD.pack(MAGIC, inbox_bytes(inbound))], [handle])
            finally:
                os.close(handle)
            theirs = yield from receive_card(sock, inbox_bytes(outbound))
            try:
                channel = CudaChannel(self._driver, inbox, theirs, sock, url, terms, listening=listening)
            finally:
                os.close(theirs)
        except BaseException:
            inbox.close()
            raise
        self._opened.add(channel)
        return channel


def receive_card(sock: socket.socket, nbytes: int) -> Generator[int, None, int]:
    """The descriptor of the peer's inbox of ``nbytes``, once ``sock`` has it. Raises OSError."""
    yield select.POLLIN
    card, fds, _, _ = socket.recv_fds(sock, CARD.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 1 or card != CARD.pack(MAGIC, nbytes):
        for fd in fds:
            os.close(fd)
        raise OSError("the peer's inbox is not what the terms say" if card else "the peer has no memory for its inbox")
    return int(fds[0])


def open_fabric(key: bytes, *, gpu: int = 0) -> Fabric:
    """Raises ImportError, with its cause, where there is no GPU whose memory processes can share."""
    try:
        driver = Driver(int(os.environ.get(DEVICE) or gpu))
    except ImportError as error:
        raise ImportError(_unusable(error)) from error
    if not driver.shares_memory:
        driver.close()
        raise ImportError(_unusable("this GPU's memory cannot be shared by descriptors"))
    return CudaFabric(key, driver)


def _unusable(cause: object) -> str:
    fix = "use another --transport (on one host shm), or see what `lamina-launch doctor --transport cuda` finds"
    return f"transport 'cuda' cannot be used here: {cause}; {fix}"
