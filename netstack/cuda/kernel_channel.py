"""Channels whose every call is a kernel. For calls of the host, it launches a kernel and waits for it, with payloads in
pinned memory. From ``hand_to_device`` until ``take_from_device``, a view puts kernels on a stream or into a CUDA graph.
The kernels for each kind of link are in csrc/netstack/kernels; its transport provides the memory or queues for
messages.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic

from lamina.netstack.bootstrap.lifeline import SLICE_S, LinkEvents, WatchedChannel, watch
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, Geometry, Terms
from lamina.netstack.contract.fabric import ChannelTimeout, DeviceSide, NoResource, PeerFault, Slot
from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.host.native_module import ABORTED, FAULT, LINE, OK, TIMEOUT

from . import kernel_launches
from .channel_memory import stride
from .driver import CudaError, CudaStream, Driver, Pinned
from .kernel_launches import KERNELS_AT_ONCE, SHARE, LaunchPart

STALL_NS = 1_000_000_000  # a put or release that takes so long has lost its memory
MAIL = struct.Struct("<Q32si")  # bytes, tag and status of a direction, in a line of pinned memory
TAG_OFFSET, STATUS_OFFSET = 8, 40
SENDER, RECEIVER = 0, 1
CLOSED = "closed the channel"
BROKEN = "the peer broke the protocol: a signal, credit or header out of its bounds"


@dataclass(frozen=True)
class LinkKind:
    """``name``: the part of its kernels' names between lamina_ and the action. ``layout``: of a lane's struct.
    ``has_bulk``: in channels of kernels, the struct of a second lane follows the first one's. ``at_once``: kernels that
    are launched while others wait; loading one could block on those.
    """

    name: str
    layout: StructLayout
    has_bulk: bool = False
    at_once: tuple[str, ...] = KERNELS_AT_ONCE


@dataclass(frozen=True)
class DeviceView:
    """A DeviceSide whose calls launch kernels of ``driver``."""

    driver: Driver
    channel: int  # address of its struct Ends
    launch: Callable[..., None]  # (stream, the kernel's action, its arguments after the channel's own)
    launching: Callable[[], AbstractContextManager[bool]]
    check: Callable[[int], None]
    link: str  # name of its kind
    recordable: bool = True
    lane_of_bulk: DeviceSide | None = None  # None: this one

    @property
    def bulk(self) -> DeviceSide:
        return self.lane_of_bulk or self

    def send(
        self, stream: int, source: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch_all(stream, kernel_launches.send(source, 0, nbytes, tag, timeout_ns, status, most))

    def send_two(
        self, stream: int, first: int, second: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch_all(stream, kernel_launches.send(first, second, nbytes, tag, timeout_ns, status, most))

    def receive(self, stream: int, target: int, room: int, nbytes: int, tag: int, timeout_ns: int, status: int) -> None:
        self._launch_all(stream, kernel_launches.receive(target, room, nbytes, tag, timeout_ns, status))

    def receive_due(
        self, stream: int, target: int, nbytes: int, tag: int, note: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch_all(stream, kernel_launches.receive_due(target, nbytes, tag, note, timeout_ns, status, most))

    @property
    def fuses_with(self) -> object:
        return self.driver.index, self.link

    def share(
        self, nbytes: int, tag: int, note: int, status: int, at: tuple[int, int], width: tuple[int, int]
    ) -> bytes:
        return SHARE.pack(self.channel, nbytes, tag, note, status, *at, *width)

    def send_all(
        self, stream: int, shares: int, count: int, rows: tuple[int, int, int, int], timeout_ns: int, most: int
    ) -> None:
        self._launch_several(stream, kernel_launches.send_all(shares, count, rows, timeout_ns, most))

    def receive_all(
        self, stream: int, shares: int, count: int, rows: tuple[int, int], timeout_ns: int, most: int
    ) -> None:
        self._launch_several(stream, kernel_launches.receive_all(shares, count, rows, timeout_ns, most))

    def _launch_all(self, stream: int, parts: Iterable[LaunchPart]) -> None:
        for call in parts:
            self.launch(stream, call.kernel, *call.arguments, blocks=call.blocks)

    def _launch_several(self, stream: int, parts: Iterable[LaunchPart]) -> None:
        for call in parts:
            self.driver.launch(stream, f"{self.link}_{call.kernel}", *call.arguments, blocks=call.blocks)


class KernelChannel(WatchedChannel):
    """A channel of a ``kind`` of link. Owns ``sock`` and ``parts``, which carry its messages, once this returns.
    ``describe``: returns the structs of its lanes, given the address of the abort word. ``events``: of a link that
    reports its own; what such a link has not sent when it is closed is lost, so it is flushed first.
    """

    def __init__(
        self, driver: Driver, kind: LinkKind, parts: ExitStack, describe: Callable[[int], bytes], sock: socket.socket,
        peer: str, session: Terms, *, listening: bool, events: LinkEvents | None = None,
    ) -> None:  # fmt: skip
        outbound, inbound = directions(session, listening=listening)
        super().__init__(sock, peer, session.epoch, outbound, inbound, session.peer_name(listening=listening))
        self._driver, self._kind, self._events = driver, kind, events
        self._lanes = 1 + (kind.has_bulk and session.kernels)
        self._steps = stride(outbound), stride(inbound)
        self._zero = session.epoch << EPOCH_SHIFT
        nbytes = 3 * LINE + outbound.slots * self._steps[SENDER] + inbound.slots * self._steps[RECEIVER]
        with ExitStack() as own:
            own.push(parts.pop_all())  # closed last
            # abort word, two mails, staging, received messages
            self._pinned = own.enter_context(closing(Pinned(driver, nbytes)))
            self._channel = driver.allocate(describe(self._pinned.address))
            own.callback(driver.free, self._channel)
            self._streams = tuple(own.enter_context(closing(CudaStream(driver))) for _ in range(2))
            self._free = weakref.finalize(self, own.pop_all().close)
        self._roles = threading.Lock(), threading.Lock()  # held by a role for the whole of its call
        self._grants = self._sent = self._received = self._released = 0
        self._launching = threading.Lock()  # held by launches; after memory is freed there are none
        self._watched = self._closed = False

    @property
    def gpu(self) -> int:
        return self._driver.index

    def hand_to_device(self) -> DeviceView:
        with self._open() as is_open:
            if not is_open:
                self._check("lend")
            if not self._watched:  # no call of the host checks the life line from here on
                self._watched = True
                view = self._pinned.view

                def end_waits() -> None:
                    view[0] = 1

                weakref.finalize(self, watch(self._sock, end_waits, self._events))
                for kernel in self._kind.at_once:
                    self._driver.load(f"{self._kind.name}_{kernel}")
            return self._view(0, self._view(1, None) if self._lanes > 1 else None)

    def take_from_device(self) -> None:
        with self._open() as is_open:
            if not is_open:
                return
            lanes = [self.lane_struct(lane) for lane in range(self._lanes)]
        ends = lanes[0]  # that of calls
        self._grants, self._sent = ends["granted"], ends["published"]
        self._received, self._released = ends["received"], ends["released"]
        if any(lane["reported"] != lane["released"] for lane in lanes):  # credit left to a message that did not come
            self._tell(self._released)

    def close(self) -> None:
        self._leave(CLOSED)
        with self._roles[SENDER], self._roles[RECEIVER], self._launching:
            if self._watched:
                with suppress(CudaError):  # kernels are over, even failed ones
                    self._driver.call("cuCtxSynchronize")
            self._closed = True
            self._free()
            self._sock.close()

    def _end_waits(self) -> None:
        self._pinned.view[0] = 1

    def _look(self) -> None:
        super()._look()
        if self._peer_end is None and self._events is not None and (why := self._events.failure()):
            self._lose_link(why)

    def _lose_link(self, why: str) -> None:
        """End the channel and notify the peer, which may only wait."""
        self._lose(why)
        self._say(f"aborted: {why}")

    def _finish(self) -> None:
        """Wait until a link with events no longer needs what was put, at most STALL_NS a lane; not for a peer that
        left.
        """
        if self._events is None or self._peer_end is not None:
            return
        with self._open() as is_open, suppress(CudaError), ExitStack() as parts:
            if not is_open:
                return  # its memory is freed
            stream = parts.enter_context(closing(CudaStream(self._driver)))
            # The abort word is set; after it, in its line, are one for this kernel and its status.
            at = self._address(self._pinned.view)
            for lane in range(self._lanes):
                rest = self._lane(lane), at + 8, STALL_NS, at + 16
                self._driver.launch(stream.number, f"{self._kind.name}_flush", *rest)

    def _broken(self, status: int) -> str:
        """Return the link's description of a kernel's ``status``."""
        return f"status {status} of csrc/netstack/device.h"

    def _lane(self, lane: int) -> int:
        """Return the address of its struct."""
        return self._channel + lane * self._kind.layout.nbytes

    def _view(self, lane: int, bulk: DeviceView | None) -> DeviceView:
        launch = partial(self._launch, self._lane(lane))
        check = self._check_kernels
        return DeviceView(self._driver, self._lane(lane), launch, self._open, check, self._kind.name, lane_of_bulk=bulk)

    def lane_struct(self, lane: int = 0) -> dict[str, int]:
        """Return the fields of a lane's struct in the GPU's memory; 1: of the lane for bulk."""
        layout = self._kind.layout
        return layout.unpack(self._driver.read(self._lane(lane), layout.nbytes))

    @contextmanager
    def _open(self) -> Iterator[bool]:
        with self._launching:
            yield not self._closed

    def _launch(self, lane: int, stream: int, kernel: str, *arguments: int, blocks: int = 1) -> None:
        with self._open() as is_open:
            if is_open:
                self._driver.launch(stream, f"{self._kind.name}_{kernel}", lane, *arguments, blocks=blocks)

    def _check_kernels(self, status: int) -> None:
        """Raise the error that a view's ``status`` means, or that the channel was closed, after which nothing is
        launched.
        """
        if status == OK and not self._closed:
            return
        self._check("a kernel")
        self._look()
        self._check_peer("a kernel")
        if status == TIMEOUT:
            raise ChannelTimeout(f"{self.peer}: a kernel: no message, or no free slot, within its time")
        why = BROKEN if status == FAULT else self._broken(status)
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
                return self._run(SENDER, "reserve", message, timeout_ns)

            if not self._wait(step, timeout_s, "reserve"):
                slots = self.outbound.slots
                raise NoResource(f"{self.peer}: reserve: none of {slots} slots became free within {timeout_s:g} s")
            self._grants += 1
            index = message % self.outbound.slots
            return index, self._place(SENDER, index)[:nbytes]

    def _publish(self, slot: Slot, tag: bytes) -> int:
        with self._roles[SENDER]:
            self._check("put_signal")
            self._check_peer("put_signal")
            mail = self._mail(SENDER)
            MAIL.pack_into(mail, 0, slot.data.nbytes, tag, OK)
            address = self._address(mail)
            payload = self._address(self._place(SENDER, slot.index))
            try:
                status = self._run(SENDER, "put", payload, address, address + TAG_OFFSET, STALL_NS)
            except BaseException:
                self._lose("a put was interrupted half-way")
                raise
            if status != OK:
                self._check("put_signal")
                self._lose("its memory takes nothing" if status == TIMEOUT else self._broken(status))
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
                return self._run(RECEIVER, "take", message, self._address(place), *rest)

            if not self._wait(step, timeout_s, "wait_signal"):
                raise ChannelTimeout(f"{self.peer}: wait_signal: no message within {timeout_s:g} s")
            self._received += 1
            nbytes, tag, _ = MAIL.unpack_from(mail)
            return self._zero + self._received, tag, place[:nbytes].toreadonly()

    def _give_back(self) -> None:
        self._tell(self._released + 1)

    def _tell(self, released: int) -> None:
        with self._roles[RECEIVER]:
            if not self._stopped and self._peer_end is None:
                self._released = released
                self._run(RECEIVER, "release", released, STALL_NS)

    def _wait(self, step: Callable[[int], int], timeout_s: float, operation: str) -> bool:
        """Call ``step`` until it returns OK; False once ``timeout_s`` has passed. Messages from before the peer's end
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
            if status not in (TIMEOUT, ABORTED):
                self._lose(BROKEN if status == FAULT else self._broken(status))
                over = True
            if over:
                self._check_peer(operation)
            self._look()
            left = deadline - monotonic()
            if self._peer_end is None and left <= 0:
                return False
            pause = 0.0 if self._peer_end else min(left, SLICE_S)

    def _run(self, role: int, kernel: str, *arguments: int) -> int:
        """Launch a kernel, wait, and return its status. A failure of the driver ends the channel."""
        mail = self._mail(role)
        mail[STATUS_OFFSET : STATUS_OFFSET + 4] = bytes(4)
        try:
            status = self._address(mail) + STATUS_OFFSET
            stream = self._streams[role]
            self._driver.launch(stream.number, f"{self._kind.name}_{kernel}", self._channel, *arguments, status)
            stream.synchronize()
        except CudaError as error:
            self._lose(str(error))
            raise PeerFault(f"{self.peer}: {kernel}: {error}") from error
        return int(MAIL.unpack_from(mail)[2])

    def _mail(self, role: int) -> memoryview:
        return self._pinned.view[(1 + role) * LINE : (2 + role) * LINE]

    def _place(self, role: int, index: int) -> memoryview:
        """Return the pinned memory of a slot's payload."""
        base = 3 * LINE + (self.outbound.slots * self._steps[SENDER] if role == RECEIVER else 0)
        start = base + index * self._steps[role]
        return self._pinned.view[start : start + self._steps[role]]

    def _address(self, part: memoryview) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(part))


def leave_all_channels(opened: Iterable[object]) -> None:
    """Leave all channels of kernels before any of them is closed: closing waits for kernels, which may wait for peers
    of other channels.
    """
    for channel in list(opened):
        if isinstance(channel, KernelChannel):
            channel._leave(CLOSED)


def directions(terms: Terms, *, listening: bool) -> tuple[Geometry, Geometry]:
    """Return (outbound, inbound) of this side."""
    return (terms.inbound, terms.outbound) if listening else (terms.outbound, terms.inbound)
