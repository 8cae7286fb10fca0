"""Before a channel of mlx5 is taken: trials by each of its queues, peers of another version. Run as mlx5_checks.py.

Covers: netstack/mlx5/kernel_self_test.py, netstack/mlx5/mlx5.py.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from mlx5_checks import _nothing_is_left, talk  # noqa: F401 - a fixture of all tests here, too
from mlx5_without_nic import FAKE
from test_verbs_faults import SMALL
from wiring import KEY, SOON_S, beyond_memory, connect

from lamina import netstack
from lamina.netstack.auto import AutoFabric
from lamina.netstack.bootstrap import handshake
from lamina.netstack.bootstrap.listener import HANDSHAKE_S, StreamListener
from lamina.netstack.bootstrap.self_test import SIZES
from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.mlx5 import mlx5
from lamina.netstack.mlx5.channel import Mlx5Channel, NicLane
from lamina.netstack.mlx5.kernel_self_test import KernelSelfTestCalls
from lamina.netstack.rdma.traffic_class import TIMEOUT


@pytest.mark.parametrize(("kernels", "deaf"), [(True, False), (False, False), (True, True)])
def test_mlx5_is_what_auto_takes_for_kernels_once_messages_pass(
    kernels: bool, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends compute on a GPU and name a device; where its NIC's packets do not arrive, they meet all the same."""
    monkeypatch.setenv(RDMA_DEVICE, "mlx5_0")
    fabric = netstack.open("auto", key=KEY, gpu=0)
    assert isinstance(fabric, AutoFabric)
    FAKE.fake_mlx5_deafen(deaf)
    a, b = connect(fabric, beyond_memory(fabric), geometry=SMALL, kernels=kernels)
    FAKE.fake_mlx5_deafen(False)
    if kernels and not deaf:
        assert "mlx5, for " in fabric.reason
        assert isinstance(a, Mlx5Channel)
        assert isinstance(b, Mlx5Channel)
    else:
        assert not isinstance(a, netstack.DeviceChannel)
        assert ("RDMA by kernels (a trial failed: " in fabric.reason) == deaf
    talk(a, b)
    talk(b, a)
    fabric.close()


@pytest.mark.parametrize("kernels", [True, False])
def test_mlx5_ports_of_different_packets_are_named_by_each_side(
    kernels: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes, by_thread, real = [5, 3], dict[int, int](), mlx5.card_of

    def of_another_port(pair: Any) -> Any:
        """All cards of a side say the same."""
        if (side := threading.get_ident()) not in by_thread:
            by_thread[side] = sizes.pop()
        card = real(pair)
        return replace(card, route=replace(card.route, mtu=by_thread[side]))

    fabric = netstack.open("mlx5", key=KEY)
    monkeypatch.setattr(mlx5, "card_of", of_another_port)
    a, b = connect(fabric, geometry=SMALL, kernels=kernels)
    if not kernels:
        talk(a, b)
    said = [record.getMessage() for record in caplog.records if "packets carry" in record.getMessage()]
    assert [sum(f"1024 bytes, as {whose} port takes no more" in line for line in said) for whose in ("our", "its")] == [
        1,
        1,
    ]
    fabric.close()


def test_mlx5_queue_pairs_are_as_patient_as_the_operator_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of the firmware takes no other number."""
    monkeypatch.setenv(TIMEOUT, "18")
    fabric = netstack.open("mlx5", key=KEY)
    a, b = connect(fabric, geometry=SMALL)
    talk(a, b)
    fabric.close()


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fabric of auto, whose GPU computes."""
    monkeypatch.setenv(RDMA_DEVICE, "mlx5_0")
    fabric = netstack.open("auto", key=KEY, gpu=0)
    assert isinstance(fabric, AutoFabric)
    yield fabric
    fabric.close()


@pytest.mark.parametrize("lane", [0, 1])
def test_mlx5_is_not_taken_where_one_of_its_queues_carries_nothing(
    lane: int, fabric: AutoFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of bulk carried nothing in a trial once, and was found dead by the first K and V."""

    class Half(Mlx5Channel):
        def __init__(self, driver: Any, parts: Any, lanes: tuple[NicLane, ...], *rest: Any, **more: Any) -> None:
            assert len(lanes) == 2
            FAKE.fake_mlx5_silence(lanes[lane].queue["number"])
            super().__init__(driver, parts, lanes, *rest, **more)

    monkeypatch.setattr(mlx5, "Mlx5Channel", Half)
    a, b = connect(fabric, beyond_memory(fabric), geometry=SMALL, kernels=True)
    assert "RDMA by kernels (a trial failed: " in fabric.reason
    assert not isinstance(a, netstack.DeviceChannel)
    talk(a, b)


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("nth", range(len(SIZES) - 1))  # the last one has no byte
def test_mlx5_is_not_taken_where_kernels_get_another_byte(
    nth: int, listens: bool, fabric: AutoFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There by the queue of bulk, or back."""
    honest, bent = KernelSelfTestCalls.send, list[bytes]()

    def send(calls: KernelSelfTestCalls, tag: bytes, payload: bytes, deadline: float) -> None:
        if tag[-1] == len(SIZES) + nth and (calls.out.lane_of_bulk is None) != listens:
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
            bent.append(tag)
        honest(calls, tag, payload, deadline)

    monkeypatch.setattr(KernelSelfTestCalls, "send", send)
    a, b = connect(fabric, beyond_memory(fabric), geometry=SMALL, kernels=True)
    assert f"a message of {SIZES[nth]} bytes arrived with other bytes than were sent" in fabric.reason
    assert len(bent) == 1
    assert not isinstance(a, netstack.DeviceChannel)
    talk(a, b)


def test_mlx5_a_trial_that_is_answered_ends_with_its_fabric() -> None:
    """Before the driver is closed that its kernels use, whose stream and memory it gives back."""
    fabric, other = (netstack.open("mlx5", key=KEY) for _ in range(2))
    assert isinstance(other, mlx5.Mlx5Fabric)
    tcp, terms = TcpFabric(KEY), netstack.Terms(outbound=SMALL, inbound=SMALL, kernels=True)
    listener = tcp.listen()
    assert isinstance(fabric, mlx5.Mlx5Fabric)
    fabric.join(listener)

    def answering() -> bool:
        return any(thread.name == "lamina-trial" for thread in threading.enumerate())

    FAKE.fake_mlx5_deafen(True)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(listener.accept, timeout_s=SOON_S)
        asking = pool.submit(other.self_test, listener.url.replace("tcp", "mlx5"), terms, timeout_s=SOON_S)
        deadline = time.monotonic() + SOON_S
        while not answering() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert answering()
        fabric.close()
        assert not answering()
        FAKE.fake_mlx5_deafen(False)
        assert asking.result(SOON_S), "by its peer's farewell, or its own NIC, whichever is first"
        listener.close()
        with pytest.raises(netstack.ChannelAborted):
            accepting.result(SOON_S)
    other.close()
    tcp.close()


HELLO_3 = struct.Struct("!4sHH16s8sIQIQ64s64s32s")  # of version 3, by which mlx5 had one queue, and then two
CHALLENGE_3 = struct.Struct("!4sH32s")
BOTH = f"speaks version 3 of the protocol, we speak version {handshake.VERSION}"


def test_mlx5_a_connector_of_an_older_version_is_refused_at_once() -> None:
    """Both sides can name both versions; neither waits for a card."""
    fabric = netstack.open("mlx5", key=KEY)
    listener = fabric.listen()
    assert isinstance(listener, StreamListener)
    host, port = listener.url.rpartition("/")[2].split(":")
    hello = HELLO_3.pack(b"LMNA", 3, 0, b"", b"mlx5", 4, 64, 4, 64, b"", b"", bytes(32))
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool, socket.create_connection((host, int(port)), SOON_S) as sock:
        accepting = pool.submit(listener.accept, timeout_s=SOON_S)
        sock.sendall(hello)
        magic, version, _ = CHALLENGE_3.unpack(sock.recv(CHALLENGE_3.size, socket.MSG_WAITALL))
        assert (magic, version) == (b"LMNA", handshake.VERSION)
        with suppress(ConnectionResetError):  # of a hello the listener has read no more than the version
            assert sock.recv(1) == b"", "and hangs up"
        assert time.monotonic() - start < HANDSHAKE_S
        listener.close()
        with pytest.raises(netstack.ChannelAborted):
            accepting.result(SOON_S)
    assert listener.refusal == f"the peer {BOTH}"
    fabric.close()


def test_mlx5_a_listener_of_an_older_version_is_named_at_once() -> None:
    """It answers by a challenge of its own version, as version 3 does, and hangs up."""
    fabric = netstack.open("mlx5", key=KEY)
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            sock, _ = door.accept()
            with sock:
                sock.recv(6, socket.MSG_WAITALL)
                sock.sendall(CHALLENGE_3.pack(b"LMNA", 3, bytes(32)))

        answering = pool.submit(answer)
        terms = netstack.Terms(outbound=SMALL, inbound=SMALL, kernels=True)
        with pytest.raises(netstack.HandshakeError, match=BOTH) as refused:
            fabric.connect(f"mlx5://127.0.0.1:{door.getsockname()[1]}", terms, timeout_s=SOON_S)
        answering.result(SOON_S)
    assert "\n" not in str(refused.value)
    fabric.close()
