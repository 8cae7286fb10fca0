"""The provider of ``verbs`` by libibverbs itself: csrc/netstack/verbs. Python only connects the peers."""

from __future__ import annotations

import socket
from contextlib import closing
from ipaddress import IPv6Address
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from lamina.netstack.bootstrap.background_call import run_in_background
from lamina.netstack.bootstrap.card_exchange import exchange_cards
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, exchanged
from lamina.netstack.bootstrap.listener import HALF_OPEN_MAX, Meeting
from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import HandshakeError
from lamina.netstack.host.native_module import open_rdma_end, rdma_gids, verbs_fault

from .card import ConnectionCard, QueuePairAddress
from .mtu import PacketSizeLog, remarks_on
from .nearest_port import nearest_first
from .nic_backend import STALL_S, inbox_bytes, reaching
from .rdma_ports import KINDS, NONE, Gids, Port, Wanted, partition_index, ports, why_no_port
from .traffic_class import check_level, service

if TYPE_CHECKING:
    from lamina.netstack.host._netstack import KernelPair, RdmaEnd

PINNING_MOST = HALF_OPEN_MAX  # peers, including those that were dropped meanwhile
TRIAL = Geometry(slots=1, slot_bytes=1)
Place = tuple[str, int, int, int, int, int, int]  # device, port, GID, partition, service level, traffic class, timeout


class LibibverbsProvider:
    """The nearest port that fits ``wanted`` (of --rdma-device) and opens a queue pair; nearest to ``gpu``, a PCI
    address, else to this process's cores. Each channel opens the device for itself, so that an event of one channel
    reaches no other.
    """

    scheme = "verbs"

    def __init__(self, wanted: str, spin_s: float, gpu: str = "") -> None:
        if fault := verbs_fault():
            raise ImportError(f"transport {self.scheme!r} cannot be used here: {fault}")
        self._spin_s, self._packets = spin_s, PacketSizeLog()
        self._pinning = BoundedSemaphore(PINNING_MOST)
        self.remarks = list[str]()
        there = ports_here()
        if not there:
            raise ImportError(f"transport {self.scheme!r} finds no RDMA device: {NONE}")
        if why := why_no_port(there, wanted):
            raise ImportError(f"transport {self.scheme!r} finds no RDMA port: {why}")
        try:
            self._named, self._service = Wanted.parse(wanted), service()
        except ValueError as error:
            raise ImportError(f"transport {self.scheme!r}: {error}") from error
        tried = []
        for self._port in nearest_first([p for p in there if p.fits(self._named)], gpu):
            place = f"{self._port.device}:{self._port.number}"
            try:
                check_level(self._service.level, place, self._port.link)
                self._partition = partition_index(self._port, self._service.partition)
                route = self._try(self._place())
                self.remarks += remarks_on(place, route.lid, route.mtu)
                return
            except (OSError, ValueError) as error:
                tried.append(str(error))
        raise ImportError(f"transport {self.scheme!r} finds no RDMA port that opens: {'; '.join(tried)}")

    @property
    def port(self) -> Port:
        return self._port

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        outbound, inbound = session.outbound, session.inbound
        if listening:
            outbound, inbound = inbound, outbound
        place = self._place()
        if listening:  # so that the listener can serve other peers meanwhile
            end = yield from run_in_background(lambda: self._pinned(place, outbound, inbound), "lamina-pin")
        else:
            end = open_rdma_end(*place, outbound, inbound)
        card = card_of(end)

        def connect(theirs: ConnectionCard) -> None:
            r = theirs.route
            self._packets.compare(card.route, r, peer)
            end.connect(r.gid, r.lid, r.number, r.psn, r.mtu, theirs.key, theirs.address)

        with closing(end):  # once a channel owns it, this does nothing
            reach = reaching(inbox_bytes(outbound), card.route.lid, connect)
            yield from exchanged(sock, exchange_cards(session, card.pack(), reach, listening=listening))
            names = peer, session.peer_name(listening=listening)
            channel = end.channel(sock.fileno(), session.epoch, self._spin_s, STALL_S, *names)
        sock.detach()
        return channel

    def close(self) -> None:
        """Do nothing: only channels have resources open."""

    def _pinned(self, place: Place, outbound: Geometry, inbound: Geometry) -> RdmaEnd:
        """Pin memory for a peer, which takes long for large inboxes. Raises OSError, HandshakeError."""
        if not self._pinning.acquire(blocking=False):
            raise HandshakeError(f"memory for {PINNING_MOST} peers is being pinned, as many as may be")
        try:
            return open_rdma_end(*place, outbound, inbound)
        finally:
            self._pinning.release()

    def _try(self, place: Place) -> QueuePairAddress:
        """Open and close a queue pair there, and return its address. Raises OSError."""
        return card_of(open_rdma_end(*place, TRIAL, TRIAL)).route

    def _place(self) -> Place:
        port, service = self._port, self._service
        index = port.gid_index(self._named)
        quality = service.level, service.traffic_class, service.timeout
        return port.device, port.number, index, self._partition, *quality


def card_of(end: RdmaEnd | KernelPair) -> ConnectionCard:
    gid, lid, number, psn, mtu, *inbox = end.card()
    return ConnectionCard(QueuePairAddress(gid, lid, number, psn, mtu), *inbox)


def ports_here() -> list[Port]:
    """Return the ports, with GIDs from libibverbs if possible: reading a file for each GID takes long."""
    try:
        return ports(gids=native_gids)
    except OSError:
        return ports()


def native_gids(device: str, port: int) -> Gids:
    return {index: (str(IPv6Address(gid)), KINDS.get(kind, "")) for index, gid, kind in rdma_gids(device, port)}
