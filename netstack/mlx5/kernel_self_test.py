"""A trial over both queues of a channel of kernels. Messages go by the queue of bulk, as K and V do, and come back by
the first, through the kernels that a step of Lamina launches. Only the first queue reports freed slots, so more
messages than slots show that credit of bulk comes back. HARDWARE-UNVERIFIED: run against a stand-in of the CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from time import monotonic

from lamina.netstack.bootstrap.self_test import SELF_TEST_TAG
from lamina.netstack.contract.fabric import Channel, PeerFault
from lamina.netstack.cuda.driver import CudaError, CudaStream, Pinned
from lamina.netstack.cuda.kernel_channel import MAIL, STATUS_OFFSET, TAG_OFFSET, DeviceView, KernelChannel
from lamina.netstack.host.native_module import OK, TIMEOUT

PAYLOAD_AT = 64  # after a line with a message's MAIL
SLICE_NS = 50_000_000  # of a kernel's wait: how often the host checks the clock


class KernelSelfTestCalls:
    """Kernels that send by ``out`` and receive by ``into``, one at a time, from and to pinned memory."""

    def __init__(self, parts: ExitStack, peer: str, out: DeviceView, into: DeviceView) -> None:
        """Allocate memory and a stream. Raises CudaError."""
        self._peer, self.out, self._into = peer, out, into
        self._mail = parts.enter_context(closing(Pinned(out.driver, PAYLOAD_AT + SELF_TEST_TAG.slot_bytes)))
        self._stream = parts.enter_context(closing(CudaStream(out.driver)))

    def send(self, tag: bytes, payload: bytes, deadline: float) -> None:
        self._mail.view[PAYLOAD_AT : PAYLOAD_AT + len(payload)] = payload

        def put(stream: int, at: int) -> None:
            self.out.send(stream, at + PAYLOAD_AT, at, at + TAG_OFFSET, SLICE_NS, at + STATUS_OFFSET)

        self._until(deadline, self.out, MAIL.pack(len(payload), tag, OK), put)

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        def take(stream: int, at: int) -> None:
            rest = at, at + TAG_OFFSET, SLICE_NS, at + STATUS_OFFSET
            self._into.receive(stream, at + PAYLOAD_AT, SELF_TEST_TAG.slot_bytes, *rest)

        self._until(deadline, self._into, bytes(MAIL.size), take)
        nbytes, tag, _ = MAIL.unpack_from(self._mail.view)
        return tag, bytes(self._mail.view[PAYLOAD_AT : PAYLOAD_AT + nbytes])

    def _until(self, deadline: float, side: DeviceView, head: bytes, launch: Callable[[int, int], None]) -> None:
        """Launch until the kernel has succeeded: one that timed out has done nothing. Raises ChannelError."""
        status = TIMEOUT
        while status == TIMEOUT and monotonic() < deadline:
            self._mail.view[: MAIL.size] = head
            try:
                launch(self._stream.number, self._mail.address)
                self._stream.synchronize()
            except CudaError as error:
                raise PeerFault(f"{self._peer}: a kernel of the trial: {error}") from error
            _, _, status = MAIL.unpack_from(self._mail.view)
        side.check(status)


@contextmanager
def by_kernels(channel: Channel, listening: bool) -> Iterator[KernelSelfTestCalls]:
    if not isinstance(channel, KernelChannel):
        raise TypeError(f"no channel of kernels: {channel!r}")
    with ExitStack() as parts:
        try:
            first = channel.hand_to_device()
            there = first, first.bulk if isinstance(first.bulk, DeviceView) else first
            out, into = there if listening else there[::-1]
            calls = KernelSelfTestCalls(parts, channel.peer, out, into)
        except CudaError as error:
            raise PeerFault(f"{channel.peer}: a trial by kernels: {error}") from error
        yield calls
