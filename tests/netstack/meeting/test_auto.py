"""The transport ``auto``: memory where both sides reach it, else RDMA if it is named, else the network; and why."""

from __future__ import annotations

import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from wiring import KEY, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack.auto import AutoFabric, _name
from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.meeting.listener import StreamListener


@pytest.fixture
def fabric() -> AutoFabric:
    fabric = open_or_skip("auto")
    assert isinstance(fabric, AutoFabric)
    return fabric


def beyond_memory(fabric: AutoFabric) -> StreamListener:
    """A listener of ``fabric`` as one on another host is seen: its local name is squatted on."""
    squatter = netstack.open("shm", key=b"another key, of a stranger")
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))  # nobody is given this port, and who names it may still listen there (socket(7))
        place = f"127.0.0.1:{kept.getsockname()[1]}"
        with closing(squatter.listen(_name(place))):
            return fabric.listen(place)


def test_the_same_host_and_user_share_memory(fabric: AutoFabric, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    a, b = connect(fabric)
    assert a.peer.startswith("shm://")
    assert "this host" in fabric.reason
    assert fabric.reason in caplog.text
    send(a, b"near")
    assert b.wait_signal(timeout_s=5).data == b"near"
    fabric.close()


def test_a_listener_without_the_local_door_is_reached_by_tcp(fabric: AutoFabric) -> None:
    """As one on another host, or in another network namespace."""
    far = TcpFabric(KEY)
    listener = far.listen()
    listener.url = listener.url.replace("tcp://", "auto://")
    a, b = connect(fabric, listener)
    assert a.peer.startswith("tcp://")
    assert "refused" in fabric.reason
    send(a, b"far")
    assert b.wait_signal(timeout_s=5).data == b"far"
    for end in (fabric, far):
        end.close()


def test_a_squatter_on_the_local_name_cannot_stop_a_connection(fabric: AutoFabric) -> None:
    far = TcpFabric(KEY)
    listener = far.listen()
    place = listener.url.partition("://")[2]
    squatter = netstack.open("shm", key=b"another key, of a stranger")
    squatted = squatter.listen(_name(place))
    listener.url = f"auto://{place}"
    with ThreadPoolExecutor(1) as pool:
        strangers = pool.submit(squatted.accept, timeout_s=0.5)
        a, _ = connect(fabric, listener)
        assert a.peer.startswith("tcp://")
        assert "keys differ" in fabric.reason
        with pytest.raises(netstack.ChannelTimeout):
            strangers.result(5)
    for end in (fabric, far, squatter):
        end.close()


def test_where_the_local_name_is_taken_the_network_is_left(
    fabric: AutoFabric, caplog: pytest.LogCaptureFixture
) -> None:
    listener = beyond_memory(fabric)
    assert re.fullmatch(r"auto://127\.0\.0\.1:[1-9]\d*", listener.url)
    assert f"{listener.url.replace('auto', 'tcp')}: no shared memory here" in caplog.text
    fabric.close()


class Rdma(TcpFabric):
    """A stand-in for verbs: their scheme, without a NIC."""

    scheme = "verbs"


def with_rdma() -> AutoFabric:
    fabric = AutoFabric(KEY)
    fabric._verbs = Rdma(KEY)
    return fabric


@pytest.mark.parametrize("rdma", ["a stand-in", "verbs"])
def test_rdma_goes_before_the_network_where_both_sides_have_it(rdma: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RDMA_DEVICE, ":1")  # the first port of any device
    fabric = with_rdma() if rdma == "a stand-in" else AutoFabric(KEY)
    a, b = connect(fabric, beyond_memory(fabric))
    assert a.peer.startswith("verbs://")
    assert b.peer.startswith("verbs://")
    assert re.search("verbs, for the listener is not within reach of memory .*; both sides name", fabric.reason)
    send(a, b"by its door")
    assert b.wait_signal(timeout_s=5).data == b"by its door"
    fabric.close()


@pytest.mark.parametrize("who", ["connector", "listener"])
def test_rdma_of_one_side_alone_is_no_way(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RDMA_DEVICE, raising=False)
    ends = {"connector": AutoFabric(KEY), "listener": AutoFabric(KEY)}
    ends[who] = with_rdma()
    a, _ = connect(ends["connector"], beyond_memory(ends["listener"]))
    assert a.peer.startswith("tcp://")
    why = "names no device here" if who == "listener" else "does not speak verbs"
    assert re.search(f"tcp, for .* memory .*, nor of RDMA .*{why}", ends["connector"].reason)
    for end in ends.values():
        end.close()


def test_memory_goes_before_rdma() -> None:
    fabric = with_rdma()
    a, _ = connect(fabric)
    assert a.peer.startswith("shm://")
    fabric.close()


def test_a_named_device_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RDMA_DEVICE, "no such device")
    fabric = AutoFabric(KEY)
    connect(fabric, beyond_memory(fabric))
    assert re.search("tcp, for .* nor of RDMA .transport 'verbs'", fabric.reason)
    fabric.close()
