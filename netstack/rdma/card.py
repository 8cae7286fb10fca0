"""The card of a queue pair: what a peer must know to reach it and to write into its inbox. It is not trusted.

A card comes from a peer that holds the key, so no process between the two has changed it, but the peer itself may lie.
Here its numbers are checked against what an honest NIC can send, before any of them reaches ours. Needs no RDMA on this
machine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from lamina.netstack.contract.fabric import HandshakeError

MAGIC = b"VRBS"
WIRE = struct.Struct("!4s16sHIIIQIQ")  # magic, route, inbox: bytes, key, address
SPECIAL_PAIRS = 2  # 0 and 1 are the subnet's own (InfiniBand 1.4, 10.2.4.2)
ALL_PAIRS = 0xFFFFFF  # that of multicast; numbers of queue pairs and of packets have 24 bits
MTU_NAMES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # ibv_mtu: bytes
LIDS = range(1, 0xC000)  # each of one port; those above are of multicast groups (InfiniBand 1.4, 4.1.3)


@dataclass(frozen=True)
class QueuePairAddress:
    """The address of a queue pair: all that its peer must know to reach it. ``mtu``: a key of MTU_NAMES."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int


@dataclass(frozen=True)
class ConnectionCard:
    """``nbytes``, ``key``, ``address``: the inbox that the peer may write to; 0 bytes: there is none."""

    route: QueuePairAddress
    nbytes: int
    key: int
    address: int

    def pack(self) -> bytes:
        r = self.route
        return WIRE.pack(MAGIC, r.gid, r.lid, r.number, r.psn, r.mtu, self.nbytes, self.key, self.address)


def parse_card(text: bytes, *, inbox_bytes: int, our_lid: int) -> ConnectionCard:
    """Return the card that a peer sent. ``inbox_bytes``: of the inbox that the terms promise; ``our_lid``: 0 on
    Ethernet. Raises HandshakeError, which names a value that no honest peer sends.
    """
    if len(text) != WIRE.size:
        raise HandshakeError(f"its card has {len(text)} bytes, not {WIRE.size}")
    magic, gid, lid, number, psn, mtu, nbytes, key, address = WIRE.unpack(text)
    if magic != MAGIC:
        raise HandshakeError(f"its card begins with {magic!r}, not {MAGIC!r}")
    route = QueuePairAddress(gid, lid, number, psn, mtu)
    if why := _lie(route, our_lid) or _inbox_lie(nbytes, address, inbox_bytes):
        raise HandshakeError(why)
    return ConnectionCard(route, nbytes, key, address)


def _lie(route: QueuePairAddress, our_lid: int) -> str:
    """Return why no peer can be reached by ``route``; "" if one may."""
    gid = IPv6Address(route.gid)
    ipv4 = gid.ipv4_mapped
    if gid.is_unspecified or (ipv4 and ipv4.is_unspecified):
        return "its card has no GID: is an address set on the network device of its RDMA port?"
    if gid.is_multicast or (ipv4 and ipv4.is_multicast):
        return f"its GID {gid} is that of a multicast group"
    if our_lid and route.lid not in LIDS:
        return f"its LID {route.lid:#x} is none of a port, and ours is InfiniBand: is its port up, and of our subnet?"
    if not SPECIAL_PAIRS <= route.number < ALL_PAIRS:
        return f"its queue pair {route.number:#x} is none of a peer's"
    if route.psn > ALL_PAIRS:
        return f"its first packet {route.psn:#x} has more than 24 bits"
    if route.mtu not in MTU_NAMES:
        return f"its MTU {route.mtu} is none of {', '.join(map(str, MTU_NAMES))} (ibv_mtu)"
    return ""


def _inbox_lie(nbytes: int, address: int, wanted: int) -> str:
    """Return why no inbox of ``wanted`` bytes can lie there; "" if one may."""
    if nbytes != wanted:
        return f"its inbox has {nbytes} bytes where the terms need {wanted}"
    if nbytes and (not address or address + nbytes > 1 << 64):
        return f"its inbox of {nbytes} bytes cannot lie at {address:#x}"
    return ""
