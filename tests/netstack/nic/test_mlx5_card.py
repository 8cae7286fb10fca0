"""Cards of two lanes: what an honest peer can say passes, whatever else is refused by name. Needs no RDMA.

Covers: netstack/mlx5/laned_card.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.netstack import HandshakeError
from lamina.netstack.mlx5.laned_card import FENCED, HEAD, STRICT, LanedCard, opened_lanes
from lamina.netstack.rdma.card import WIRE, ConnectionCard, QueuePairAddress

ROUTE = QueuePairAddress(IPv6Address("::ffff:10.9.0.1").packed, lid=0, number=17, psn=0xFFFFFF, mtu=3)
FIRST, BULK = ConnectionCard(ROUTE, 8192, 1, 4096), ConnectionCard(replace(ROUTE, number=18), 8192, 2, 1 << 20)
LISTENER = LanedCard((FIRST, BULK))
CONNECTOR = LanedCard((FIRST, ConnectionCard(replace(ROUTE, number=18), 0, 0, 0)))
ALONE = LanedCard((FIRST,))  # of either, for hosts


def with_bulk(**changes: object) -> LanedCard:
    """The listener's queue pair is used, of which the second lane's is another."""
    return LanedCard((FIRST, replace(BULK, route=replace(BULK.route, **changes))))  # type: ignore[arg-type]


def read(card: LanedCard, bulk_bytes: int = 8192) -> LanedCard:
    return opened_lanes(card.pack(), (8192, bulk_bytes), our_lid=0)


def test_honest_cards_pass() -> None:
    assert read(LISTENER) == LISTENER
    assert read(CONNECTOR, 0) == CONNECTOR
    assert opened_lanes(ALONE.pack(), (8192,), our_lid=0) == ALONE
    assert LISTENER.ordering == STRICT


LIES: dict[str, Callable[[], LanedCard]] = {
    "in any order, ours sends as to a strict one: take": lambda: replace(LISTENER, ordering=FENCED),
    "an order of a NIC's writes, 0, that there is not": lambda: replace(LISTENER, ordering=0),
    "an order of a NIC's writes, 3, that there is not": lambda: replace(LISTENER, ordering=3),
    "its two queue pairs are one, 0x11": lambda: with_bulk(number=17),
    "are of different ports": lambda: with_bulk(gid=IPv6Address("fe80::1").packed),
    "its inbox has 0 bytes where the terms need 8192": lambda: CONNECTOR,
    "queue pair 0x1 is none": lambda: with_bulk(number=1),
}


@pytest.mark.parametrize("words", LIES)
def test_lies_are_refused_by_name(words: str) -> None:
    with pytest.raises(HandshakeError, match=words) as refusal:
        read(LIES[words]())
    assert "\n" not in str(refusal.value)


def test_who_connects_opens_no_inbox_for_bulk() -> None:
    with pytest.raises(HandshakeError, match="its inbox has 8192 bytes where the terms need 0"):
        read(LISTENER, 0)


@pytest.mark.parametrize("text", [b"", FIRST.pack(), ALONE.pack(), LISTENER.pack()[:-1], LISTENER.pack() + b"x"])
def test_a_card_of_another_kind_is_refused(text: bytes) -> None:
    with pytest.raises(HandshakeError, match=f"has {len(text)} bytes, not {HEAD.size + 2 * WIRE.size}"):
        opened_lanes(text, (8192, 8192), our_lid=0)
    if len(text) > len(ALONE.pack()):
        with pytest.raises(HandshakeError, match=f"has {len(text)} bytes, not {HEAD.size + WIRE.size}"):
            opened_lanes(text, (8192,), our_lid=0)


@given(at=st.integers(0, HEAD.size + 2 * WIRE.size - 1), byte=st.integers(0, 255))
def test_one_changed_byte_is_refused_or_still_what_it_packs_to(at: int, byte: int) -> None:
    text = bytearray(LISTENER.pack())
    text[at] = byte
    try:
        card = opened_lanes(bytes(text), (8192, 8192), our_lid=0)
    except HandshakeError:
        return
    assert card.pack() == text
    assert card.ordering == STRICT
    assert card.lanes[0].route.number != card.lanes[1].route.number
