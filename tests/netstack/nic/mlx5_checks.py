"""The transport mlx5 where its NIC does what a test says; ``test_mlx5`` runs this on a machine of mlx5_stand_in.py.

Covers: netstack/cuda/kernel_channel.py, netstack/mlx5/channel.py, netstack/mlx5/gpu_memory.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from mlx5_without_nic import FAKE
from test_verbs_faults import SMALL, fault_of
from wiring import KEY, SOON_S, connect, send

from lamina import netstack
from lamina.netstack import Geometry
from lamina.netstack.bootstrap.listener import StreamListener
from lamina.netstack.contract.fabric import DEATH_NOTICED_S
from lamina.netstack.cuda import kernel_channel
from lamina.netstack.cuda.channel_memory import inbox_bytes
from lamina.netstack.cuda.driver import CudaStream, Driver, Pinned
from lamina.netstack.host.native_module import ABORTED, FAILED
from lamina.netstack.mlx5.channel import MLX5, Mlx5Channel
from lamina.netstack.mlx5.gpu_memory import joined
from lamina.netstack.mlx5.laned_card import FENCED, LanedCard
from lamina.netstack.mlx5.mlx5 import Mlx5Fabric, Mlx5Provider
from lamina.netstack.rdma import native_backend
from lamina.netstack.rdma.traffic_class import PARTITION, SERVICE_LEVEL, TRAFFIC_CLASS

LOCAL_WRITE, REMOTE_WRITE = 1, 2  # of ibv_access_flags


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    library = ctypes.CDLL(os.environ["LAMINA_LIBCUDA"])
    before, memories = library.fake_cuda_live(), (FAKE.fake_mlx5_memories(), FAKE.fake_mlx5_rings())
    yield
    gc.collect()
    deadline = time.monotonic() + SOON_S  # a trial that failed is given back by its thread

    def after() -> tuple[int, tuple[int, int]]:
        return library.fake_cuda_live(), (FAKE.fake_mlx5_memories(), FAKE.fake_mlx5_rings())

    while after() != (before, memories) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after() == (before, memories)


def ends() -> tuple[netstack.Fabric, Mlx5Channel, Mlx5Channel]:
    """Both ends of a channel of kernels."""
    fabric = netstack.open("mlx5", key=KEY)
    a, b = connect(fabric, geometry=SMALL, kernels=True)
    assert isinstance(a, Mlx5Channel)
    assert isinstance(b, Mlx5Channel)
    return fabric, a, b


def number_of(end: Mlx5Channel, lane: int = 0) -> int:
    return end.lane_struct(lane)["queue.number"]


def talk(a: netstack.Channel, b: netstack.Channel) -> None:
    send(a, b"hello")
    arrival = b.wait_signal(timeout_s=SOON_S)
    assert arrival.data == b"hello"
    b.release(arrival)


def test_mlx5_posts_what_its_own_nic_executes() -> None:
    fabric, a, b = ends()
    for n in range(100):
        talk(*((a, b) if n % 2 else (b, a)))
    for end in (a, b):
        counts = (ctypes.c_uint64 * 5)()
        FAKE.fake_mlx5_counters(number_of(end), counts)
        assert counts[0] >= 145, "two for a message, one for a credit, of which the last may be under way"
        assert counts[3] == 0
    fabric.close()


def test_mlx5_credits_of_kernels_ride_on_messages() -> None:
    """A layer takes six work requests, two for each of Q, K and V, and O, by two queue pairs. To a peer that gets no
    message credits go by themselves, by the first, one for three messages of four slots; who takes the channel back
    tells the rest.
    """
    fabric = netstack.open("mlx5", key=KEY)
    a, b = connect(fabric, geometry=Geometry(slots=4, slot_bytes=200), kernels=True)
    assert isinstance(a, Mlx5Channel)
    assert isinstance(b, Mlx5Channel)
    driver = Driver()
    mail, streams = Pinned(driver, 4096), [CudaStream(driver) for _ in range(2)]
    mail.view[:8] = (5).to_bytes(8, "little")
    at = mail.address

    def move(sender: Mlx5Channel, receiver: Mlx5Channel, messages: int, *, bulk: bool = False) -> None:
        for stream, end in zip(streams, (sender, receiver), strict=True):
            side, rest = end.hand_to_device(), (at, at + 16, at + 64, int(SOON_S * 1e9), at + 48)
            side = side.bulk if bulk else side
            for _ in range(messages):
                if end is sender:
                    side.send(stream.number, at + 512, at, at + 16, int(SOON_S * 1e9), at + 52)
                else:
                    side.receive_due(stream.number, at + 1024, *rest)
        for stream in streams:
            stream.synchronize()
        assert bytes(mail.view[48:56]) == bytes(8)

    def requests() -> list[int]:
        return [requests_of(end, lane) for end in (a, b) for lane in (0, 1)]

    for _ in range(20):
        move(a, b, 1)
        move(a, b, 1, bulk=True)
        move(b, a, 1)
    assert requests() == [40, 40, 40, 0]
    move(a, b, 30)
    assert requests() == [40 + 60, 40, 40 + 10, 0]
    move(a, b, 30, bulk=True)
    assert requests() == [100, 40 + 60, 50 + 10, 0]
    assert [end.lane_struct(lane)["credits"] for end in (a, b) for lane in (0, 1)] == [0, 0, 20, 0]
    move(a, b, 2)
    move(a, b, 2, bulk=True)
    for end in (a, b):
        end.take_from_device()
    assert requests()[2:] == [60 + 1, 0], "one for both lanes"
    move(a, b, 2, bulk=True)
    b.take_from_device()
    assert requests()[2:] == [61 + 1, 0], "also where the first has nothing to tell"
    for _ in range(4):
        a.reserve(1, timeout_s=SOON_S)
    for part in (*streams, mail, fabric, driver):
        part.close()


def requests_of(end: Mlx5Channel, lane: int = 0) -> int:
    """Returns the requests that its NIC has executed, once it has nothing to do any more."""
    counts, deadline = (ctypes.c_uint64 * 5)(), time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        FAKE.fake_mlx5_counters(number_of(end, lane), counts)
        if counts[0] == end.lane_struct(lane)["queue.committed"]:
            break
    return counts[0]


def test_mlx5_a_thread_rings_where_the_gpu_may_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And ends with the fabric. A peer notices nothing of it."""
    before = len(os.listdir("/proc/self/task"))
    monkeypatch.setenv("FAKE_CUDA_RINGS_NOTHING", "1")
    provider = Mlx5Provider("", Driver())
    proxied = Mlx5Fabric(KEY, way=provider)
    monkeypatch.delenv("FAKE_CUDA_RINGS_NOTHING")
    fabric = netstack.open("mlx5", key=KEY)
    a, b = connect(proxied, fabric.listen(), geometry=SMALL)
    assert caplog.text.count("the GPU may not ring the NIC") == caplog.text.count("PeerMappingOverride=1") == 1
    for _ in range(100):
        talk(a, b)
        talk(b, a)
    ringer = provider.ringer
    assert ringer is not None
    counts = (ctypes.c_uint64 * 5)()
    assert isinstance(a, Mlx5Channel)
    FAKE.fake_mlx5_counters(number_of(a), counts)
    assert 100 <= counts[2] <= ringer.rung(), "each message waits for the one before; credits may be rung on with them"
    assert counts[3] == 0, "no doorbell was refused"
    proxied.close()
    fabric.close()
    with pytest.raises(ValueError, match="closed"):
        ringer.rung()
    deadline = time.monotonic() + SOON_S
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("variable", ["", "FAKE_CUDA_EXPORTS_NOTHING", "FAKE_MLX5_TAKES_NO_EXPORT"])
def test_mlx5_registers_inbox_and_staging_and_no_more(
    variable: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel registers the first lane's inbox and staging at each end; of bulk, which kernels alone have, the
    connector's staging and the listener's inbox. By dma-buf; by address, as nvidia-peermem knows it, where the GPU's
    driver exports nothing, or the NIC's takes nothing of it.
    """
    pieces = 6 if kernels else 4
    FAKE.fake_mlx5_bytes.restype = ctypes.c_uint64
    if variable:
        monkeypatch.setenv(variable, "1")
    fabric = netstack.open("mlx5", key=KEY)
    before = FAKE.fake_mlx5_memories(), FAKE.fake_mlx5_exported(), FAKE.fake_mlx5_bytes()
    a, b = connect(fabric, geometry=SMALL, kernels=kernels)
    send(a, b"hello")
    assert b.wait_signal(timeout_s=SOON_S).data == b"hello"
    assert FAKE.fake_mlx5_memories() == before[0] + pieces
    nbytes = pieces * inbox_bytes(SMALL)
    assert FAKE.fake_mlx5_bytes() == before[2] + nbytes, "staging is as large as the inbox of the peer"
    assert FAKE.fake_mlx5_exported() == (0 if variable else pieces)
    fabric.close()


def test_mlx5_a_peer_whose_nic_is_silent_is_named_on_both_sides() -> None:
    fabric, a, b = ends()
    talk(a, b)
    FAKE.fake_mlx5_silence(number_of(a))
    send(a, b"nobody hears this")
    assert "the NIC reports error 0x15 (the peer's NIC does not answer)" in fault_of(a)
    assert "the peer aborted: the NIC reports error 0x15" in fault_of(b)
    fabric.close()


def test_mlx5_rings_lie_where_the_nic_s_firmware_takes_them() -> None:
    """In the GPU's memory, for which its kernels' fences suffice, else libmlx5's in the host's; both talk to both."""
    firmware = os.environ.get("FAKE_MLX5_HAS_FIRMWARE")
    fabric, a, b = ends()
    assert FAKE.fake_mlx5_rings() == (4 if firmware else 0), "two queue pairs at each end"
    for end in (a, b):
        for lane in (0, 1):
            struct = end.lane_struct(lane)
            assert struct["queue.near"] == bool(firmware)
            assert (struct["queue.alternate"] == 0) == bool(firmware)
    talk(a, b)
    talk(b, a)
    fabric.close()


@pytest.mark.parametrize("variable", ["FAKE_CUDA_EXPORTS_NOTHING", "FAKE_MLX5_TAKES_NO_EXPORT"])
def test_mlx5_rings_are_the_host_s_where_the_gpu_s_cannot_be(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    hosts = netstack.open("mlx5", key=KEY)
    monkeypatch.delenv(variable)
    fabric = netstack.open("mlx5", key=KEY)
    a, b = connect(hosts, fabric.listen(), geometry=SMALL)
    assert isinstance(a, Mlx5Channel)
    assert isinstance(b, Mlx5Channel)
    assert not a.lane_struct()["queue.near"]
    for _ in range(20):
        talk(a, b)
        talk(b, a)
    hosts.close()
    fabric.close()


def test_mlx5_what_is_launched_while_kernels_wait_is_loaded_before() -> None:
    """To load a kernel may wait for all that runs (lazy loading), such as one that waits for a peer."""
    fabric, a, _ = ends()
    driver = a.hand_to_device().driver
    before = dict(driver.functions)
    a.close()
    assert driver.functions == before
    assert "mlx5_flush" in before
    fabric.close()


EVENTS = [  # of ibv_event_type, in their order, as libibverbs calls them
    "CQ error", "local work queue catastrophic error", "invalid request local work queue error",
    "local access violation work queue error",
]  # fmt: skip


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("event", range(len(EVENTS)))
def test_mlx5_an_event_of_the_device_ends_a_wait(event: int, lane: int) -> None:
    """The event ends it for either queue pair."""
    fabric, a, b = ends()
    FAKE.fake_mlx5_event(number_of(a, lane), event)
    start = time.monotonic()
    assert f"our NIC reports: {EVENTS[event]}" in fault_of(a)
    assert "the peer aborted: our NIC reports" in fault_of(b)
    assert time.monotonic() - start < 10 * DEATH_NOTICED_S
    fabric.close()


def test_mlx5_kernels_that_wait_hear_of_their_device() -> None:
    """Not of a port that is down: it may come up again."""
    fabric, a, b = ends()
    driver = Driver()
    side, mail, stream = b.hand_to_device(), Pinned(driver, 4096), CudaStream(driver)
    mail.view[:8] = (5).to_bytes(8, "little")

    def receive() -> int:
        at = mail.address
        side.receive_due(stream.number, at + 1024, at, at + 16, at + 64, int(SOON_S * 1e9), at + 48)
        send(a, b"hello")
        stream.synchronize()
        return int.from_bytes(mail.view[48:52], "little")

    FAKE.fake_mlx5_event(number_of(b), 10)  # IBV_EVENT_PORT_ERR
    assert receive() == 0
    assert mail.view[1024:1029] == b"hello"
    FAKE.fake_mlx5_silence(number_of(a))
    FAKE.fake_mlx5_event(number_of(b), 1)
    status = receive()
    assert status == ABORTED
    with pytest.raises(netstack.PeerFault, match="our NIC reports: local work queue catastrophic error"):
        side.check(status)
    for part in (stream, mail, fabric, driver):
        part.close()


def test_mlx5_kernels_that_wait_for_an_o_hear_of_bulk_that_was_lost() -> None:
    """K and V were sent by a queue pair that died: no answer comes, and the other queue pair is well."""
    fabric, a, b = ends()
    driver = Driver()
    side, mail, stream = a.hand_to_device(), Pinned(driver, 4096), CudaStream(driver)
    b.hand_to_device()
    FAKE.fake_mlx5_silence(number_of(a, 1))
    mail.view[:8], at = (5).to_bytes(8, "little"), mail.address
    start = time.monotonic()
    side.bulk.send(stream.number, at + 512, at, at + 16, int(SOON_S * 1e9), at + 48)
    side.receive_due(stream.number, at + 1024, at, at + 16, at + 64, int(SOON_S * 1e9), at + 48)
    stream.synchronize()
    status = int.from_bytes(mail.view[48:52], "little")
    assert status == FAILED
    with pytest.raises(netstack.PeerFault, match=r"error 0x15 \(the peer's NIC does not answer\)"):
        side.check(status)
    assert time.monotonic() - start < SOON_S / 2
    assert "the peer aborted: the NIC reports error 0x15" in fault_of(b)
    for part in (stream, mail, fabric, driver):
        part.close()


def with_bulk(card: LanedCard, **changes: Any) -> LanedCard:
    first, bulk = card.lanes
    return replace(card, lanes=(first, replace(bulk, **changes)))


LIES: dict[str, Callable[[LanedCard], LanedCard]] = {
    "its two queue pairs are one": lambda card: with_bulk(card, route=card.lanes[0].route),
    "sees a NIC's writes in any order.*take --transport gin or verbs": lambda card: replace(card, ordering=FENCED),
    "names an order of a NIC's writes, 7, that": lambda card: replace(card, ordering=7),
    "has 4096 bytes where the terms need": lambda card: with_bulk(card, nbytes=4096),
}


@pytest.mark.parametrize("liar", ["connector", "listener"])
@pytest.mark.parametrize("words", LIES)
def test_mlx5_a_peer_that_lies_about_its_lanes_is_refused_in_one_line(
    words: str, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = netstack.open("mlx5", key=KEY)
    honest, lie, lied = LanedCard.pack, LIES[words], list[LanedCard]()

    def pack(card: LanedCard) -> bytes:
        if (card.lanes[1].nbytes == 0) == (liar == "connector"):
            lied.append(lie(card))
            return honest(lied[-1])
        return honest(card)

    monkeypatch.setattr(LanedCard, "pack", pack)
    of_kernels = netstack.Terms(outbound=SMALL, inbound=SMALL, kernels=True)
    listener = fabric.listen()
    assert isinstance(listener, StreamListener)
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(listener.accept, timeout_s=SOON_S)
        with pytest.raises(netstack.ChannelError) as refused:
            fabric.connect(listener.url, of_kernels, timeout_s=SOON_S)
        deadline = time.monotonic() + SOON_S
        while not listener.refusal and time.monotonic() < deadline:
            time.sleep(0.01)
        listener.close()
        with pytest.raises(netstack.ChannelAborted):
            accepted.result(SOON_S)
    said = listener.refusal if liar == "connector" else str(refused.value)
    assert re.search(words, said)
    assert "\n" not in said
    assert len(lied) == 1
    fabric.close()


def test_mlx5_an_abort_waits_for_no_nic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for its peer: what was put may be lost. A close waits for it, but for a NIC that stands still not long."""
    fabric, a, b = ends()
    talk(a, b)
    FAKE.fake_mlx5_serve(False)
    monkeypatch.setattr(kernel_channel, "STALL_NS", 10**15)
    send(a, b"on its way")
    a.abort("enough")
    assert "the peer aborted: enough" in fault_of(b)
    send_is_over = pytest.raises(netstack.ChannelAborted, match="aborted or closed on this side")
    with send_is_over:
        a.reserve(1, timeout_s=SOON_S)
    a.close()
    c, d = connect(fabric, geometry=SMALL)
    send(c, b"on its way")
    monkeypatch.setattr(kernel_channel, "STALL_NS", 10**7)
    c.close()
    FAKE.fake_mlx5_serve(True)
    with pytest.raises(netstack.PeerFault, match="the peer closed the channel"):
        d.wait_signal(timeout_s=SOON_S)
    fabric.close()


def test_mlx5_a_wrong_key_ends_the_channel() -> None:
    """A lie of this side's own: the peer's NIC takes it for what it is, and nothing of the peer's is touched."""
    fabric, a, b = ends()
    talk(a, b)
    driver = Driver()
    state = a.lane_struct()
    driver.write(a.hand_to_device().channel, MLX5.layout.pack(state | {"peer.key": state["peer.key"] ^ 0x100}))
    a.take_from_device()
    send(a, b"lie")
    assert "the peer's memory is not open to us there" in fault_of(a)
    driver.close()
    fabric.close()


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("FAKE_CUDA_ORDERS_NOTHING", "may see a NIC's writes in another order"),
        ("FAKE_CUDA_SHARES_NOTHING", "cannot be mapped as a NIC needs it"),
    ],
)
def test_mlx5_a_gpu_that_is_none_for_it_is_refused_in_one_line(
    variable: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ImportError, match=words) as refusal:
        netstack.open("mlx5", key=KEY)
    assert "\n" not in str(refusal.value)


def path_of(end: Mlx5Channel, lane: int) -> list[int]:
    """Service level, traffic class, GID, partition, timeout, retries, and for what it is open to a peer."""
    path = (ctypes.c_uint32 * 7)()
    FAKE.fake_mlx5_path(number_of(end, lane), path)
    return list(path)


@pytest.mark.parametrize("infiniband", [False, True])
def test_mlx5_a_queue_pair_is_as_the_operator_wants_it(infiniband: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings hold for each lane, on either kind of network.

    A peer may write, and nothing else; nothing may be reordered.
    """
    monkeypatch.setenv(TRAFFIC_CLASS, "106")
    monkeypatch.setenv(SERVICE_LEVEL, "3")
    monkeypatch.setattr(native_backend, "partition_index", lambda _, key: {None: 0, 0x8001: 5}[key])
    monkeypatch.setenv(PARTITION, "0x8001")
    if infiniband:
        ports = [replace(port, link="InfiniBand") for port in native_backend.ports_here()]
        monkeypatch.setattr(native_backend, "ports_here", lambda: ports)
        monkeypatch.setenv("FAKE_MLX5_IS_INFINIBAND", "1")
        monkeypatch.setenv(SERVICE_LEVEL, "11")  # of four bits
    fabric, a, b = ends()
    for end in (a, b):
        for lane in (0, 1):
            assert path_of(end, lane) == [11 if infiniband else 3, 106, 0, 5, 14, 7, REMOTE_WRITE]
    assert FAKE.fake_mlx5_granted() == LOCAL_WRITE | REMOTE_WRITE
    talk(a, b)
    talk(b, a)
    fabric.close()


def test_mlx5_takes_each_page_once() -> None:
    assert list(joined([(8192, 100), (4096 + 64, 8), (4096, 64), (20000, 1)])) == [(4096, 12288), (16384, 20480)]
    assert list(joined([])) == []
