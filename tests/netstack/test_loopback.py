"""What the fake can do beyond the contract: be late, and die."""

from __future__ import annotations

import gc
import time

import pytest
from wiring import KEY, SOON_S, connect, send

from lamina import netstack
from lamina.netstack.host import loopback_host
from lamina.netstack.host.loopback_host import Faults, LoopbackFabric


def test_a_delay_makes_messages_late_but_keeps_their_order() -> None:
    faults = Faults(delay_s=0.2)
    a, b = connect(LoopbackFabric(KEY, faults=faults))
    start = time.monotonic()
    send(a, b"slow")
    faults.delay_s = 0.0
    send(a, b"quick")
    with pytest.raises(netstack.ChannelTimeout):
        b.wait_signal(timeout_s=0.05)
    assert b.wait_signal(timeout_s=SOON_S).data == b"slow"
    assert time.monotonic() - start >= 0.2
    assert b.wait_signal(timeout_s=0).data == b"quick"


def test_a_death_on_request_comes_after_the_last_message() -> None:
    a, b = connect(LoopbackFabric(KEY, faults=Faults(die_after=2)))
    send(a, b"one")
    send(a, b"two")
    assert [bytes(b.wait_signal(timeout_s=SOON_S).data) for _ in range(2)] == [b"one", b"two"]
    with pytest.raises(netstack.PeerFault, match="gone"):
        b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.ChannelAborted):
        a.reserve(1)


def test_what_was_on_its_way_arrives_after_the_death() -> None:
    a, b = connect(LoopbackFabric(KEY, faults=Faults(delay_s=0.1, die_after=1)))
    send(a, b"late")
    assert b.wait_signal(timeout_s=SOON_S).data == b"late"


def test_the_network_forgets_listeners_that_are_closed_or_dropped() -> None:
    fabric = LoopbackFabric(KEY)
    listener = fabric.listen("here")
    fabric.listen("there").close()
    assert "there" not in loopback_host._NETWORK
    del listener
    gc.collect()
    assert "here" not in loopback_host._NETWORK


def test_a_fabric_closes_all_that_is_open_also_where_one_of_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = LoopbackFabric(KEY)
    listeners = [fabric.listen(name) for name in ("one", "two", "three")]
    right = type(listeners[0]).close

    def close(self: object) -> None:
        right(self)  # type: ignore[arg-type]
        raise OSError("a device is gone")

    monkeypatch.setattr(type(listeners[0]), "close", close)
    with pytest.raises(OSError, match="a device is gone"):
        fabric.close()
    assert not {"one", "two", "three"} & set(loopback_host._NETWORK)
