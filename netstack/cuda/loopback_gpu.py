"""Channels of ``loopback`` whose ends compute on one GPU: messages of kernels move in its memory, on two streams.

Kernels of ``cuda`` poll for messages of a peer in another process. In one process both ends are streams of one context,
and there a polling kernel can keep its peer from ever being launched. What the peer's thread does first may wait for
everything that runs in the context. That includes a kernel's first use (lazy loading), and memory that an allocator
frees (cudaFree) or pins. Streams beyond CUDA_DEVICE_MAX_CONNECTIONS share queues. torch and CuPy do such things at any
time.

So no kernel is put on the GPU here before its message is there. A call first waits, on the host, until the peer's host
has put its kernel, followed by an event, on a stream. Then it puts a wait for that event, the kernel, and the next
event. So each kernel on a stream ends by itself, and no multiprocessor polls.

The price is that hosts take part in every message, while a graph's replay needs no host. So messages are not part of
graphs, which end before each one. Hosts do not wait for the GPU; both run ahead of it.

The kernels are those of ``cuda``, with all their checks. They get no time to wait: the expected message is there, or
the kernel that should send it has failed. Calls of the host stay in the host's memory, so an idle channel costs the GPU
nothing.

HARDWARE-UNVERIFIED: run against a stand-in of the CUDA driver.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from typing import NoReturn

from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, Geometry, Terms
from lamina.netstack.contract.fabric import DEATH_NOTICED_S, ChannelError, ChannelTimeout, DeviceSide, Fabric, PeerFault
from lamina.netstack.host.loopback_host import LoopbackChannel, LoopbackFabric, LoopbackLink
from lamina.netstack.host.native_module import LINE, OK, SLOTS_AT, TIMEOUT

from . import kernel_launches
from .channel_memory import ENDS, clear_inbox, inbox_bytes, new_ends
from .driver import CudaError, CudaEvent, Driver
from .kernel_channel import BROKEN
from .kernel_launches import KERNELS_OF_CALLS, LaunchPart

log = logging.getLogger(__name__)
STEP = -(-ENDS.nbytes // LINE) * LINE
ENDS_AT, ABORT_AT, INBOXES_AT = (0, STEP), 2 * STEP, SLOTS_AT  # the abort word stays 0: no kernel waits
NO_NS = 0


class Rings:
    """A link in the GPU's memory, and the progress of the hosts on it. Directions are those of
    ``LoopbackLink.inboxes``.
    """

    def __init__(self, driver: Driver, geometries: tuple[Geometry, Geometry], epoch: int) -> None:
        """``driver`` may be closed earlier: the context belongs to both ends, and lives as long as one of them."""
        self.counts = [[0, 0], [0, 0]]  # of each direction: kernels that send and that receive, put on streams
        sizes = [inbox_bytes(geometry) for geometry in geometries]
        with ExitStack() as parts:
            base = driver.allocate(bytes(INBOXES_AT), INBOXES_AT + sum(sizes))
            parts.callback(driver.free, base)
            inboxes, zero = (base + INBOXES_AT, base + INBOXES_AT + sizes[0]), epoch << EPOCH_SHIFT
            for side, (out, into) in enumerate((geometries, geometries[::-1])):
                clear_inbox(driver, inboxes[side], zero)
                pointers = inboxes[side], inboxes[1 - side], base + ABORT_AT
                driver.write(base + ENDS_AT[side], new_ends(*pointers, out, into, zero, near=True))
            self.ends = tuple(base + at for at in ENDS_AT)
            # An event for each slot: its last use, by the sender and the receiver in turn. With one for a direction Q
            # would wait for K and V if the sender's host is ahead. Closed first, so that no kernel is left.
            self._events = [
                [parts.enter_context(closing(CudaEvent(driver))) for _ in range(x.slots)] for x in geometries
            ]
            self.close = parts.pop_all().close

    def due(self, direction: int, *, sends: bool) -> bool:
        """Return True if the peer's part of the next message, or of its slot, is on a stream."""
        sent, received = self.counts[direction]
        return sent - received < len(self._events[direction]) if sends else received < sent

    def launch(self, driver: Driver, side: int, sends: bool, stream: int, parts: Sequence[LaunchPart]) -> None:
        """Put a message, once it is due, after the peer's part. Raises CudaError."""
        direction = side if sends else 1 - side
        counts, events = self.counts[direction], self._events[direction]
        event = events[counts[not sends] % len(events)]
        event.wait(stream)
        for call in parts:
            driver.launch(stream, f"memory_{call.kernel}", self.ends[side], *call.arguments, blocks=call.blocks)
        event.record(stream)
        counts[not sends] += 1


class LoopbackGpuLink(LoopbackLink):
    """A link with ``rings``, from the first ``hand_to_device`` until both ends have left."""

    def __init__(self, outbound: Geometry, inbound: Geometry, gpu: int | None) -> None:
        super().__init__(outbound, inbound, gpu)
        self.geometries = outbound, inbound
        self.rings: Rings | None = None
        self._left = set[int]()

    def leave(self, side: int) -> None:
        """Note that a side has left; the last one frees the rings. Idempotent."""
        with self.changed:
            self._left.add(side)
            if len(self._left) == len(self.ends) and self.rings is not None:
                with suppress(CudaError):  # a kernel failed: the context, and all that is in it, is lost
                    self.rings.close()
                self.rings = None


class LoopbackGpuChannel(LoopbackChannel):
    """An end that kernels can use."""

    def __init__(self, link: LoopbackGpuLink, side: int, peer: str, terms: Terms, driver: Driver) -> None:
        super().__init__(link, side, peer, terms)
        self._shared, self._driver = link, driver
        self._leave = weakref.finalize(self, link.leave, side)

    @property
    def gpu(self) -> int:
        return self._driver.index

    def hand_to_device(self) -> DeviceSide:
        link = self._shared
        with self._changed:
            self._check("lend")
            self._check_peer("lend")
            try:
                if link.rings is None:
                    link.rings = Rings(self._driver, link.geometries, self.epoch)
                for kernel in KERNELS_OF_CALLS:
                    self._driver.load(f"memory_{kernel}")
            except CudaError as error:
                raise ChannelError(f"{self.peer}: lend: {error}") from error
        return OrderedView(self)

    def take_from_device(self) -> None:
        """Do nothing: calls have slots and counters of their own."""

    def close(self) -> None:
        super().close()
        self._leave()

    def launch(self, sends: bool, timeout_ns: int, stream: int, parts: Sequence[LaunchPart]) -> None:
        """Put a message, once it is due. Raises ChannelError, CudaError."""
        link, direction = self._shared, self._side if sends else 1 - self._side

        def due() -> bool:
            return link.rings is not None and link.rings.due(direction, sends=sends)

        with self._changed:
            self._changed.wait_for(lambda: due() or any(link.ends), timeout_ns / 1e9)
            self._check("a kernel")
            if sends or not due():  # messages from before the peer's end count
                self._check_peer("a kernel")
            if link.rings is None or not due():
                raise ChannelTimeout(f"{self.peer}: a kernel: no message, or no free slot, within its time")
            link.rings.launch(self._driver, self._side, sends, stream, parts)
            self._changed.notify_all()

    def explain(self, status: int) -> NoReturn:
        """Raise the error that a kernel's ``status`` means."""
        with self._changed:
            if status == TIMEOUT:  # a kernel of the peer has failed, and its host is about to report why
                self._changed.wait_for(lambda: any(self._shared.ends), DEATH_NOTICED_S)
            self._check("a kernel")
            self._check_peer("a kernel")
        if status == TIMEOUT:
            raise ChannelTimeout(f"{self.peer}: a kernel: what was due did not come: a kernel of the peer has failed")
        raise PeerFault(f"{self.peer}: a kernel: {BROKEN}")


class OrderedView:
    """A DeviceSide between streams of one process. ``check`` raises for a call that has failed on the host; later calls
    do nothing.
    """

    recordable = False

    def __init__(self, channel: LoopbackGpuChannel) -> None:
        self._channel = channel
        self._failure: Exception | None = None

    @property
    def bulk(self) -> OrderedView:
        return self

    def send(
        self, stream: int, source: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch(True, timeout_ns, stream, kernel_launches.send(source, 0, nbytes, tag, NO_NS, status, most))

    def send_two(
        self, stream: int, first: int, second: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch(True, timeout_ns, stream, kernel_launches.send(first, second, nbytes, tag, NO_NS, status, most))

    def receive_due(
        self, stream: int, target: int, nbytes: int, tag: int, note: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        self._launch(
            False, timeout_ns, stream, kernel_launches.receive_due(target, nbytes, tag, note, NO_NS, status, most)
        )

    fuses_with = None

    def share(self, *_: object) -> NoReturn:
        raise TypeError("channels of one process have a launch for each message")

    send_all = receive_all = share

    def launching(self) -> AbstractContextManager[bool]:
        """Return a block that yields True: its calls are never part of a graph."""
        return nullcontext(True)

    def check(self, status: int) -> None:
        if self._failure is not None:
            raise self._failure
        if status != OK:
            self._channel.explain(status)

    def _launch(self, sends: bool, timeout_ns: int, stream: int, parts: Sequence[LaunchPart]) -> None:
        if self._failure is not None:
            return
        try:
            self._channel.launch(sends, timeout_ns, stream, parts)
        except ChannelError as error:
            self._failure = error
        except CudaError as error:
            self._failure = PeerFault(f"{self._channel.peer}: {parts[0].kernel}: {error}")


class LoopbackGpuFabric(LoopbackFabric):
    """A fabric whose channels are LoopbackGpuChannels if both ends are on one GPU."""

    def __init__(self, key: bytes, driver: Driver) -> None:
        super().__init__(key)
        self._driver = driver
        self.gpu = driver.index

    def close(self) -> None:
        super().close()
        self._driver.close()

    def _link(self, outbound: Geometry, inbound: Geometry, gpu: int | None) -> LoopbackLink:
        return LoopbackGpuLink(outbound, inbound, gpu)

    def _make(self, link: LoopbackLink, side: int, peer: str, terms: Terms) -> LoopbackChannel:
        if link.gpu is None or not isinstance(link, LoopbackGpuLink):
            return super()._make(link, side, peer, terms)
        return LoopbackGpuChannel(link, side, peer, terms, self._driver)


def open_on(key: bytes, gpu: int) -> Fabric:
    """Open the fabric; if there are no kernels, without device sides and with a warning."""
    try:
        return LoopbackGpuFabric(key, Driver(gpu))
    except ImportError as error:
        log.warning("layer messages go through the host's memory, not the GPU's: %s", error)
        return LoopbackFabric(key)
