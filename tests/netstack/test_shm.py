"""Shared memory against peers that hold the key and write what they like, and the life of the mapping."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, ROOT, SOON_S, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack import Channel, Geometry, HandshakeError, PeerFault, Terms
from lamina.netstack.bootstrap.handshake import Hello, answer, offer, run

EPOCH = 9
SLOTS, SLOT_BYTES = 3, 5000
GEOMETRY = Geometry(slots=SLOTS, slot_bytes=SLOT_BYTES)
HELLO = Hello(scheme="shm", epoch=EPOCH, outbound=GEOMETRY, inbound=GEOMETRY)
ZERO = EPOCH << 48
SIGNAL, CREDIT, ARRIVAL_BELL, SPACE_BELL, FAREWELL = 0, 64, 128, 192, 256  # csrc/netstack/host/ring.h
PAGE, STRIDE = 4096, 8192
RING = PAGE + SLOTS * STRIDE  # bytes of one direction; the connector's outbound comes first

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def native() -> None:
    open_or_skip("shm")


class Rogue:
    """An authenticated connector that has nothing but the raw memory. It sends in ring 0 and receives in ring 1."""

    def __init__(self) -> None:
        self.fabric = netstack.open("shm", key=KEY)
        listener = self.fabric.listen()
        self.life_line = socket.socket(socket.AF_UNIX)
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, timeout_s=SOON_S)
            self.life_line.connect("\0" + listener.url.partition("://")[2])
            run(self.life_line, offer(KEY, HELLO), "listener", deadline=time.monotonic() + SOON_S)
            self.victim: Channel = accepted.result(SOON_S)
        _, fds, _, _ = socket.recv_fds(self.life_line, 1, 1)
        self.memory = mmap.mmap(fds[0], 2 * RING)
        os.close(fds[0])

    def word(self, ring: int, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.memory, ring * RING + offset, value % (1 << 64))

    def header(self, message: int, seqno: int, length: int) -> None:
        offset = PAGE + message % SLOTS * STRIDE
        self.word(0, offset, seqno)
        self.word(0, offset + 8, length)

    def close(self) -> None:
        self.fabric.close()
        self.life_line.close()


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
    """The layout above is the real one: honest writes are received, so the faults below are faults."""
    rogue.header(0, ZERO + 1, 4)
    rogue.memory[PAGE + 64 : PAGE + 68] = b"good"
    rogue.word(0, SIGNAL, ZERO + 1)
    assert rogue.victim.wait_signal(timeout_s=0).data == b"good"
    for _ in range(SLOTS):
        send(rogue.victim, b"x")
    rogue.word(1, CREDIT, ZERO + 1)
    send(rogue.victim, b"x")


@pytest.mark.parametrize(
    "signal",
    [ZERO + SLOTS + 1, ZERO - 1, 0, 1, ((EPOCH - 1) << 48) + 1, ((EPOCH + 1) << 48) + 1, (1 << 64) - 1],
    ids=["beyond the ring", "backwards", "zero", "no epoch", "old epoch", "next epoch", "all ones"],
)
def test_a_bad_signal_is_a_fault(rogue: Rogue, signal: int) -> None:
    rogue.header(0, ZERO + 1, 4)
    rogue.word(0, SIGNAL, signal)
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=0))
    rogue.word(0, SIGNAL, ZERO + 1)  # it does not heal
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=0))
    faults_for_good(lambda: rogue.victim.reserve(1))


@pytest.mark.parametrize(
    ("seqno", "length"),
    [(ZERO + 1, SLOT_BYTES + 1), (ZERO + 1, (1 << 64) - 1), (ZERO + 1, 1 << 63), (ZERO + 2, 4), (ZERO, 4), (1, 4)],
)
def test_a_bad_header_is_a_fault(rogue: Rogue, seqno: int, length: int) -> None:
    rogue.header(0, seqno, length)
    rogue.word(0, SIGNAL, ZERO + 1)
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=0))


@pytest.mark.parametrize("credit", [ZERO + SLOTS + 1, ZERO - 1, 0, ((EPOCH + 1) << 48), (1 << 64) - 1])
def test_a_bad_credit_is_a_fault(rogue: Rogue, credit: int) -> None:
    for _ in range(SLOTS):
        send(rogue.victim, b"x")
    rogue.word(1, CREDIT, credit)
    faults_for_good(lambda: rogue.victim.reserve(1))


def test_the_signal_does_not_go_back(rogue: Rogue) -> None:
    for n in range(2):
        rogue.header(n, ZERO + n + 1, 4)
    rogue.word(0, SIGNAL, ZERO + 2)
    for _ in range(2):
        rogue.victim.wait_signal(timeout_s=0)
    rogue.word(0, SIGNAL, ZERO + 1)
    faults_for_good(lambda: rogue.victim.wait_signal(timeout_s=0))


def test_credit_does_not_go_back(rogue: Rogue) -> None:
    for _ in range(SLOTS):
        send(rogue.victim, b"x")
    rogue.word(1, CREDIT, ZERO + 2)
    for _ in range(2):
        send(rogue.victim, b"x")
    rogue.word(1, CREDIT, ZERO + 1)
    faults_for_good(lambda: rogue.victim.reserve(1))


def test_the_length_is_read_once(rogue: Rogue) -> None:
    """A view does not change by what the peer writes after the hand-over."""
    rogue.header(0, ZERO + 1, 4)
    rogue.word(0, SIGNAL, ZERO + 1)
    arrival = rogue.victim.wait_signal(timeout_s=0)
    rogue.header(0, ZERO + 1, SLOT_BYTES)
    assert arrival.data.nbytes == 4


@pytest.mark.parametrize("reason", [b"\xff" * 256, b"a" * 256, b"", "caf\u00e9".encode() * 60])
def test_any_farewell_text_is_only_a_text(rogue: Rogue, reason: bytes) -> None:
    start = FAREWELL + 4
    rogue.memory[start : start + len(reason)] = reason
    for kind in (2, 1, 0xFFFFFFFF):
        rogue.memory[FAREWELL:start] = struct.pack("<I", kind)
        with pytest.raises(PeerFault):
            rogue.victim.wait_signal(timeout_s=0)


def test_a_byte_on_the_life_line_is_the_end(rogue: Rogue) -> None:
    rogue.life_line.send(b"!")
    with pytest.raises(PeerFault):
        rogue.victim.wait_signal(timeout_s=SOON_S)


WRITES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from([SIGNAL, CREDIT, ARRIVAL_BELL, SPACE_BELL, FAREWELL, PAGE, PAGE + 8, PAGE + STRIDE]),
        st.one_of(st.integers(0, 5), st.integers(ZERO - 2, ZERO + 5), st.integers(0, (1 << 64) - 1)),
        st.sampled_from(["wait", "send", "release"]),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(writes=WRITES)
def test_random_writes_never_do_more_than_fault(writes: list[tuple[int, int, int, str]]) -> None:
    rogue = Rogue()
    try:
        arrivals = []
        for ring, offset, value, call in writes:
            rogue.word(ring, offset, value)
            with suppress(netstack.ChannelError):
                if call == "wait":
                    arrival = rogue.victim.wait_signal(timeout_s=0.001)
                    assert arrival.data.nbytes <= SLOT_BYTES
                    bytes(arrival.data)
                    arrivals.append(arrival)
                elif call == "send":
                    slot = rogue.victim.reserve(SLOT_BYTES, timeout_s=0.001)
                    slot.data[:] = bytes(SLOT_BYTES)
                    rogue.victim.put_signal(slot, b"")
                elif arrivals:
                    rogue.victim.release(arrivals.pop(0))
    finally:
        rogue.close()


@pytest.mark.parametrize("seals", ["none", "size"])
def test_unsealed_or_misfit_memory_of_a_rogue_listener_is_refused(seals: str) -> None:
    """Without seals the listener could shrink the file and so kill us with SIGBUS."""
    fabric = netstack.open("shm", key=KEY)
    place = socket.socket(socket.AF_UNIX)
    place.bind(f"\0lamina-test-{os.getpid()}-{seals}")
    place.listen()

    def listen() -> None:
        sock, _ = place.accept()
        run(sock, answer(KEY, "shm"), "connector", deadline=time.monotonic() + SOON_S)
        memory = os.memfd_create("lamina", os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, 2 * RING)
        if seals == "size":
            os.ftruncate(memory, 2 * RING + PAGE)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        socket.send_fds(sock, [b"M"], [memory])
        os.close(memory)
        sock.close()

    with place, ThreadPoolExecutor(1) as pool:
        pool.submit(listen)
        with pytest.raises(HandshakeError, match="seal"):
            fabric.connect(f"shm://lamina-test-{os.getpid()}-{seals}", Terms(outbound=GEOMETRY, inbound=GEOMETRY))


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = netstack.open("shm", key=KEY)
    listener = fabric.listen()
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(HandshakeError, match="user"):
        fabric.connect(listener.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY))
    fabric.close()


def mapped() -> bool:
    return "memfd:lamina" in Path("/proc/self/maps").read_text()


@pytest.mark.no_retry
def test_views_outlive_close_and_the_mapping_goes_with_the_last() -> None:
    fabric = netstack.open("shm", key=KEY)
    a, b = connect(fabric, geometry=GEOMETRY)
    send(a, b"still here")
    arrival = b.wait_signal(timeout_s=SOON_S)
    slot = a.reserve(10)
    inbox, outbox = memoryview(arrival.data), memoryview(slot.data)  # as torch.frombuffer holds them
    for end in (a, b):
        end.close()
    b.release(arrival)
    fabric.close()
    del a, b, arrival, slot, fabric
    gc.collect()
    assert mapped()
    assert inbox == b"still here"
    outbox[:] = b"0123456789"
    del inbox, outbox
    gc.collect()
    assert not mapped()


def test_calls_after_close_touch_no_memory() -> None:
    """With no view left the mapping is gone, so a touch would be a crash."""
    fabric = netstack.open("shm", key=KEY)
    a, b = connect(fabric, geometry=GEOMETRY)
    send(a, b"x")
    arrival = b.wait_signal(timeout_s=SOON_S)
    arrival.data.release()
    a.close()
    b.close()
    assert not mapped()
    b.release(arrival)
    b.abort("late")
    for call in (lambda: b.reserve(1), lambda: b.wait_signal(timeout_s=0)):
        with pytest.raises(netstack.ChannelAborted):
            call()


def test_the_payload_is_the_inbox_itself() -> None:
    """Zero copy: what is written into a reserved slot is in the receiver's mapping before put_signal."""
    fabric = netstack.open("shm", key=KEY)
    a, b = connect(fabric, geometry=Geometry(slots=1, slot_bytes=64))
    send(a, b"first")
    first = b.wait_signal(timeout_s=SOON_S)
    b.release(first)
    slot = a.reserve(5, timeout_s=SOON_S)
    slot.data[:] = b"again"
    assert first.data == b"again"  # a use after release, on purpose
    fabric.close()


def test_one_cpu_never_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.netstack.host import shm

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert shm.ShmFabric(KEY).spin_s == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert shm.ShmFabric(KEY).spin_s == shm.SPIN_S


def test_a_wait_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = netstack.open("shm", key=KEY)
    a, _ = connect(fabric, geometry=GEOMETRY)
    before = time.thread_time()
    with pytest.raises(netstack.ChannelTimeout):
        a.wait_signal(timeout_s=1.0)
    assert time.thread_time() - before < 0.1
    fabric.close()


@pytest.mark.parametrize("event", ["message", "release", "abort"])
def test_a_sleeper_is_woken_by_the_event_and_not_by_the_next_look_at_the_life_line(event: str) -> None:
    """A sleeper looks by itself every 50 ms; the median of many wake-ups is far below the mean of that, 25 ms.

    A busy machine gets several tries.
    """
    assert any(median_wake_s(event) < 0.018 for _ in range(5))


def median_wake_s(event: str) -> float:
    fabric = netstack.open("shm", key=KEY)
    times = []
    for _ in range(9):
        a, b = connect(fabric, geometry=Geometry(slots=1, slot_bytes=64))
        if event == "release":
            send(b, b"full")
            arrival = a.wait_signal(timeout_s=SOON_S)
        woken: list[float] = []

        def sleep(end: Channel = b, woken: list[float] = woken) -> None:
            with suppress(netstack.ChannelError):
                end.reserve(1, timeout_s=SOON_S) if event == "release" else end.wait_signal(timeout_s=SOON_S)
            woken.append(time.monotonic())

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        time.sleep(0.06 + 0.005 * len(times))  # not for order: it varies the phase of the sleeper's own looks
        start = time.monotonic()
        if event == "message":
            send(a, b"x")
        elif event == "release":
            a.release(arrival)
        else:
            a.abort("enough")
        sleeper.join(SOON_S)
        times.append(woken[0] - start)
    fabric.close()
    return sorted(times)[len(times) // 2]


def test_without_the_native_module_the_error_names_the_fix() -> None:
    code = (
        "import sys, lamina.netstack; sys.modules['lamina.netstack.host._netstack'] = None; "
        "lamina.netstack.open('shm', key=b'k' * 32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: transports between processes need")
    assert "build_ext" in last
