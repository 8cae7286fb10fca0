"""The transport ``cuda`` between GPUs of one host, or two processes on one GPU: kernels put into the peer's inbox, in
device memory.

HARDWARE-UNVERIFIED. The kernels (csrc/netstack/kernels, memory_channel.h) are proven on CPUs against weak memory, and
this module runs against a stand-in of the CUDA driver; neither has run on a GPU.

Peers meet as in ``shm``. Each makes an inbox in its GPU's memory and sends the other a descriptor of it, by the
driver's virtual memory management. The memory lives until both have released it, so no side keeps a dead mapping. After
that a message is a few stores of a kernel over NVLink or PCIe, or within the GPU.

Two processes on one GPU take turns on it, unless MPS runs: it works, slowly. Within a process, see loopback_gpu.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Generator
from contextlib import ExitStack, closing

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Wants, drive
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, Terms
from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric
from lamina.netstack.host.shm import ShmFabric

from .channel_memory import ENDS, clear_inbox, inbox_bytes, new_ends
from .driver import Driver, Shared
from .kernel_channel import KernelChannel, LinkKind, directions, leave_all_channels

DEVICE = "LAMINA_CUDA_DEVICE"
MEMORY = LinkKind("memory", ENDS)
CARD = struct.Struct("!4sQ")  # magic, bytes of the inbox
MAGIC = b"CUDA"


class CudaChannel(KernelChannel):
    """Owns ``sock`` and ``inbox`` once this returns; ``theirs`` is the descriptor of the peer's inbox, owned by the
    caller.
    """

    def __init__(
        self, driver: Driver, inbox: Shared, theirs: int, sock: socket.socket, peer: str, terms: Terms, *,
        listening: bool,
    ) -> None:  # fmt: skip
        outbound, inbound = directions(terms, listening=listening)
        with ExitStack() as parts:
            reach = parts.enter_context(closing(Shared(driver, inbox_bytes(outbound), theirs)))
            parts.callback(inbox.close)

            def describe(abort: int) -> bytes:
                return new_ends(reach.address, inbox.address, abort, outbound, inbound, terms.epoch << EPOCH_SHIFT)

            super().__init__(driver, MEMORY, parts, describe, sock, peer, terms, listening=listening)


class CudaFabric(ShmFabric):
    """Listens and connects as ``shm`` does, on this host and for this user only."""

    scheme = "cuda"

    def __init__(self, key: bytes, driver: Driver) -> None:
        super().__init__(key)
        self._driver = driver

    def close(self) -> None:
        leave_all_channels(self._opened)
        super().close()
        self._driver.close()

    def _meet(self, sock: socket.socket, url: str, terms: AuthenticatedTerms, deadline: float) -> Channel:
        try:
            return drive(self._exchange(sock, url, terms, listening=False), url, deadline=deadline)
        except OSError as error:
            raise ChannelError(f"{url}: connect: {error}") from error

    def _welcome(self, url: str, sock: socket.socket, terms: AuthenticatedTerms) -> Meeting:
        return self._exchange(sock, url, terms, listening=True)

    def _exchange(self, sock: socket.socket, url: str, terms: Terms, *, listening: bool) -> Meeting:
        """Send the peer our inbox and receive its inbox."""
        outbound, inbound = directions(terms, listening=listening)
        inbox = Shared(self._driver, inbox_bytes(inbound))
        try:
            clear_inbox(self._driver, inbox.address, terms.epoch << EPOCH_SHIFT)
            handle = inbox.export()
            try:
                socket.send_fds(sock, [CARD.pack(MAGIC, inbox_bytes(inbound))], [handle])
            finally:
                os.close(handle)
            theirs = yield from receive_descriptor(sock, inbox_bytes(outbound))
            try:
                channel = CudaChannel(self._driver, inbox, theirs, sock, url, terms, listening=listening)
            finally:
                os.close(theirs)
        except BaseException:
            inbox.close()
            raise
        self._opened.add(channel)
        return channel


def receive_descriptor(sock: socket.socket, nbytes: int) -> Generator[Wants, None, int]:
    """Return the descriptor of the peer's inbox of ``nbytes``, once ``sock`` has it. Raises OSError."""
    yield {sock.fileno(): select.POLLIN}
    card, fds, _, _ = socket.recv_fds(sock, CARD.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != 1 or card != CARD.pack(MAGIC, nbytes):
        for fd in fds:
            os.close(fd)
        raise OSError("the peer's inbox is not what the terms say" if card else "the peer has no memory for its inbox")
    return int(fds[0])


def chosen_gpu(gpu: int) -> int:
    """Return the GPU of the environment, else ``gpu``. Raises ImportError if the environment's is no number."""
    text = os.environ.get(DEVICE, "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ImportError(f"{DEVICE} is the number of a GPU, such as 0, not {text!r}")
    return int(text or gpu)


def open_fabric(key: bytes, *, gpu: int = 0) -> Fabric:
    """Open the transport. Raises ImportError, with its cause, if there is no GPU whose memory processes can share."""
    try:
        driver = Driver(chosen_gpu(gpu))
    except ImportError as error:
        raise ImportError(_unusable(error)) from error
    if not driver.shares_memory:
        driver.close()
        raise ImportError(_unusable("this GPU's memory cannot be shared by descriptors"))
    return CudaFabric(key, driver)


def _unusable(cause: object) -> str:
    fix = "use another --transport (on one host shm), or see what `lamina-launch doctor --transport cuda` finds"
    return f"transport 'cuda' cannot be used here: {cause}; {fix}"
