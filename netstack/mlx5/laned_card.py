"""The card of a channel with one lane or two: a ConnectionCard for each, and the order in which its kernels see a NIC's
writes. Like those cards it is not trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.netstack.contract.fabric import HandshakeError
from lamina.netstack.rdma.card import WIRE, ConnectionCard, parse_card

MAGIC = b"MLX5"
HEAD = struct.Struct("!4sI")  # magic, ordering
STRICT = 1  # in the order of arrival: a message's signal may be written right after its data
FENCED = 2  # in any order: a signal may be written once its data was read back
NEEDS = "take --transport gin or verbs"


@dataclass(frozen=True)
class LanedCard:
    """``lanes``: the first, and that of bulk if there is one, whose inbox only the listener has."""

    lanes: tuple[ConnectionCard, ...]
    ordering: int = STRICT

    def pack(self) -> bytes:
        return HEAD.pack(MAGIC, self.ordering) + b"".join(card.pack() for card in self.lanes)


def opened_lanes(text: bytes, sizes: Sequence[int], *, our_lid: int) -> LanedCard:
    """Return the card that a peer sent, whose inboxes have ``sizes`` in bytes by the terms; ``our_lid``: 0 on Ethernet.
    Raises HandshakeError, which names a value that no honest peer sends, or a need that this side cannot meet.
    """
    if len(text) != HEAD.size + len(sizes) * WIRE.size:
        raise HandshakeError(f"its card has {len(text)} bytes, not {HEAD.size + len(sizes) * WIRE.size}")
    magic, ordering = HEAD.unpack_from(text)
    if magic != MAGIC:
        raise HandshakeError(f"its card begins with {magic!r}, not {MAGIC!r}")
    if ordering == FENCED:
        raise HandshakeError(f"its GPU sees a NIC's writes in any order, ours sends as to a strict one: {NEEDS}")
    if ordering != STRICT:
        raise HandshakeError(f"its card names an order of a NIC's writes, {ordering}, that there is not")
    parts = (text[at : at + WIRE.size] for at in range(HEAD.size, len(text), WIRE.size))
    lanes = tuple(parse_card(part, inbox_bytes=n, our_lid=our_lid) for part, n in zip(parts, sizes, strict=True))
    if len({(card.route.gid, card.route.lid) for card in lanes}) > 1:
        raise HandshakeError("its two queue pairs are of different ports")
    if len({card.route.number for card in lanes}) < len(lanes):
        raise HandshakeError(f"its two queue pairs are one, {lanes[0].route.number:#x}")
    return LanedCard(lanes, ordering)
