"""The transport ``mlx5`` between GPUs of two hosts: kernels build the work requests of a ConnectX, ring it, and poll
for messages.

HARDWARE-UNVERIFIED. The kernels (csrc/netstack/mlx5.h) are proven on CPUs against a software NIC and weak memory. This
module runs with the distribution's libmlx5 over a stand-in of its kernel driver, and one of CUDA's.

Peers meet as in ``verbs``: over TCP, which stays as the life line, with cards under the session's keys. Each channel
has a queue pair for calls and for urgent messages, both ways. A channel of kernels has another one for bulk, from the
connector to the listener, so that urgent messages never wait in the NIC for bulk.

Inbox and staging are memory of the GPU, which the NIC accesses by dma-buf or nvidia-peermem; a peer may write to the
inbox, and has no other access. Ring, completions and records of a queue pair lie in the GPU's memory too, if the NIC's
firmware accepts that (DEVX, by dma-buf). Otherwise they are libmlx5's, in host memory, which is mapped for kernels. So
is the page of the doorbell. If the driver does not map that, kernels write a word in host memory, and a thread near the
NIC rings.

A message is two RDMA writes, the second of which is its signal. So the network must deliver in order, without adaptive
routing, and the GPU must report that its kernels see a NIC's writes in their order. NICs' messages are neither
encrypted nor authenticated: use a network that strangers cannot write to.
"""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, exchanged
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.bootstrap.self_test import by_host
from lamina.netstack.contract.base import rdma_device
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, MAX_MESSAGE_BYTES, Geometry
from lamina.netstack.contract.fabric import HandshakeError
from lamina.netstack.cuda.channel_memory import clear_inbox, inbox_bytes
from lamina.netstack.cuda.cuda import chosen_gpu
from lamina.netstack.cuda.driver import DMA_BUF, CudaError, Driver
from lamina.netstack.cuda.kernel_channel import directions, leave_all_channels
from lamina.netstack.host.native_module import Ringer, mlx5_fault, open_kernel_pair, rings_bytes
from lamina.netstack.rdma.card import ConnectionCard, QueuePairAddress
from lamina.netstack.rdma.native_backend import TRIAL, LibibverbsProvider, Place, card_of
from lamina.netstack.rdma.nearest_port import cores_of
from lamina.netstack.rdma.verbs import VerbsFabric

from .channel import Mlx5Channel, NicLane
from .gpu_memory import NO_PIECE, HostPages, Mailbox, NicMemory, doorbell_fault, why_unusable
from .kernel_self_test import by_kernels
from .laned_card import LanedCard, opened_lanes

if TYPE_CHECKING:
    from lamina.netstack.host._netstack import KernelPair

log = logging.getLogger(__name__)
BLOCKS_LEAST = 8
WQE_BYTES = CQE_BYTES = 64
RECORD_BYTES = REGISTER_BYTES = 8
NO_COMPLETION = bytes(CQE_BYTES - 1) + b"\xf1"  # the NIC may write over it


class Mlx5Provider(LibibverbsProvider):
    """A LibibverbsProvider for kernels of ``driver``'s GPU."""

    scheme = "mlx5"

    def __init__(self, wanted: str, driver: Driver) -> None:
        self._driver = driver
        self.ringer: Ringer | None = None  # set if the GPU may not ring
        self._has_rings = False  # whether rings of queue pairs lie in the GPU's memory
        self._unsaid = list[str]()  # remarks to log at the first meeting
        super().__init__(wanted, spin_s=0.0, gpu=driver.pci_address)

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        outbound, inbound = directions(session, listening=listening)
        if (most := max(outbound.slot_bytes, inbound.slot_bytes)) > MAX_MESSAGE_BYTES:
            raise HandshakeError(f"slot_bytes is at most {MAX_MESSAGE_BYTES} over {self.scheme}, not {most}")
        while self._unsaid:
            log.warning("%s", self._unsaid.pop())
        with ExitStack() as parts:
            shapes = outbound, inbound
            lanes = self._lanes(parts, self._place(), *shapes, listening=listening, kernels=session.kernels)
            for lane in lanes:
                if lane.inbound is not None:
                    clear_inbox(self._driver, lane.inbox, session.epoch << EPOCH_SHIFT)
            ours = LanedCard(tuple(card_of(lane.pair) for lane in lanes))
            sizes = (inbox_bytes(outbound), 0 if listening else inbox_bytes(outbound))[: len(lanes)]
            theirs: list[LanedCard] = []

            def reach(text: bytes) -> None:
                theirs.append(opened_lanes(text, sizes, our_lid=ours.lanes[0].route.lid))
                self._packets.compare(ours.lanes[0].route, theirs[0].lanes[0].route, peer)
                for lane, card in zip(lanes, theirs[0].lanes, strict=True):
                    connect(lane.pair, card)

            yield from exchanged(sock, exchange_cards(session, ours.pack(), reach, listening=listening))
            try:
                return Mlx5Channel(self._driver, parts, lanes, theirs[0], sock, peer, session, listening=listening)
            except CudaError as error:
                raise HandshakeError(str(error)) from error

    def close(self) -> None:
        if self.ringer is not None:
            self.ringer.close()
        self._driver.close()

    def _try(self, place: Place) -> QueuePairAddress:
        why = "" if self._driver.attribute(DMA_BUF) else "its driver exports none to NICs (dma-buf)"
        self._has_rings = not why
        try:
            route = self._open_and_close(place)
        except OSError as error:
            if not self._has_rings:
                raise
            why, self._has_rings = str(error), False
            route = self._open_and_close(place)
        if why:
            self.remarks.append(f"rings of queue pairs lie in the host's memory, not in the GPU's: {why}")
            log.info("%s", self.remarks[-1])
        return route

    def _open_and_close(self, place: Place) -> QueuePairAddress:
        with ExitStack() as parts:
            first, _bulk = self._lanes(parts, place, TRIAL, TRIAL, listening=False, kernels=True)
            return card_of(first.pair).route

    def _lanes(
        self, parts: ExitStack, place: Place, outbound: Geometry, inbound: Geometry, *, listening: bool, kernels: bool
    ) -> tuple[NicLane, ...]:
        """Return the first lane, and for ``kernels`` that of bulk. ``parts`` frees their resources. Raises OSError with
        the driver's or device's refusal.
        """
        if not kernels:
            return (self._lane(parts, place, outbound, inbound),)
        first = self._lane(parts, place, outbound, inbound, credits=inbound.slots if listening else 0)
        bulk = (None, inbound) if listening else (outbound, None)
        return first, self._lane(parts, place, *bulk)

    def _lane(
        self, parts: ExitStack, place: Place, outbound: Geometry | None, inbound: Geometry | None, credits: int = 0
    ) -> NicLane:
        """Return a lane. ``credits``: credits of another lane that this one may have to send separately, at most."""
        driver = self._driver
        staging, inbox = (
            parts.enter_context(closing(NicMemory(driver, inbox_bytes(geometry)))) if geometry else None
            for geometry in (outbound, inbound)
        )
        requests = sum(n * geometry.slots for n, geometry in ((2, outbound), (1, inbound)) if geometry)
        blocks = ring_blocks(requests + credits)
        rings = parts.enter_context(closing(NicMemory(driver, rings_bytes(blocks)))) if self._has_rings else None
        if rings is not None:
            driver.call("cuMemsetD8_v2", rings.address, 0, rings_bytes(blocks))
        pieces = (memory.piece if memory else NO_PIECE for memory in (staging, inbox, rings))
        pair = open_kernel_pair(*place, blocks, *pieces)
        parts.enter_context(closing(pair))
        parts.callback(pair.halt)
        queue = pair.queue()
        if rings is not None:
            driver.write(queue["completions"], NO_COMPLETION * queue["cqes"])
        else:
            held = [(queue["ring"], queue["blocks"] * WQE_BYTES), (queue["completions"], queue["cqes"] * CQE_BYTES)]
            held += [(queue[record], RECORD_BYTES) for record in ("record", "seen")]
            pages = parts.enter_context(closing(HostPages(driver, held)))
            queue |= {name: pages.of(queue[name]) for name in ("ring", "completions", "record", "seen")}
        queue |= self._doorbell(parts, queue["doorbell"], queue["alternate"])
        addresses = (memory.address if memory else 0 for memory in (staging, inbox))
        return NicLane(pair, queue, outbound, inbound, *addresses)

    def _doorbell(self, parts: ExitStack, doorbell: int, alternate: int) -> dict[str, int]:
        """Return the fields of the doorbell that kernels use for these two."""
        if self.ringer is None:
            try:
                ringing = [(doorbell, alternate + REGISTER_BYTES)]
                registers = parts.enter_context(closing(HostPages(self._driver, ringing, registers=True)))
                return {"doorbell": registers.of(doorbell)}
            except CudaError as error:
                self.remarks.append(doorbell_fault(error))
                self._unsaid.append(self.remarks[-1])
                self.ringer = Ringer(cores_of(self._port.device))
        mailbox = parts.enter_context(closing(Mailbox(self._driver, self.ringer, doorbell, alternate)))
        return {"doorbell": mailbox.address, "alternate": 0}


def ring_blocks(requests: int) -> int:
    """Return a power of two of blocks, for so many work requests in flight."""
    return max(BLOCKS_LEAST, 1 << (requests - 1).bit_length())


def connect(pair: KernelPair, card: ConnectionCard) -> None:
    """Connect a queue pair to the peer's. Raises HandshakeError."""
    r = card.route
    try:
        pair.connect(r.gid, r.lid, r.number, r.psn, r.mtu, card.key, card.address)
    except OSError as error:
        raise HandshakeError(str(error)) from error


class Mlx5Fabric(VerbsFabric):
    """Listens and connects as ``verbs`` does; its trials use each queue of a channel."""

    scheme = "mlx5"
    self_test_paths = by_host, by_kernels

    def close(self) -> None:
        leave_all_channels(self._opened)
        super().close()


def open_fabric(key: bytes, *, gpu: int = 0, device: str = "") -> Mlx5Fabric:
    """Open the transport. Raises ImportError, with its cause, if there is no GPU or no NIC for it."""
    if fault := mlx5_fault():
        raise ImportError(_unusable(fault))
    try:
        driver = Driver(chosen_gpu(gpu))
    except ImportError as error:
        raise ImportError(_unusable(error)) from error
    try:
        if why := why_unusable(driver):
            raise ImportError(_unusable(f"this GPU is none for it: {why}"))
        return Mlx5Fabric(key, way=Mlx5Provider(rdma_device(device), driver))
    except BaseException:
        driver.close()
        raise


def _unusable(cause: object) -> str:
    fix = "take --transport verbs, or see what `lamina-launch doctor --transport mlx5` finds"
    return f"transport 'mlx5' cannot be used here: {cause}; {fix}"
