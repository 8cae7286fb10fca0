"""The emulated link: delay and bandwidth are really there, in both directions, and nothing is seen before its time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiring import KEY, SOON_S, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack import Channel, Geometry, Terms
from lamina.netstack.emulate import EmulatedLink, EmulatedWire

MS = 1_000_000
OTHERS = ["loopback", "shm", "tcp"]


def pair(scheme: str, slots: int = 8, slot_bytes: int = 1 << 20) -> tuple[Channel, Channel]:
    return connect(open_or_skip(scheme), geometry=Geometry(slots=slots, slot_bytes=slot_bytes))


def take(channel: Channel) -> bytes:
    arrival = channel.wait_signal(timeout_s=SOON_S)
    data = bytes(arrival.data)
    channel.release(arrival)
    return data


@pytest.mark.parametrize("other", OTHERS)
def test_latency_is_there_in_both_directions_and_messages_overlap(other: str) -> None:
    """A sender does not wait for its link, and messages are on their way together. Five tries, as it may be busy."""
    for sender, receiver in (ends := pair(f"emulate+{other}?latency_ms=150"), ends[::-1]):
        tries = (passing(sender, receiver) for _ in range(5))
        assert any(sent < 0.15 and took < 4 * 0.15 for sent, took in tries)


def passing(sender: netstack.Channel, receiver: netstack.Channel) -> tuple[float, float]:
    """Seconds until four messages are sent, and until all have come."""
    start = time.monotonic()
    for n in range(4):
        send(sender, bytes([n]))
    sent = time.monotonic() - start
    with pytest.raises(netstack.ChannelTimeout, match="wait_signal"):
        receiver.wait_signal(timeout_s=0.01)
    assert [take(receiver) for _ in range(4)] == [bytes([n]) for n in range(4)]
    took = time.monotonic() - start
    assert took >= 0.15
    return sent, took


@pytest.mark.parametrize("other", OTHERS)
def test_bandwidth_is_there(other: str) -> None:
    a, b = pair(f"emulate+{other}?gbps=0.04")  # 5 MB/s
    start = time.monotonic()
    for _ in range(4):
        send(a, bytes(250_000))
    first = len(take(b)) and time.monotonic() - start
    for _ in range(3):
        take(b)
    assert first >= 0.05
    assert time.monotonic() - start >= 0.2


def test_a_stall_holds_up_what_is_behind_it() -> None:
    a, b = pair("emulate+loopback?stall_ms=200&stall_every=3")
    start = time.monotonic()
    for n in range(4):
        send(a, bytes([n]))
    assert [take(b), take(b)] == [b"\0", b"\1"]
    with pytest.raises(netstack.ChannelTimeout):
        b.wait_signal(timeout_s=0)
    assert [take(b), take(b)] == [b"\2", b"\3"]
    assert time.monotonic() - start >= 0.2


def test_what_is_on_its_way_arrives_although_the_sender_is_gone() -> None:
    a, b = pair("emulate+shm?latency_ms=100")
    send(a, b"last words")
    a.close()
    assert take(b) == b"last words"
    with pytest.raises(netstack.PeerFault):
        b.wait_signal(timeout_s=SOON_S)


def test_a_peer_that_does_not_emulate_is_told_apart() -> None:
    fabric, plain, small = open_or_skip("emulate+loopback"), open_or_skip("loopback"), Geometry(slots=1, slot_bytes=9)
    listener = fabric.listen()
    with pytest.raises(ValueError, match="url"):
        plain.connect(listener.url, Terms(outbound=small, inbound=small))
    listener.url = listener.url.removeprefix("emulate+")
    a, b = connect(plain, listener, geometry=small)
    send(a, b"short")
    with pytest.raises(netstack.PeerFault, match="does not emulate"):
        b.wait_signal(timeout_s=SOON_S)
    with pytest.raises(netstack.PeerFault):
        a.wait_signal(timeout_s=SOON_S)


positive = st.floats(0.0, 50.0)
links = st.builds(
    EmulatedLink, latency_ms=positive, jitter_ms=positive, seed=st.integers(0, 9),
    gbps=st.sampled_from([0.0, 0.5, 100.0]), stall_ms=positive, stall_every=st.integers(0, 3),
)  # fmt: skip
traffic = st.lists(st.tuples(st.integers(0, 5 * MS), st.integers(0, 1 << 20)), min_size=1, max_size=30)


@given(links, traffic, st.integers(0, 1))
@settings(max_examples=100, deadline=None)
def test_messages_are_never_early_and_keep_their_order(
    link: EmulatedLink, sent: list[tuple[int, int]], seed: int
) -> None:
    wire, again = EmulatedWire(link, seed), EmulatedWire(link, seed)
    now = before = 0
    leaves = 0.0  # when the link has sent everything so far
    for count, (pause, nbytes) in enumerate(sent, 1):
        now += pause
        stalled = link.stall_ms * MS if link.stall_every and count % link.stall_every == 0 else 0.0
        leaves = max(now, leaves) + stalled + (8 * nbytes / link.gbps if link.gbps else 0.0)
        due = wire.due_ns(now, nbytes)
        assert due == again.due_ns(now, nbytes), "a seed gives one behaviour"
        assert due >= before
        least = leaves + link.latency_ms * MS
        assert due >= least - 2 * count
        assert due <= max(before, least + link.jitter_ms * MS) + 2 * count
        before = due


def test_zero_is_nothing() -> None:
    wire = EmulatedWire(EmulatedLink())
    assert [wire.due_ns(t, 1 << 20) for t in (5, 7, 7)] == [5, 7, 7]


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        ("emulate+shm?latency=1", "unknown option 'latency'; choose from latency_ms"),
        ("emulate+shm?latency_ms=slow", "latency_ms must be a number, not 'slow'"),
        ("emulate+shm?latency_ms=", "latency_ms must be a number, not ''"),
        ("emulate+shm?gbps=-1", "gbps must be a number of at least 0"),
        ("emulate+shm?jitter_ms=nan", "jitter_ms must be a number of at least 0"),
        ("emulate+pigeon", "unknown transport 'pigeon'"),
        ("emulate+", "unknown transport ''"),
        ("shm+tcp", "unknown transport 'shm.tcp'"),
    ],
)
def test_bad_input_is_one_clear_line(scheme: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        netstack.open(scheme, key=KEY)
    assert "\n" not in str(error.value)
