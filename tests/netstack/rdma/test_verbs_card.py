"""Cards of queue pairs: what an honest NIC can say passes, whatever else is refused by name. Needs no RDMA.

Covers: netstack/rdma/card.py.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.netstack import HandshakeError
from lamina.netstack.rdma.card import LIDS, MTU_NAMES, WIRE, ConnectionCard, QueuePairAddress, parse_card

ROCE = QueuePairAddress(IPv6Address("::ffff:10.9.0.1").packed, lid=0, number=17, psn=0xFFFFFF, mtu=3)
HONEST = ConnectionCard(ROCE, nbytes=1 << 20, key=0xFFFFFFFF, address=(1 << 64) - (1 << 20))


def read(card: ConnectionCard, our_lid: int = 0) -> ConnectionCard:
    return parse_card(card.pack(), inbox_bytes=1 << 20, our_lid=our_lid)


def test_an_honest_card_passes_to_the_ends_of_its_ranges() -> None:
    assert read(HONEST) == HONEST
    for route in (replace(ROCE, number=2, psn=0, mtu=1), replace(ROCE, number=0xFFFFFE, mtu=5)):
        assert read(replace(HONEST, route=route)).route == route
    for lid in (1, 0xBFFF):
        assert read(replace(HONEST, route=replace(ROCE, lid=lid)), our_lid=9).route.lid == lid


def test_a_lid_says_nothing_on_ethernet() -> None:
    """Drivers leave an arbitrary LID there."""
    assert read(replace(HONEST, route=replace(ROCE, lid=0xFFFF))).route.lid == 0xFFFF


ROUTES = {
    "no GID": {"gid": bytes(16)},
    "no GID: is an address set": {"gid": IPv6Address("::ffff:0.0.0.0").packed},
    "multicast group": {"gid": IPv6Address("ff02::1").packed},
    "ffff:e000:1 is that of a multicast": {"gid": IPv6Address("::ffff:224.0.0.1").packed},
    "queue pair 0x1 ": {"number": 1},
    "queue pair 0xffffff ": {"number": 0xFFFFFF},
    "queue pair 0xffffffff ": {"number": 0xFFFFFFFF},
    "packet 0x1000000 ": {"psn": 1 << 24},
    "MTU 0 ": {"mtu": 0},
    "MTU 6 ": {"mtu": 6},
}


@pytest.mark.parametrize("words", ROUTES)
def test_a_route_that_no_peer_has_is_refused(words: str) -> None:
    with pytest.raises(HandshakeError, match=words):
        read(replace(HONEST, route=replace(ROCE, **ROUTES[words])))  # type: ignore[arg-type]


@pytest.mark.parametrize("lid", [0, 0xC000, 0xFFFF])
def test_a_port_of_infiniband_needs_the_lid_of_another(lid: int) -> None:
    with pytest.raises(HandshakeError, match=f"LID {lid:#x} .* ours is InfiniBand"):
        read(replace(HONEST, route=replace(ROCE, lid=lid)), our_lid=9)


@pytest.mark.parametrize("change", [{"address": 0}, {"address": (1 << 64) - (1 << 20) + 1}])
def test_an_inbox_that_memory_cannot_hold_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(HandshakeError, match="cannot lie at 0x"):
        read(replace(HONEST, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, (1 << 20) - 1, (1 << 20) + 1, (1 << 64) - 1])
def test_an_inbox_of_another_size_is_refused(nbytes: int) -> None:
    with pytest.raises(HandshakeError, match=f"has {nbytes} bytes where the terms need {1 << 20}"):
        read(replace(HONEST, nbytes=nbytes, address=1))


@pytest.mark.parametrize("text", [b"", HONEST.pack()[:-1], HONEST.pack() + b"x"])
def test_a_card_of_another_length_is_refused(text: bytes) -> None:
    with pytest.raises(HandshakeError, match=f"{len(text)} bytes, not {WIRE.size}"):
        parse_card(text, inbox_bytes=1 << 20, our_lid=0)


@given(at=st.integers(0, WIRE.size - 1), byte=st.integers(0, 255), lid=st.sampled_from([0, 9]))
def test_one_changed_byte_is_refused_or_still_within_the_ranges(at: int, byte: int, lid: int) -> None:
    text = bytearray(replace(HONEST, route=replace(ROCE, lid=lid)).pack())
    text[at] = byte
    _holds(bytes(text), lid)


@given(st.binary(max_size=2 * WIRE.size), st.booleans())
def test_any_bytes_are_refused_or_a_card(text: bytes, is_begun: bool) -> None:
    _holds(HONEST.pack()[:4] + text if is_begun else text, 9)


def _holds(text: bytes, our_lid: int) -> None:
    """Whatever passes is what it packs to, and within what a NIC is asked for."""
    try:
        card = parse_card(text, inbox_bytes=1 << 20, our_lid=our_lid)
    except HandshakeError:
        return
    assert card.pack() == text
    assert 2 <= card.route.number < 0xFFFFFF
    assert card.route.psn < 1 << 24
    assert card.route.mtu in MTU_NAMES
    assert not our_lid or card.route.lid in LIDS
    assert card.nbytes == 1 << 20
    assert 0 < card.address <= (1 << 64) - card.nbytes
    assert any(card.route.gid)
    assert card.route.gid[0] != 0xFF
