"""Peers that hold the key and lie over RDMA. Needs a device: `make test-vm` has one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import pytest
from wiring import KEY, SOON_S, connect, open_or_skip

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry
from lamina.netstack.rdma.nic_backend import stride

if TYPE_CHECKING:
    from liar import Liar

pytestmark = pytest.mark.rdma
SMALL = Geometry(slots=2, slot_bytes=200)


@pytest.fixture
def fabrics() -> Iterator[tuple[Fabric, Fabric]]:
    """Yields a fabric of liars, and an honest one."""
    pytest.importorskip("pyverbs.device")
    from liar import LiarProvider

    from lamina.netstack.rdma.verbs import VerbsFabric

    fabric = open_or_skip("verbs")
    liars = VerbsFabric(KEY, way=LiarProvider())
    yield liars, fabric
    fabric.close()
    liars.close()


def met(fabrics: tuple[Fabric, Fabric]) -> tuple[Liar, Channel]:
    liars, fabric = fabrics
    a, b = connect(liars, fabric.listen(), SMALL)
    return cast("Liar", a), b


@pytest.fixture
def ends(fabrics: tuple[Fabric, Fabric]) -> tuple[Liar, Channel]:
    return met(fabrics)


def fault_of(channel: Channel) -> str:
    """Returns the fault that ends the channel, after the messages that came before."""
    with pytest.raises(netstack.PeerFault) as fault:  # noqa: PT012
        for _ in range(SMALL.slots + 1):
            channel.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault):
        channel.reserve(1)
    return str(fault.value)


def test_what_an_honest_peer_writes_is_a_message(ends: tuple[Liar, Channel]) -> None:
    liar, victim = ends
    for n in range(3 * SMALL.slots):
        liar.message(n)
        arrival = victim.wait_signal(timeout_s=SOON_S)
        assert (arrival.seqno, arrival.tag[:3], arrival.data) == (n + 1, b"tag", b"hello")
        victim.release(arrival)


def without_credit(liar: Liar) -> None:
    for n in range(SMALL.slots + 1):
        liar.message(n)


LIES: dict[str, Callable[[Liar], None]] = {
    "a seqno ahead": lambda liar: liar.message(0, seqno=2),
    "a seqno of another epoch": lambda liar: liar.message(0, seqno=1 << 48 | 1),
    "a signal that is not the header's": lambda liar: liar.message(0, word=2),
    "a byte too long": lambda liar: liar.message(0, length=SMALL.slot_bytes + 1),
    "longer than all memory": lambda liar: liar.message(0, length=1 << 63),
    "without credit": without_credit,
    "credit for what was not sent": lambda liar: liar.credit(1),
    "credit that goes back": lambda liar: liar.credit((1 << 31) - 1),
    "a header's credit for what was not sent": lambda liar: liar.message(0, credit=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_honest_peer_sends_ends_the_channel(ends: tuple[Liar, Channel], lie: str) -> None:
    liar, victim = ends
    LIES[lie](liar)
    assert "protocol" in fault_of(victim)


def test_an_inbox_cannot_be_read(ends: tuple[Liar, Channel]) -> None:
    """A dishonest peer has made its own side able to read; the victim's NIC refuses it."""
    liar, victim = ends
    liar.message(0)
    assert victim.wait_signal(timeout_s=SOON_S).data == b"hello"
    liar.memory[:64] = bytes(64)
    liar.read(64)
    assert liar.is_refused()
    assert bytes(liar.memory[:64]) == bytes(64)


@pytest.mark.parametrize("where", ["before it", "across its end", "under another key"])
def test_only_the_inbox_is_open_to_a_peer(ends: tuple[Liar, Channel], where: str) -> None:
    """The NIC refuses the rest, and both sides learn of it."""
    liar, victim = ends
    key, address = liar.inbox
    places = {
        "before it": (key, address - 4096),
        "across its end": (key, address + SMALL.slots * stride(SMALL) - 63),
        "under another key": (key ^ 0x100, address),
    }
    liar.write(places[where], b"\xee" * 64)
    assert liar.is_refused()
    assert re.search("broke|our NIC reports", fault_of(victim))


def test_writes_after_an_abort_change_nothing(fabrics: tuple[Fabric, Fabric], ends: tuple[Liar, Channel]) -> None:
    """The memory of a closed channel lasts as long as its object, but the NIC lets no peer write there. Another
    channel's message has crossed by the time at which the memory is compared.
    """
    liar, victim = ends
    liar.message(0)
    assert victim.wait_signal(timeout_s=SOON_S).data == b"hello"
    victim.abort("enough")
    victim.close()
    memory = (ctypes.c_char * liar.nbytes).from_address(liar.inbox[1])
    memory[:] = b"\xaa" * liar.nbytes
    for n in range(1, 1 + SMALL.slots):
        liar.message(n)
    other, honest = met(fabrics)
    other.message(0)
    assert honest.wait_signal(timeout_s=SOON_S).data == b"hello"
    assert set(bytes(memory)) == {0xAA}
