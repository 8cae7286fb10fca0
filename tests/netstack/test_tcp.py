"""TCP against peers that hold the key and write what they like into the stream, and its addresses."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from frames import CREDIT, DATA, FAREWELL, HEADER_BYTES, pack, unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Channel, Geometry, PeerFault, Terms
from lamina.netstack.bootstrap.handshake import SEAL, Hello, offer, run
from lamina.netstack.host import tcp
from lamina.netstack.host.tcp import TcpFabric

EPOCH = 9
ZERO = EPOCH << 48
SLOTS, SLOT_BYTES = 3, 100
GEOMETRY = Geometry(slots=SLOTS, slot_bytes=SLOT_BYTES)
HELLO = Hello(scheme="tcp", epoch=EPOCH, outbound=GEOMETRY, inbound=GEOMETRY)


class Rogue:
    """An authenticated connector with the raw stream."""

    def __init__(self) -> None:
        self.fabric = netstack.open("tcp", key=KEY)
        listener = self.fabric.listen()
        host, _, port = listener.url.partition("://")[2].rpartition(":")
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            self.stream = socket.create_connection((host, int(port)))
            run(self.stream, offer(KEY, HELLO), "listener", deadline=time.monotonic() + SOON_S)
            self.victim: Channel = accepted.result(SOON_S)
        self.stream.setblocking(True)
        self.count = 0  # of frames sent

    def frame(
        self, kind: int = DATA, length: int = 0, seqno: int = ZERO + 1, credit: int = ZERO, payload: bytes = b""
    ) -> None:
        frame = pack(None, self.count, payload, kind=kind, length=length, seqno=seqno, credit=credit)
        self.count += 1
        self.stream.sendall(frame)

    def close(self) -> None:
        self.fabric.close()
        self.stream.close()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    rogue = Rogue()
    yield rogue
    rogue.close()


def faults_for_good(call: Callable[[], object]) -> None:
    for _ in range(2):
        with pytest.raises(PeerFault, match="broke the protocol"):
            call()


def test_the_rogue_can_behave(rogue: Rogue) -> None:
    rogue.frame(length=4, payload=b"good")
    arrival = rogue.victim.wait_signal(timeout_s=SOON_S)
    assert arrival.data == b"good"
    for _ in range(SLOTS):
        send(rogue.victim, b"x")
    rogue.frame(CREDIT, seqno=0, credit=ZERO + 1)
    send(rogue.victim, b"x")


@pytest.mark.parametrize(
    "bad",
    [
        {"length": SLOT_BYTES + 1},
        {"length": (1 << 64) - 1},
        {"seqno": ZERO + 2},
        {"seqno": ZERO},
        {"seqno": 1},
        {"seqno": ((EPOCH + 1) << 48) + 1},
        {"seqno": ((EPOCH - 1) << 48) + 1},
        {"credit": ZERO + 1},
        {"credit": ZERO - 1},
        {"credit": 0},
        {"kind": 0},
        {"kind": 4},
        {"kind": 65535},
        {"kind": CREDIT},
        {"kind": CREDIT, "seqno": 0, "length": 1},
        {"kind": FAREWELL, "seqno": 0, "length": 257},
        {"kind": FAREWELL, "seqno": 0, "length": (1 << 64) - 1},
    ],
    ids=str,
)
def test_a_bad_header_is_a_fault(rogue: Rogue, bad: dict[str, int]) -> None:
    rogue.frame(**bad)
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=SOON_S))
    faults_for_good(lambda: rogue.victim.reserve(1))


def test_more_messages_than_slots_are_a_fault_after_the_honest_ones(rogue: Rogue) -> None:
    for n in range(SLOTS + 1):
        rogue.frame(seqno=ZERO + n + 1, length=1, payload=b"%d" % n)
    arrivals = [rogue.victim.wait_signal(timeout_s=SOON_S) for _ in range(SLOTS)]
    assert [bytes(arrival.data) for arrival in arrivals] == [b"0", b"1", b"2"]
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=SOON_S))
    assert bytes(arrivals[0].data) == b"0"


def test_a_cut_inside_a_frame_is_a_fault_and_no_message(rogue: Rogue) -> None:
    rogue.frame(length=50, payload=b"half")
    rogue.stream.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerFault, match="gone"):
        rogue.victim.wait_signal(timeout_s=SOON_S)


@pytest.mark.parametrize("reason", [b"\xff" * 256, b"", b"a" * 256])
def test_any_farewell_text_is_only_a_text(rogue: Rogue, reason: bytes) -> None:
    rogue.frame(FAREWELL, len(reason), seqno=0, payload=reason)
    with pytest.raises(PeerFault):
        rogue.victim.wait_signal(timeout_s=SOON_S)


def test_credit_leaves_at_once_when_it_is_scarce() -> None:
    """Else the kernel would hold the frame back for 200 ms."""
    fabric = netstack.open("tcp", key=KEY)
    times = []
    for _ in range(5):
        a, b = connect(fabric, geometry=GEOMETRY)
        for _ in range(SLOTS):
            send(a, b"x")
        arrivals = [b.wait_signal(timeout_s=SOON_S) for _ in range(SLOTS)]
        b.release(arrivals[0])
        start = time.monotonic()
        a.reserve(1, timeout_s=SOON_S)
        times.append(time.monotonic() - start)
    fabric.close()
    assert min(times) < 0.1


def test_frames_in_single_bytes(rogue: Rogue) -> None:
    rogue.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in pack(None, 0, b"abc", seqno=ZERO + 1, credit=ZERO, tag=b"tag"):
        with pytest.raises(netstack.ChannelTimeout):
            rogue.victim.wait_signal(timeout_s=0)
        rogue.stream.send(bytes([byte]))
    arrival = rogue.victim.wait_signal(timeout_s=SOON_S)
    assert (arrival.data, arrival.tag.rstrip(b"\0")) == (b"abc", b"tag")


@settings(max_examples=60, deadline=None)
@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from([DATA, DATA, CREDIT, FAREWELL, 0, 77]),
            st.one_of(st.integers(0, SLOT_BYTES), st.integers(0, (1 << 64) - 1)),
            st.one_of(st.integers(ZERO, ZERO + 4), st.integers(0, (1 << 64) - 1)),
            st.one_of(st.just(ZERO), st.integers(ZERO, ZERO + 4)),
        ),
        max_size=8,
    ),
    noise=st.binary(max_size=300),
)
def test_random_streams_never_do_more_than_fault(frames: list[tuple[int, int, int, int]], noise: bytes) -> None:
    rogue = Rogue()
    try:
        for kind, length, seqno, credit in frames:
            with suppress(OSError):  # the victim has hung up
                rogue.frame(kind, length, seqno, credit, bytes(min(length, SLOT_BYTES)))
            with suppress(netstack.ChannelError):
                slot = rogue.victim.reserve(SLOT_BYTES)
                rogue.victim.put_signal(slot, b"")
            with suppress(netstack.ChannelError):
                arrival = rogue.victim.wait_signal(timeout_s=0.001)
                assert arrival.data.nbytes <= SLOT_BYTES
                rogue.victim.release(arrival)
        with suppress(OSError):
            rogue.stream.sendall(noise)
        with suppress(netstack.ChannelError):
            rogue.victim.wait_signal(timeout_s=0.001)
    finally:
        rogue.close()


def put_until_full(channel: Channel, geometry: Geometry) -> None:
    for _ in range(geometry.slots):
        channel.put_signal(channel.reserve(geometry.slot_bytes), b"")


def test_a_peer_that_takes_no_bytes_is_given_up() -> None:
    fabric = TcpFabric(KEY, stall_s=0.3)
    big = Geometry(slots=4, slot_bytes=16 << 20)
    a, idle = connect(fabric, geometry=big)  # `idle` makes no call, so its kernel's buffer fills up
    start = time.monotonic()
    with pytest.raises(PeerFault, match=r"took no bytes for 0\.3 s"):
        put_until_full(a, big)
    idle.close()
    assert time.monotonic() - start < SOON_S
    fabric.close()


def test_a_host_that_does_not_answer_is_not_called_a_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that the kernel reports first counts."""

    def impatient(sock: socket.socket, _: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)

    monkeypatch.setattr(tcp, "tune", impatient)
    fabric = TcpFabric(KEY)
    big = Geometry(slots=4, slot_bytes=16 << 20)
    a, idle = connect(fabric, geometry=big)
    with pytest.raises(PeerFault, match="timed out"):
        put_until_full(a, big)
    idle.close()
    fabric.close()


def until_stuck(putting: Future[None]) -> None:
    """Puts until a put makes no progress any more."""
    with pytest.raises(TimeoutError):
        putting.result(0.3)


def test_abort_ends_a_put_that_is_stuck() -> None:
    fabric = netstack.open("tcp", key=KEY)
    big = Geometry(slots=4, slot_bytes=16 << 20)
    a, idle = connect(fabric, geometry=big)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put_until_full, a, big)
        until_stuck(putting)
        a.abort("enough")
        with pytest.raises(netstack.ChannelAborted):
            putting.result(2.0)
    idle.close()
    fabric.close()


def test_a_signal_handler_can_end_a_put_that_is_stuck() -> None:
    class Interrupt(Exception):  # noqa: N818
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    fabric = netstack.open("tcp", key=KEY)
    big = Geometry(slots=4, slot_bytes=16 << 20)
    a, idle = connect(fabric, geometry=big)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupt):
            put_until_full(a, big)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(PeerFault, match="interrupted"):  # half a frame is on the wire
        a.reserve(1)
    idle.close()
    fabric.close()


@pytest.mark.parametrize("seal", [False, True])
def test_large_messages_cross_byte_for_byte(seal: bool) -> None:
    fabric = TcpFabric(KEY, seal=seal)
    large = Geometry(slots=2, slot_bytes=(5 << 20) + 3)
    a, b = connect(fabric, geometry=large)
    payload = os.urandom(large.slot_bytes)
    with ThreadPoolExecutor(1) as pool:
        for nbytes in (large.slot_bytes, 1 << 20, 4096, 4097, 4383, 4384, 4385, 4480, 8192):
            sent = pool.submit(send, a, payload[:nbytes])
            arrival = b.wait_signal(timeout_s=SOON_S)
            assert arrival.data == payload[:nbytes]
            b.release(arrival)
            sent.result(SOON_S)
    fabric.close()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "224.0.0.1:80", "[ff02::1]:80"])
def test_addresses_of_no_one_interface_are_refused(address: str) -> None:
    fabric = netstack.open("tcp", key=KEY)
    with pytest.raises(ValueError, match="one interface"):
        fabric.listen(address)
    with pytest.raises(ValueError, match="one interface"):
        fabric.connect(f"tcp://{address}", Terms(outbound=GEOMETRY, inbound=GEOMETRY))


def test_a_sealing_listener_refuses_a_peer_that_wants_to_go_without() -> None:
    sealing, plain = TcpFabric(KEY, seal=True), TcpFabric(KEY)
    listener = sealing.listen()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=1.0)
        with pytest.raises(netstack.HandshakeError):
            plain.connect(listener.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY))
        with pytest.raises(netstack.ChannelTimeout, match="not encrypted"):
            accepted.result(SOON_S)
    sealing.close()


class Sealed:
    """A connector with the raw stream of a sealed channel, and its keys."""

    def __init__(self, fabric: TcpFabric) -> None:
        listener = fabric.listen()
        host, _, port = listener.url.partition("://")[2].rpartition(":")
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            self.stream = socket.create_connection((host, int(port)))
            terms, deadline = replace(HELLO, cipher=SEAL), time.monotonic() + SOON_S
            session = run(self.stream, offer(KEY, terms), "listener", deadline=deadline)
            self.victim: Channel = accepted.result(SOON_S)
        self.stream.setblocking(True)
        self.there, self.back = session.keys(listening=False)

    def frame(self, payload: bytes) -> bytes:
        """The next one, with so much payload, as the victim has sent it."""
        return self.stream.recv(HEADER_BYTES + len(payload), socket.MSG_WAITALL)


@pytest.fixture
def sealed() -> Iterator[Callable[[], Sealed]]:
    made: list[Sealed] = []
    with closing(TcpFabric(KEY, seal=True)) as fabric:

        def make() -> Sealed:
            made.append(Sealed(fabric))
            return made[-1]

        yield make
        for each in made:
            each.stream.close()


def test_sealed_frames_are_those_of_the_second_implementation(sealed: Callable[[], Sealed]) -> None:
    """Both ways: what Python seals is taken, and what comes back it opens; its payload is nowhere in clear."""
    peer = sealed()
    for n in range(2):
        peer.stream.sendall(pack(peer.there, n, b"good%d" % n, seqno=ZERO + 1 + n, credit=ZERO, tag=b"tag"))
        arrival = peer.victim.wait_signal(timeout_s=SOON_S)
        assert (arrival.data, arrival.tag.rstrip(b"\0")) == (b"good%d" % n, b"tag")
    messages = [(b"straight from its slot", b"first"), (b"from the next", b"second")]
    for payload, tag in messages:
        send(peer.victim, payload, tag)
    for n, (payload, tag) in enumerate(messages):
        frame = peer.frame(payload)
        assert payload not in frame
        assert tag not in frame
        (kind, length, seqno, credit, told), opened = unpack(peer.back, n, frame)
        assert (kind, length, seqno, credit) == (DATA, len(payload), ZERO + 1 + n, ZERO)
        assert (told.rstrip(b"\0"), opened) == (tag, payload)


def test_a_frame_that_comes_back_is_none(sealed: Callable[[], Sealed]) -> None:
    peer = sealed()
    send(peer.victim, b"mine")
    peer.stream.sendall(peer.frame(b"mine"))
    faults_for_good(lambda: peer.victim.wait_signal(timeout_s=SOON_S))


def test_a_frame_of_another_session_is_none(sealed: Callable[[], Sealed]) -> None:
    """The frame is of the same peers, terms and count; it is good in its own session."""
    first, second = sealed(), sealed()
    frame = pack(first.there, 0, b"good", seqno=ZERO + 1, credit=ZERO)
    for peer in (first, second):
        peer.stream.sendall(frame)
    assert first.victim.wait_signal(timeout_s=SOON_S).data == b"good"
    faults_for_good(lambda: second.victim.wait_signal(timeout_s=SOON_S))


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "example.org:80", "127.0.0.1:http", "127.0.0.1:-1", "127.0.0.1:65536", ":80", "127.0.0.1:"]
)
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        netstack.open("tcp", key=KEY).listen(address)


def test_a_free_port_is_chosen_and_localhost_is_understood() -> None:
    fabric = netstack.open("tcp", key=KEY)
    urls = {fabric.listen(address).url for address in ("", "127.0.0.1:0", "localhost:0")}
    assert len(urls) == 3
    assert not any(url.endswith(":0") for url in urls)
    fabric.close()


def test_ipv6_loopback() -> None:
    fabric = netstack.open("tcp", key=KEY)
    try:
        listener = fabric.listen("[::1]:0")
    except netstack.ChannelError as error:
        pytest.skip(f"no IPv6 here: {error}")
    a, b = connect(fabric, listener, GEOMETRY)
    send(a, b"six")
    assert b.wait_signal(timeout_s=SOON_S).data == b"six"
    fabric.close()
