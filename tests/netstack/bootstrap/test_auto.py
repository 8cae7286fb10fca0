"""The transport ``auto``: memory where both sides reach it, else RDMA if it is named, else the network; and why.

Covers: netstack/bootstrap/self_test.py.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from wiring import KEY, beyond_memory, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack import Channel, Terms
from lamina.netstack.auto import AutoFabric, listener_name
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms
from lamina.netstack.bootstrap.listener import Meeting
from lamina.netstack.bootstrap.self_test import SELF_TEST_TAG, SIZES, run_self_test
from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.host.tcp import TcpFabric
from lamina.netstack.rdma import verbs
from lamina.netstack.rdma.verbs import ASKS, MAX_SELF_TESTS, VerbsFabric


@pytest.fixture
def fabric() -> AutoFabric:
    fabric = open_or_skip("auto")
    assert isinstance(fabric, AutoFabric)
    return fabric


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
    """A listener on another host, or in another network namespace, is reached in the same way."""
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
    squatted = squatter.listen(listener_name(place))
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


class NoWay:
    """To no NIC."""

    remarks = ()

    def close(self) -> None:
        pass


class Bent:
    """A channel whose ``nth`` message is changed on its way, or never leaves; it is counted from 0."""

    def __init__(self, real: Channel, nth: int, *, drops: bool) -> None:
        self._real, self._nth, self._drops, self._sent = real, nth, drops, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def put_signal(self, slot: netstack.Slot, tag: bytes) -> int:
        self._sent += 1
        if self._sent - 1 == self._nth:
            if self._drops:
                return 0
            slot.data[-1] ^= 1
        return self._real.put_signal(slot, tag)


class Rdma(VerbsFabric):
    """A stand-in for verbs: their scheme, without a NIC. ``bend``: what its wire does to a channel."""

    scheme = "verbs"

    def __init__(self, key: bytes, bend: Callable[[Channel], Any] | None = None) -> None:
        super().__init__(key, way=NoWay())  # type: ignore[arg-type]
        self._bend = bend
        self.met: list[str] = []

    def ask(self, url: str, terms: Terms) -> Channel:
        """Returns the channel of a trial."""
        return self._connect(url, terms, self.scheme + ASKS, 5.0)

    def _meeting(self, sock: socket.socket, peer: str, session: AuthenticatedTerms, *, listening: bool) -> Meeting:
        self.met.append(session.scheme)
        made = self._channel(sock, peer, session, listening=listening)
        return self._bend(made) if self._bend and session.scheme.endswith(ASKS) else made
        yield {}


def with_rdma(bend: Callable[[Channel], Any] | None = None) -> AutoFabric:
    fabric = AutoFabric(KEY)
    fabric.rdma["verbs"] = Rdma(KEY, bend)
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
@pytest.mark.parametrize("nth", range(len(SIZES) - 1))  # the last one has no byte
def test_rdma_that_changes_a_byte_is_not_taken(who: str, nth: int) -> None:
    ends = {"connector": with_rdma(), "listener": with_rdma()}
    ends[who] = with_rdma(lambda channel: Bent(channel, nth, drops=False))
    a, b = connect(ends["connector"], beyond_memory(ends["listener"]))
    assert a.peer.startswith("tcp://")
    why = f"a message of {SIZES[nth]} bytes arrived with other bytes than were sent"
    assert re.search(f"tcp, for .* RDMA .a trial failed: .*{why}", ends["connector"].reason)
    send(a, b"by the network")
    assert b.wait_signal(timeout_s=5).data == b"by the network"
    for end in ends.values():
        end.close()


@pytest.mark.parametrize("who", ["connector", "listener"])
def test_rdma_that_loses_a_message_is_not_taken_nor_tried_again_at_once(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "SELF_TEST_TIMEOUT_S", 0.2)
    ends = {"connector": with_rdma(), "listener": with_rdma()}
    ends[who] = with_rdma(lambda channel: Bent(channel, 2, drops=True))
    listener = beyond_memory(ends["listener"])
    for _ in range(2):
        a, _ = connect(ends["connector"], listener)
        assert a.peer.startswith("tcp://")
        assert re.search("tcp, for .* RDMA .a trial failed: .*no message within", ends["connector"].reason)
    assert ends["connector"].rdma["verbs"].met == ["verbs?"]  # type: ignore[attr-defined]
    for end in ends.values():
        end.close()


def test_who_accepts_late_is_reached_by_rdma_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next attempt, as workers make some: the network is no way around one that is still busy."""
    fabric = with_rdma()
    listener, by_network = beyond_memory(fabric), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(TcpFabric, "connect", lambda _, url, *__, **___: by_network.append(url))
        with pytest.raises(netstack.ChannelTimeout):
            fabric.connect(listener.url, Terms(outbound=SELF_TEST_TAG, inbound=SELF_TEST_TAG), timeout_s=0.1)
    assert by_network == []
    a, _ = connect(fabric, listener)
    assert a.peer.startswith("verbs://")
    fabric.close()


def test_a_trial_goes_before_the_first_channel_to_a_place_alone() -> None:
    fabric = with_rdma()
    listener = beyond_memory(fabric)
    for _ in range(2):
        a, _ = connect(fabric, listener)
        assert a.peer.startswith("verbs://")
    schemes = fabric.rdma["verbs"].met  # type: ignore[attr-defined]
    assert sorted(schemes) == ["verbs"] * 4 + ["verbs?"] * 2, "both ends are of this fabric"
    fabric.close()


def test_trials_are_of_their_size_and_bounded() -> None:
    """A peer that holds the key takes no more of a listener than trials may."""
    fabric = with_rdma()
    rdma = fabric.rdma["verbs"]
    assert isinstance(rdma, Rdma)
    listener = beyond_memory(fabric)
    url, small = listener.url.replace("auto", "verbs"), netstack.Geometry(slots=1, slot_bytes=8)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=20)
        odd = rdma.ask(url, Terms(outbound=small, inbound=small))
        with pytest.raises(netstack.PeerFault):
            odd.wait_signal(timeout_s=5)
        asks = Terms(outbound=SELF_TEST_TAG, inbound=SELF_TEST_TAG)
        silent = [rdma.ask(url, asks) for _ in range(MAX_SELF_TESTS)]
        with pytest.raises(netstack.PeerFault):
            run_self_test(rdma.ask(url, asks), 5)
        for channel in silent:
            run_self_test(channel, 5)
        a = TcpFabric(KEY).connect(url.replace("verbs", "tcp"), Terms(outbound=small, inbound=small))
        assert accepted.result(20).epoch == a.epoch == 0
    fabric.close()


def test_a_trial_that_gets_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    fabric = with_rdma()
    rdma, listener = fabric.rdma["verbs"], beyond_memory(fabric)
    url, asks = listener.url.replace("auto", "verbs"), Terms(outbound=SELF_TEST_TAG, inbound=SELF_TEST_TAG)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_s=20)
        with monkeypatch.context() as patch:
            patch.setattr(verbs, "Thread", NoThread)
            for _ in range(MAX_SELF_TESTS + 1):
                assert rdma.self_test(url, asks, timeout_s=5)
        assert rdma.self_test(url, asks, timeout_s=5) == ""
        TcpFabric(KEY).connect(url.replace("verbs", "tcp"), asks)
        accepted.result(20)
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


def test_the_device_of_all_hosts_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that runs needs it; a host's own answer may be of another day."""
    monkeypatch.delenv(RDMA_DEVICE, raising=False)
    with pytest.raises(ImportError, match="^--rdma-device no-such-device: transport 'verbs'") as refusal:
        netstack.open("auto", key=KEY, device="no-such-device")
    assert "\n" not in str(refusal.value)


def test_a_named_device_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RDMA_DEVICE, "no such device")
    fabric = AutoFabric(KEY)
    connect(fabric, beyond_memory(fabric))
    assert re.search("tcp, for .* nor of RDMA .transport 'verbs'", fabric.reason)
    fabric.close()
