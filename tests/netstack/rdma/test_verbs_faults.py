"""Peers that hold the key and lie over RDMA, to an engine and to Python. Needs a device: `make test-vm` has one.

The liar is Python's end, which a test can make write anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
from wiring import KEY, SOON_S, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry

if TYPE_CHECKING:
    from lamina.netstack.rdma.verbs_channel import VerbsChannel

pytestmark = pytest.mark.rdma
SMALL = Geometry(slots=2, slot_bytes=200)


@dataclass
class Liar:
    """An end that writes into its peer's inbox whatever it likes."""

    end: VerbsChannel

    def message(
        self, n: int, *, seqno: int | None = None, length: int = 5, credit: int = 0, immediate: int | None = None
    ) -> None:
        """Message n, from 0, as a put writes it but for what is given; its payload is whatever was staged."""
        from lamina.netstack.rdma.nic_backend import stride
        from lamina.netstack.rdma.verbs_channel import COUNT, DATA_SENT, HEADER

        end, at = self.end, n % SMALL.slots * stride(SMALL)
        said = n + 1 if seqno is None else seqno
        HEADER.pack_into(end._staging.view, at, said, length, credit, b"tag")
        piece = end._staging, end._staging.address + at, HEADER.size + 5
        key, remote = end._theirs
        word = said & COUNT if immediate is None else immediate
        end._pair.write(DATA_SENT, [piece], (key, remote + at), word, wake=True)

    def credit(self, count: int) -> None:
        from lamina.netstack.rdma.verbs_channel import CREDIT, CREDIT_SENT

        self.end._pair.write(CREDIT_SENT, [], self.end._theirs, CREDIT | count)

    def scribble(self, to: tuple[int, int]) -> None:
        """Write 64 bytes of 0xee to (key, address) of the peer's memory."""
        from lamina.netstack.rdma.verbs_channel import DATA_SENT

        self.end._staging.view[:64] = b"\xee" * 64
        self.end._pair.write(DATA_SENT, [(self.end._staging, self.end._staging.address, 64)], to)


def python_fabric() -> Fabric:
    pytest.importorskip("pyverbs.device")
    from lamina.netstack.rdma.pyverbs_backend import PyverbsProvider
    from lamina.netstack.rdma.verbs import VerbsFabric

    return VerbsFabric(KEY, way=PyverbsProvider("", spin_s=0.0))


@pytest.fixture(params=["engine", "python"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Liar, Channel]]:
    liars = python_fabric()
    fabric = open_or_skip("verbs") if request.param == "engine" else python_fabric()
    a, b = connect(liars, fabric.listen(), SMALL)
    yield Liar(cast("VerbsChannel", a)), b
    fabric.close()
    liars.close()


def fault_of(channel: Channel) -> str:
    """What ends the channel, behind the messages that came before."""
    with pytest.raises(netstack.PeerFault) as fault:  # noqa: PT012
        for _ in range(SMALL.slots + 1):
            channel.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault):
        channel.reserve(1)
    return str(fault.value)


def test_what_an_honest_peer_writes_is_a_message(ends: tuple[Liar, Channel]) -> None:
    liar, victim = ends
    for n in range(3 * SMALL.slots):
        liar.end._staging.view[n % 2 * 320 + 64 : n % 2 * 320 + 69] = b"hello"
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
    "a signal that is not the header's": lambda liar: liar.message(0, immediate=2),
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


def test_an_inbox_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a liar that has made its own side able to; what refuses it is the victim's NIC."""
    from pyverbs.qp import QPAttr
    from pyverbs.wr import SGE, SendWR

    from lamina.netstack.rdma import device as rdma

    def able(**given: int) -> QPAttr:
        attributes = QPAttr(**given)
        attributes.max_rd_atomic = 1
        return attributes

    monkeypatch.setattr(rdma, "QPAttr", able)
    fabric = python_fabric()
    liar, victim = (cast("VerbsChannel", end) for end in connect(fabric, geometry=SMALL))
    victim._inbox.view[:64] = b"\xaa" * 64
    work = SendWR(num_sge=1, sg=[SGE(liar._inbox.address, 64, liar._inbox.lkey)], send_flags=rdma.e.IBV_SEND_SIGNALED)
    work.opcode = rdma.e.IBV_WR_RDMA_READ
    work.set_wr_rdma(*liar._theirs)
    liar._pair._pair.post_send(work)
    assert "the peer's NIC refused the request" in fault_of(liar)
    assert bytes(liar._inbox.view[:64]) == bytes(64)
    fabric.close()


@pytest.mark.parametrize("where", ["before it", "across its end", "under another key"])
def test_only_the_inbox_is_open_to_a_peer(ends: tuple[Liar, Channel], where: str) -> None:
    """The NIC refuses the rest, and both sides learn of it."""
    liar, victim = ends
    key, address = liar.end._theirs
    nbytes = SMALL.slots * liar.end._stride
    places = {
        "before it": (key, address - 4096),
        "across its end": (key, address + nbytes - 63),
        "under another key": (key ^ 0x100, address),
    }
    liar.scribble(places[where])
    for end in (liar.end, victim):
        assert re.search("broke|our NIC reports", fault_of(end))


@pytest.mark.parametrize("where", ["across its end", "what it sends from"])
def test_nothing_is_touched_outside(where: str) -> None:
    fabric = python_fabric()
    a, b = (cast("VerbsChannel", end) for end in connect(fabric, geometry=SMALL))
    key, address = a._theirs
    memory = b._staging
    memory.view[:] = b"\xaa" * len(memory.view)
    before = bytes(b._inbox.view), bytes(memory.view)
    places = {
        "across its end": (key, address + len(b._inbox.view) - 63),
        "what it sends from": (memory.rkey, memory.address),
    }
    Liar(a).scribble(places[where])
    for end in (a, b):
        assert "broke" in fault_of(end)
    assert (bytes(b._inbox.view), bytes(memory.view)) == before
    fabric.close()


def test_an_engine_and_python_understand_each_other() -> None:
    """Either connects; credit comes in headers and alone; large messages go in pieces."""
    python, engine = python_fabric(), open_or_skip("verbs")
    large = Geometry(slots=3, slot_bytes=(2 << 20) + 7)
    for here, there in ((python, engine), (engine, python)):
        ends = connect(here, there.listen(), large)
        for n in range(8):
            for a, b in (ends, ends[::-1]):
                payload = bytes([n, n + 1]) * (large.slot_bytes // 2 if n % 4 == 1 else n)
                for _ in range(n % 3 + 1):
                    send(a, payload)
                for _ in range(n % 3 + 1):
                    arrival = b.wait_signal(timeout_s=SOON_S)
                    assert arrival.data == payload
                    b.release(arrival)
    python.close()
    engine.close()
