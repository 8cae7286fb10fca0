"""The engine of verbs against a NIC that follows a test; ``test_verbs_native`` runs this in a process of its own.

Covers: netstack/rdma/native_backend.py, netstack/rdma/nic_backend.py.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from test_verbs_faults import SMALL, fault_of
from verbs_without_nic import FAKE
from wiring import KEY, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry
from lamina.netstack.bootstrap.listener import StreamListener
from lamina.netstack.contract.fabric import DEATH_NOTICED_S
from lamina.netstack.rdma import native_backend
from lamina.netstack.rdma.nic_backend import stride
from lamina.netstack.rdma.traffic_class import PARTITION, SERVICE_LEVEL, TIMEOUT, TRAFFIC_CLASS

QP_FATAL, QP_ACCESS_ERR, PORT_ERR, DEVICE_FATAL = 1, 3, 10, 8  # of ibv_event_type
CREDIT = 1 << 31
LARGE = Geometry(slots=1, slot_bytes=1 << 20)


def opened(device: str = "") -> Fabric:
    from lamina.netstack.rdma.verbs import VerbsFabric

    return VerbsFabric(KEY, device=device)


def in_use() -> list[int]:
    """Protection domains, memories, queue pairs."""
    counts = (ctypes.c_uint32 * 3)()
    FAKE.fake_open(counts)
    return list(counts)


def number_of(end: Channel) -> int:
    """Its queue pair's; takes a slot."""
    return number_at(end.reserve(1))


def number_at(slot: netstack.Slot) -> int:
    """Returns the number of the queue pair whose slot it is."""
    return int(FAKE.fake_pair(ctypes.c_uint64(np.frombuffer(slot.data, np.uint8).__array_interface__["data"][0])))


def attributes_of(end: Channel) -> list[int]:
    """Returns the attributes in the order of fake_verbs.cpp; takes a slot."""
    attributes = (ctypes.c_uint32 * 8)()
    FAKE.fake_attributes(number_of(end), attributes)
    return list(attributes)


@dataclass
class Ends:
    """``a`` has queue pair ``number``, whose NIC may lie to ``b``."""

    fabric: Fabric
    a: Channel
    b: Channel
    number: int

    def write(self, where: tuple[int, int], data: bytes, word: int = -1) -> None:
        """Writes as ``a``'s NIC; ``where``: key and address."""
        key, address = where
        FAKE.fake_write(self.number, key, ctypes.c_uint64(address), data, len(data), ctypes.c_int64(word))

    def inbox(self) -> tuple[int, int, int]:
        """Key, address and bytes of ``b``'s: all that a peer may write to."""
        place = (ctypes.c_uint64 * 4)()
        FAKE.fake_inbox(self.number, place)
        assert place[3] == 1
        return place[0], place[1], place[2]

    def message(self, n: int, *, seqno: int | None = None, length: int = 5, credit: int = 0, word: int = -1) -> None:
        key, address, _ = self.inbox()
        said = n + 1 if seqno is None else seqno
        header = struct.pack("<QQQ8x32s", said, length, credit, b"tag")
        self.write((key, address + n % SMALL.slots * stride(SMALL)), header + b"hello", said if word < 0 else word)


@pytest.fixture
def ends() -> Iterator[Ends]:
    fabric = opened()
    a, b = connect(fabric, geometry=SMALL)
    yield Ends(fabric, a, b, number_of(a))
    fabric.close()
    assert in_use() == [0, 0, 0]


def test_a_queue_pair_is_as_the_operator_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRAFFIC_CLASS, "106")
    monkeypatch.setenv(SERVICE_LEVEL, "3")
    monkeypatch.setattr(native_backend, "partition_index", lambda _, key: {None: 0, 0x8001: 5}[key])
    monkeypatch.setenv(PARTITION, "0x8001")
    for timeout in (14, 18):
        fabric = opened("fake0:1:1")
        for end in connect(fabric, geometry=SMALL):
            assert attributes_of(end) == [3, 106, 1, 5, timeout, 7, 6, 5]
        fabric.close()
        monkeypatch.setenv(TIMEOUT, "18")


@pytest.mark.parametrize(("one", "other"), [(3, 5), (5, 3), (1, 2)])
def test_ports_of_different_packets_agree_on_the_smaller(
    one: int, other: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Either side may listen; messages of several packets arrive, and each side says which host to change."""
    fabric = opened()
    FAKE.fake_mtus(one, other)
    try:
        a, b = connect(fabric, geometry=Geometry(slots=2, slot_bytes=10000))
    finally:
        FAKE.fake_mtus(5, 5)
    send(a, bytes(range(250)) * 40)
    assert b.wait_signal(timeout_s=SOON_S).data == bytes(range(250)) * 40
    assert [attributes_of(end)[7] for end in (a, b)] == [min(one, other)] * 2
    said = [record.getMessage() for record in caplog.records if "mtu" in record.name]
    smaller, larger = sorted((128 << one, 128 << other))
    assert len(said) == 2
    for whose, where in (("our", "this"), ("its", "its")):
        words = (
            f"packets carry {smaller} bytes, as {whose} port takes no more, not {larger}: `ip link set DEVICE mtu 4192`"
        )
        assert sum(f"{words} on {where} host, and on switches" in line for line in said) == 1, said
    fabric.close()


def test_the_best_gid_is_taken_where_none_is_named() -> None:
    fabric = opened()
    a, _b = connect(fabric, geometry=SMALL)
    assert attributes_of(a)[2] == 0
    fabric.close()


def test_other_native_modules_can_use_it(ends: Ends) -> None:
    """So that a layer's messages cost no Python (csrc/netstack/calls.h)."""
    assert ends.a.calls() is not None
    assert ends.b.calls() is not None


def test_each_peer_has_a_domain_of_its_own_which_ends_with_its_channel() -> None:
    fabric = opened()
    listener = fabric.listen()
    first = connect(fabric, listener, SMALL)
    _second = connect(fabric, listener, SMALL)
    assert in_use() == [4, 8, 4]
    for end in first:
        end.close()
    assert in_use() == [2, 4, 2]
    fabric.close()
    assert in_use() == [0, 0, 0]


def test_memory_that_cannot_be_pinned_is_one_line_with_the_fix() -> None:
    fabric = opened()
    listener = fabric.listen()
    FAKE.fake_most_memories(ctypes.c_size_t(0))
    try:
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, timeout_s=1.0)
            with pytest.raises(netstack.ChannelError, match=r"cannot register \d+ bytes with fake0: .*ulimit -l"):
                fabric.connect(listener.url, netstack.Terms(outbound=SMALL, inbound=SMALL))
            with pytest.raises(netstack.ChannelTimeout, match="no memory for its terms: cannot register"):
                accepted.result()
        with pytest.raises(ImportError, match="finds no RDMA port that opens: cannot register"):
            opened()
    finally:
        FAKE.fake_most_memories(ctypes.c_size_t(1 << 20))
    fabric.close()
    assert in_use() == [0, 0, 0]


@contextmanager
def slow_memory() -> Iterator[None]:
    """Makes the memory of LARGE take as long as the block."""
    FAKE.fake_slow_from(ctypes.c_size_t(LARGE.slot_bytes))
    try:
        yield
    finally:
        FAKE.fake_slow_from(ctypes.c_size_t((1 << 64) - 1))


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happens()


def test_a_peer_whose_memory_takes_long_holds_up_no_other() -> None:
    fabric = opened()
    listener = fabric.listen()
    terms = netstack.Terms(outbound=LARGE, inbound=LARGE)
    with ThreadPoolExecutor(2) as pool:
        with slow_memory():
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            late = pool.submit(fabric.connect, listener.url, terms, timeout_s=SOON_S)
            until(lambda: FAKE.fake_slow() == 2)
            quick = fabric.connect(listener.url, netstack.Terms(outbound=SMALL, inbound=SMALL), timeout_s=3.0)
            send(quick, b"hello")
            assert accepted.result(SOON_S).wait_signal(timeout_s=SOON_S).data == b"hello"
            assert not late.done()
        end = listener.accept(timeout_s=SOON_S)
        send(late.result(SOON_S), b"at last")
        assert end.wait_signal(timeout_s=SOON_S).data == b"at last"
    fabric.close()
    assert in_use() == [0, 0, 0]


def test_memory_for_a_peer_that_was_dropped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as long as it is being pinned it counts."""
    monkeypatch.setattr(native_backend, "PINNING_MOST", 1)
    fabric = opened()
    listener = fabric.listen()
    assert isinstance(listener, StreamListener)
    with ThreadPoolExecutor(2) as pool:
        with slow_memory():
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            late = pool.submit(fabric.connect, listener.url, netstack.Terms(outbound=LARGE, inbound=LARGE))
            until(lambda: FAKE.fake_slow() == 2)
            with pytest.raises(netstack.HandshakeError, match="it could not make or reach a queue pair"):
                fabric.connect(listener.url, netstack.Terms(outbound=SMALL, inbound=SMALL))
            until(lambda: "memory for 1 peers is being pinned, as many as may be" in listener.refusal)
            listener.close()
            with pytest.raises(netstack.ChannelAborted):
                accepted.result(SOON_S)
            assert FAKE.fake_slow() == 2
        with pytest.raises(netstack.HandshakeError):
            late.result(SOON_S)
    until(lambda: in_use() == [0, 0, 0])
    fabric.close()


@pytest.mark.parametrize("name", ["fake0:2", "fake0:1:9", "other", "fake0:x"])
def test_a_port_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ImportError, match="LAMINA_RDMA_DEVICE|has no GID 9"):
        opened(name)


@pytest.mark.parametrize("event", [QP_FATAL, QP_ACCESS_ERR, DEVICE_FATAL])
def test_an_event_of_the_device_ends_both_sides_at_once(ends: Ends, event: int) -> None:
    """Neither has posted anything that could fail: one side hears of it from its device, the other from its peer."""
    FAKE.fake_event(ends.number, event)
    start = time.monotonic()
    assert "our NIC reports: " in fault_of(ends.a)
    assert "the peer aborted: our NIC reports: " in fault_of(ends.b)
    assert time.monotonic() - start < 5 * DEATH_NOTICED_S  # on a busy machine


def test_a_fault_names_the_peer(ends: Ends) -> None:
    FAKE.fake_event(ends.number, QP_FATAL)
    assert fault_of(ends.a).startswith(f"{ends.a.peer}: wait_signal: our NIC reports: local work queue")


def test_a_port_that_goes_down_may_come_up_again(ends: Ends) -> None:
    FAKE.fake_event(ends.number, PORT_ERR)
    with pytest.raises(netstack.ChannelTimeout):
        ends.a.wait_signal(timeout_s=0.3)
    send(ends.b, b"still here")
    assert ends.a.wait_signal(timeout_s=SOON_S).data == b"still here"


def test_a_nic_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_backend, "STALL_S", 0.4)
    fabric = opened()
    a, _b = connect(fabric, geometry=SMALL)
    FAKE.fake_silence(number_of(a))
    with pytest.raises(netstack.PeerFault, match=r"nothing was heard of the peer's NIC for 0\.4 s"):
        a.wait_signal(timeout_s=SOON_S)
    fabric.close()
    assert in_use() == [0, 0, 0]


def test_credit_rides_on_messages() -> None:
    """A window of one, for and back: no request but the messages themselves is needed."""
    fabric = opened()
    one = Geometry(slots=1, slot_bytes=64)
    a, b = connect(fabric, geometry=one)
    for n in range(50):
        for sender, receiver in ((a, b), (b, a)):
            send(sender, bytes([n]))
            arrival = receiver.wait_signal(timeout_s=SOON_S)
            assert arrival.data == bytes([n])
            receiver.release(arrival)
    fabric.close()


def test_credit_is_told_where_no_message_goes() -> None:
    """One way, a window of one: in time, not when the next tenth of a second is over."""
    fabric = opened()
    a, b = connect(fabric, geometry=Geometry(slots=1, slot_bytes=64))
    start = time.monotonic()
    for n in range(100):
        send(a, bytes([n]))
        arrival = b.wait_signal(timeout_s=SOON_S)
        assert arrival.data == bytes([n])
        b.release(arrival)
    assert time.monotonic() - start < 8.0
    fabric.close()


def test_a_slot_that_our_nic_still_reads_is_not_given_again() -> None:
    """Its message has come and was released, but its write has not been reported as done."""
    fabric = opened()
    a, b = connect(fabric, geometry=Geometry(slots=1, slot_bytes=64))
    slot = a.reserve(1)
    number = number_at(slot)
    FAKE.fake_late(number, True)
    a.put_signal(slot, b"")
    b.release(b.wait_signal(timeout_s=SOON_S))
    send(b, b"with the credit")
    a.release(a.wait_signal(timeout_s=SOON_S))
    with pytest.raises(netstack.NoResource):
        a.reserve(1, timeout_s=0.05)
    FAKE.fake_late(number, False)
    send(a, b"now")
    fabric.close()


def test_what_an_honest_peer_writes_is_a_message(ends: Ends) -> None:
    for n in range(2 * SMALL.slots):  # more credit than that finds no receive at an end that has put nothing
        ends.message(n)
        arrival = ends.b.wait_signal(timeout_s=SOON_S)
        assert (arrival.seqno, arrival.tag[:3], arrival.data) == (n + 1, b"tag", b"hello")
        ends.b.release(arrival)


def without_credit(ends: Ends) -> None:
    for n in range(SMALL.slots + 1):
        ends.message(n)


LIES: dict[str, Callable[[Ends], None]] = {
    "a seqno ahead": lambda ends: ends.message(0, seqno=2),
    "a seqno of another epoch": lambda ends: ends.message(0, seqno=1 << 48 | 1, word=1),
    "a signal that is not the header's": lambda ends: ends.message(0, word=2),
    "a byte too long": lambda ends: ends.message(0, length=SMALL.slot_bytes + 1),
    "longer than all memory": lambda ends: ends.message(0, length=1 << 63),
    "without credit": without_credit,
    "credit for what was not sent": lambda ends: ends.write((0, 0), b"", CREDIT | 1),
    "credit that goes back": lambda ends: ends.write((0, 0), b"", CREDIT | CREDIT - 1),
    "a header's credit for what was not sent": lambda ends: ends.message(0, credit=1),
    "a header's credit of another epoch": lambda ends: ends.message(0, credit=1 << 48),
    "a header's credit that goes back": lambda ends: ends.message(0, credit=(1 << 64) - 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_honest_peer_sends_ends_the_channel(ends: Ends, lie: str) -> None:
    LIES[lie](ends)
    assert "the peer broke the protocol: " in fault_of(ends.b)
    assert "the peer aborted: broken protocol" in fault_of(ends.a)


@pytest.mark.parametrize("where", ["before it", "across its end", "under another key", "at another peer"])
def test_only_the_inbox_is_open_to_a_peer(ends: Ends, where: str) -> None:
    other_a, _other_b = connect(ends.fabric, geometry=SMALL)
    key, address, nbytes = ends.inbox()
    other = (ctypes.c_uint64 * 4)()
    FAKE.fake_inbox(number_of(other_a), other)
    places = {
        "before it": (key, address - 64),
        "across its end": (key, address + nbytes - 63),
        "under another key": (key ^ 1, address),
        "at another peer": (other[0], other[1]),
    }
    ends.write(places[where], b"\xee" * 64, 1)
    assert "the connection broke (the peer's memory is not open to us there)" in fault_of(ends.a)
    assert "our NIC reports" in fault_of(ends.b) or "broke" in fault_of(ends.b)
