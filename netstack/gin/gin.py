"""The transport ``gin`` between GPUs of two hosts: kernels put by NCCL's device API (GIN), which drives the NICs that
it knows.

HARDWARE-UNVERIFIED. Kernels are compiled with NCCL's headers, and this module runs with a stand-in of the library and
one of CUDA's driver; neither has run on a GPU.

Peers meet as in ``verbs``: over TCP, which stays as the life line, with cards under the session's keys. The connector's
card names a communicator of the two, which both then make together, with a window that each accesses on the other. NCCL
chooses its NIC, its GID and its queues (NCCL_IB_HCA, NCCL_IB_GID_INDEX). A message is one put with a strong signal, so
the network may reorder. In a channel of kernels, bulk uses a context of its own, a queue of NCCL's. NCCL's own sockets
and the NICs' messages are neither encrypted nor authenticated: use a network that strangers cannot write to.

Making a communicator takes memory of the GPU and may wait for kernels that run on it, which may wait for a peer. So all
channels are made before the first step, and pools that change later need another transport (``schemes.AT_START``).
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from time import monotonic

from lamina.netstack.bootstrap.background_call import BackgroundCall, has_disconnected
from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Wants, exchanged
from lamina.netstack.bootstrap.listener import HANDSHAKE_S, Meeting, StreamListener
from lamina.netstack.contract.channel_terms import EPOCH_SHIFT, MAX_MESSAGE_BYTES, Geometry
from lamina.netstack.contract.fabric import Channel, Fabric, HandshakeError
from lamina.netstack.contract.struct_layout import StructLayout
from lamina.netstack.cuda.channel_memory import clear_inbox, ends_of, inbox_bytes
from lamina.netstack.cuda.cuda import chosen_gpu
from lamina.netstack.cuda.driver import Driver
from lamina.netstack.cuda.kernel_channel import KernelChannel, LinkKind, directions, leave_all_channels
from lamina.netstack.cuda.kernel_launches import KERNELS_AT_ONCE
from lamina.netstack.host.native_module import gin_layout
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.rdma.traffic_class import PARTITION, SERVICE_LEVEL, TIMEOUT, USUAL_TIMEOUT, NetworkService, service
from lamina.netstack.rdma.verbs import VerbsFabric

from .compiler import BY_NVCC
from .nccl import ID_BYTES, Communicator, NcclError, NcclLibrary

GIN = LinkKind("gin", StructLayout(*gin_layout()), has_bulk=True, at_once=(*KERNELS_AT_ONCE, "flush"))
CARD = struct.Struct(f"!4sI{ID_BYTES}s")  # magic, version of NCCL, the communicator's name
MAGIC, MADE = b"NGIN", b"made"
MAKE_S = HANDSHAKE_S - 1.0  # for both to make a communicator, before the listener drops the connector as silent
LATE_S = 1.0  # between the two
PAGE = 4096


@dataclass(frozen=True)
class WindowLane:
    """A lane in the window: the offsets of the messages that this side sends, and receives. Without a geometry a
    direction has no messages.
    """

    to: int
    origin: int
    outbound: Geometry | None
    inbound: Geometry | None


@dataclass(frozen=True)
class GinLink:
    """``parts``: all resources, to be closed once. ``base``: the address of the window. It has ``lanes``: the first
    and, for kernels, that of bulk. ``fields``: of each lane's struct.
    """

    parts: ExitStack
    communicator: Communicator
    base: int
    lanes: tuple[WindowLane, ...]
    fields: dict[str, int]


class NcclEvents:
    """The events of a communicator, whose faults no descriptor reports."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def fileno(self) -> int:
        return -1

    def failure(self) -> str:
        why = self._communicator.fault()
        return f"NCCL reports: {why}" if why else ""


class GinChannel(KernelChannel):
    """Owns ``sock`` and the parts of ``link`` once this returns."""

    def __init__(
        self,
        driver: Driver,
        link: GinLink,
        sock: socket.socket,
        peer: str,
        session: AuthenticatedTerms,
        *,
        listening: bool,
    ) -> None:
        zero = session.epoch << EPOCH_SHIFT

        def describe(abort: int) -> bytes:
            structs = list[bytes]()
            for context, lane in enumerate(link.lanes):
                places = link.base + lane.to, link.base + lane.origin
                ends = ends_of(*places, abort, lane.outbound, lane.inbound, zero)
                own = {"to": lane.to, "from": lane.origin, "context": context}
                structs.append(GIN.layout.pack(ends | link.fields | own))
            return b"".join(structs)

        sock.setblocking(False)
        events = NcclEvents(link.communicator)
        super().__init__(driver, GIN, link.parts, describe, sock, peer, session, listening=listening, events=events)


class GinProvider:
    """A NicProvider whose NICs are NCCL's."""

    scheme = "gin"

    def __init__(self, driver: Driver, nccl: NcclLibrary, traffic_class: int) -> None:
        """Make a communicator of this process alone, for NCCL's one-time setup. Raises NcclError."""
        self._driver, self._nccl, self._traffic_class = driver, nccl, traffic_class
        self.remarks = list[str]()
        alone = Communicator(nccl, driver, 1, nccl.new_id(), 0, monotonic() + 10 * MAKE_S, threading.Event())
        alone.close()

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        if (most := max(session.outbound.slot_bytes, session.inbound.slot_bytes)) > MAX_MESSAGE_BYTES:
            raise HandshakeError(f"slot_bytes is at most {MAX_MESSAGE_BYTES} over {self.scheme}, not {most}")
        names = [] if listening else [self._nccl.new_id()]

        def read(text: bytes) -> None:
            magic, version, name = CARD.unpack(text)
            if magic != MAGIC or version != self._nccl.version:
                raise HandshakeError(f"its NCCL is {version}, ours is {self._nccl.version}: install one on both hosts")
            names.append(name)

        card = CARD.pack(MAGIC, self._nccl.version, b"" if listening else names[0])
        yield from exchanged(sock, exchange_cards(session, card, read, listening=listening))
        given_up = threading.Event()
        making = BackgroundCall(lambda: self._link(session, names[0], given_up, listening=listening), "lamina-gin")
        try:
            link = yield from _made(making, sock, given_up)
            yield from exchanged(sock, exchange_cards(session, MADE, _check_made, listening=listening))
            return GinChannel(self._driver, link, sock, peer, session, listening=listening)
        except BaseException as error:
            given_up.set()
            making.result.add_done_callback(_thrown_away)
            if isinstance(error, OSError):
                raise HandshakeError(str(error)) from error
            raise
        finally:
            making.close()

    def close(self) -> None:
        self._driver.close()

    def _link(self, session: AuthenticatedTerms, name: bytes, given_up: threading.Event, *, listening: bool) -> GinLink:
        """Make the link; both sides do so at the same time. Raises NcclError, CudaError."""
        driver, rank, zero = self._driver, int(listening), session.epoch << EPOCH_SHIFT
        lanes, nbytes = places_of(session, listening=listening)
        outbound, inbound = directions(session, listening=listening)
        with ExitStack() as parts:
            deadline = monotonic() + MAKE_S
            both = Communicator(self._nccl, driver, 2, name, rank, deadline, given_up)
            parts.enter_context(closing(both))
            properties = both.properties()
            if not properties.deviceApiSupport or not properties.ginType:
                raise NcclError("NCCL finds no NIC that kernels can use: see its words with NCCL_DEBUG=INFO")
            base, window = both.window(nbytes)
            for lane in lanes:
                clear_inbox(driver, base + lane.origin, zero)
            requests = 2 * outbound.slots + inbound.slots
            device_side = driver.allocate(both.device_side(requests, len(lanes), self._traffic_class))
            parts.callback(driver.free, device_side)
            fields = {"communicator": device_side, "window": window, "peer": 1 - rank}
            return GinLink(parts.pop_all(), both, base, lanes, fields)


class GinFabric(VerbsFabric):
    """Listens and connects as ``verbs`` does. Once the peer is met, NCCL gets its own time, even if an attempt is
    short.
    """

    scheme = "gin"

    def join(self, listener: StreamListener) -> None:
        """Join ``listener``, but not for trials, each of which would be a communicator."""
        TcpFabric.join(self, listener)

    def close(self) -> None:
        leave_all_channels(self._opened)
        super().close()

    def _connected(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, deadline: float) -> Channel:
        return super()._connected(sock, peer, session, max(deadline, monotonic() + MAKE_S + 2 * LATE_S))


def places_of(session: AuthenticatedTerms, *, listening: bool) -> tuple[tuple[WindowLane, ...], int]:
    """Return the places of the first lane and of the lane for bulk (for kernels; only to the listener), and the bytes
    of the window. The window holds messages to the listener, messages back, bulk, and a page for the credits of bulk.
    """
    there, back = (-(-inbox_bytes(geometry) // PAGE) * PAGE for geometry in (session.outbound, session.inbound))
    bulk, credit = there + back, 2 * there + back
    sent, came = session.outbound, session.inbound
    if listening:
        lanes = WindowLane(there, 0, came, sent), WindowLane(credit, bulk, None, sent)
    else:
        lanes = WindowLane(0, there, sent, came), WindowLane(bulk, credit, sent, None)
    return (lanes, credit + PAGE) if session.kernels else (lanes[:1], bulk)


def _made(
    making: BackgroundCall[GinLink], sock: socket.socket, given_up: threading.Event
) -> Generator[Wants, None, GinLink]:
    """Wait for the result of ``making``, which stops once the peer at ``sock`` has disconnected. Raises as ``_link``
    does.
    """
    wants = {sock.fileno(): select.POLLRDHUP, making.fileno(): select.POLLIN}
    while not making.result.done():
        yield wants
        if has_disconnected(sock):
            given_up.set()
            wants.pop(sock.fileno(), None)
    return making.result.result()


def _check_made(text: bytes) -> None:
    if text != MADE:
        raise HandshakeError("it made no communicator")


def _thrown_away(making: Future[GinLink]) -> None:
    if making.exception() is None:
        making.result().parts.close()


def open_fabric(key: bytes, *, gpu: int = 0) -> Fabric:
    """Open the transport. Raises ImportError, with its cause, if there is no NCCL, no nvcc, or no GPU."""
    try:
        nccl, traffic_class = NcclLibrary(), _traffic_class(service())
        driver = Driver(chosen_gpu(gpu), BY_NVCC)
    except (ImportError, ValueError) as error:
        raise ImportError(_unusable(error)) from error
    try:
        return GinFabric(key, way=GinProvider(driver, nccl, traffic_class))
    except BaseException as error:
        driver.close()
        if isinstance(error, NcclError):
            raise ImportError(_unusable(error)) from error
        raise


def _traffic_class(wanted: NetworkService) -> int:
    """Return the traffic class. Raises ValueError for settings that NCCL chooses, with the name of its variable."""
    for given, own, theirs in (
        (wanted.level, SERVICE_LEVEL, "NCCL_IB_SL"),
        (wanted.partition, PARTITION, "NCCL_IB_PKEY_VALUE"),
        (wanted.timeout != USUAL_TIMEOUT, TIMEOUT, "NCCL_IB_TIMEOUT"),
    ):
        if given:
            raise ValueError(f"{own} is not for NCCL: set {theirs} instead")
    return wanted.traffic_class


def _unusable(cause: object) -> str:
    fix = "pip install nvidia-nccl-cu13 and a CUDA toolkit with nvcc, or take --transport mlx5 or verbs"
    return f"transport 'gin' cannot be used here: {cause}; {fix}"
