"""The interface by which ``verbs`` uses a NIC."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from lamina.netstack.bootstrap.handshake import AuthenticatedTerms
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import HandshakeError

from .card import ConnectionCard, parse_card

HEADER_BYTES = LINE = 64
STALL_S = 10.0  # a peer whose NIC completes nothing for so long is lost


class NicProvider(Protocol):
    """One port of one device. Opening one raises ImportError, with the fix, if it cannot be used."""

    remarks: list[str]  # of its Fabric

    def meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        """Exchange cards with a peer that has passed the handshake; its channel owns ``sock``, the life line."""
        ...

    def close(self) -> None:
        """Free the device, once no channel is left."""
        ...


def stride(geometry: Geometry) -> int:
    """Return the bytes from one slot of an inbox to the next."""
    return HEADER_BYTES + (geometry.slot_bytes + LINE - 1) // LINE * LINE


def inbox_bytes(geometry: Geometry) -> int:
    return geometry.slots * stride(geometry)


def reaching(nbytes: int, our_lid: int, connect: Callable[[ConnectionCard], None]) -> Callable[[bytes], None]:
    """Return a function that takes the bytes of the peer's card, whose inbox has ``nbytes``, and connects to the peer;
    it raises HandshakeError.
    """

    def reach(text: bytes) -> None:
        card = parse_card(text, inbox_bytes=nbytes, our_lid=our_lid)
        try:
            connect(card)
        except OSError as error:
            raise HandshakeError(str(error)) from error

    return reach
