"""The cost of strangers to a listener: a bounded number of sockets, each for a bounded time.

Covers: netstack/bootstrap/sockets.py.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_stand_in import STAND_IN, scheme_of
from wiring import GEOMETRY, KEY, SOON_S, connect, open_or_skip, send

from lamina import netstack
from lamina.netstack.bootstrap import listener as module
from lamina.netstack.bootstrap.handshake import AuthenticatedTerms, Hello, offer, run
from lamina.netstack.bootstrap.listener import Meeting, StreamListener, Visit, Welcome
from lamina.netstack.host.tcp import TcpFabric


@pytest.fixture
def place() -> Iterator[StreamListener]:
    fabric = netstack.open("tcp", key=KEY)
    place = fabric.listen()
    assert isinstance(place, StreamListener)
    yield place
    fabric.close()


class Welcoming(TcpFabric):
    """Welcomes peers by ``how(the usual function, sock, session)``."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__(KEY)
        self._how = how

    def _welcome(self, sock: socket.socket, session: AuthenticatedTerms) -> netstack.Channel | Visit:
        channel: netstack.Channel | Visit = self._how(super()._welcome, sock, session)
        return channel


def stranger(place: StreamListener) -> socket.socket:
    host, _, port = place.url.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=0.2)


def caller(place: StreamListener) -> socket.socket:
    """A connection to ``place``, on whatever it listens."""
    where = place.url.partition("://")[2]
    host, colon, port = where.rpartition(":")
    if colon:
        return socket.create_connection((host, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{where}")
    return sock


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("transport", ["tcp", "auto", "verbs"])
def test_nothing_listens_beyond_this_host_unless_told_to(transport: str) -> None:
    fabric = open_or_skip(transport)
    assert fabric.listen().url.startswith(f"{transport}://127.0.0.1:")
    fabric.close()


def test_silent_strangers_are_dropped_after_a_while(place: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.1)
    sock = stranger(place)
    start = time.monotonic()
    with pytest.raises(netstack.ChannelTimeout, match="silent"):
        place.accept(timeout_s=0.5)
    assert time.monotonic() - start >= 0.5  # the drop did not end the wait
    assert hung_up(sock)
    sock.close()


def test_a_friend_is_not_silent_while_nobody_listens(place: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener's process has other work between two calls of accept, for longer than a peer may be silent."""
    ahead_s = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + ahead_s[0])
    hello = Hello(scheme="tcp", outbound=GEOMETRY, inbound=GEOMETRY)
    with ThreadPoolExecutor(1) as pool, caller(place) as sock:
        with pytest.raises(netstack.ChannelTimeout):
            place.accept(timeout_s=0.05)
        assert place.half_open == 1
        ahead_s[0] = 2 * module.HANDSHAKE_S
        proving = pool.submit(run, sock, offer(KEY, hello), place.url, deadline=time.monotonic() + SOON_S)
        place.accept(timeout_s=SOON_S).close()
        proving.result(SOON_S)


def test_only_so_many_strangers_are_held_and_the_oldest_goes_first(
    place: StreamListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HALF_OPEN_MAX", 2)
    socks = []
    for _ in range(4):
        socks.append(stranger(place))
        with pytest.raises(netstack.ChannelTimeout):
            place.accept(timeout_s=0.02)
    assert [hung_up(sock) for sock in socks] == [True, True, False, False]
    for sock in socks:
        sock.close()


def test_at_most_64_peers_are_half_open_and_a_friend_still_gets_in(place: StreamListener) -> None:
    socks = [stranger(place) for _ in range(64)]
    with pytest.raises(netstack.ChannelTimeout):
        place.accept(timeout_s=0.2)
    assert place.half_open == 64
    socks += [stranger(place) for _ in range(40)]
    with pytest.raises(netstack.ChannelTimeout, match="too many strangers"):
        place.accept(timeout_s=0.2)
    assert place.half_open == 64
    assert [hung_up(sock) for sock in (socks[0], socks[39])] == [True, True]
    fabric = netstack.open("tcp", key=KEY)
    a, b = connect(fabric, place)
    send(a, b"friend")
    assert b.wait_signal(timeout_s=5).data == b"friend"
    fabric.close()
    for sock in socks:
        sock.close()


def test_nothing_is_allocated_for_a_peer_that_has_not_proven_itself() -> None:
    """It asks for 2 x 4 TiB; its proof is wrong, so the kernel is never asked for them."""
    welcomed: list[object] = []
    fabric = Welcoming(lambda _, *who: welcomed.append(who))
    place = fabric.listen()
    huge = netstack.Geometry(slots=1024, slot_bytes=1 << 32)
    wrong = netstack.open("tcp", key=b"not the key of this place at all")
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(place.accept, timeout_s=1.0)
        with pytest.raises(netstack.HandshakeError):
            wrong.connect(place.url, netstack.Terms(outbound=huge, inbound=huge), timeout_s=5.0)
        with pytest.raises(netstack.ChannelTimeout, match="keys differ"):
            accepting.result(5)
    assert welcomed == []
    for each in (wrong, fabric):
        each.close()


def test_a_peer_whose_memory_cannot_be_had_is_dropped() -> None:
    refused: list[object] = []

    def no_memory(welcome: Welcome, sock: socket.socket, terms: AuthenticatedTerms) -> netstack.Channel | Visit:
        if not refused:
            refused.append(terms)
            raise OSError(12, "Cannot allocate memory")
        return welcome(sock, terms)

    fabric = Welcoming(no_memory)
    place = fabric.listen()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fabric.connect, place.url, netstack.Terms(outbound=GEOMETRY, inbound=GEOMETRY))
        with pytest.raises(netstack.ChannelTimeout, match="memory"):
            place.accept(timeout_s=0.5)
    a, b = connect(fabric, place)
    send(a, b"second")
    assert b.wait_signal(timeout_s=5).data == b"second"
    fabric.close()


def test_a_stranger_that_is_gone_already_does_not_end_accept(place: StreamListener) -> None:
    """It connects and resets at once: such a socket has no peer any more when it is accepted."""
    for _ in range(3):
        sock = stranger(place)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    with pytest.raises(netstack.ChannelTimeout, match="refused"):
        place.accept(timeout_s=0.2)
    fabric = netstack.open("tcp", key=KEY)
    a, b = connect(fabric, place)
    send(a, b"friend")
    assert b.wait_signal(timeout_s=5).data == b"friend"
    fabric.close()


def test_a_process_without_descriptors_says_so_and_goes_on_later(place: StreamListener) -> None:
    sock = stranger(place)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(netstack.ChannelError, match=r"accept: Too many open files"):
            place.accept(timeout_s=5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fabric = netstack.open("tcp", key=KEY)
    connect(fabric, place)
    fabric.close()
    sock.close()


def test_a_connector_waits_where_too_many_wait_before_it() -> None:
    """A Unix socket tells at once that its queue is full: no reason to give up, nor to take the listener for dead."""
    fabric = netstack.open("shm", key=KEY)
    place = fabric.listen()
    assert isinstance(place, StreamListener)
    early, full = list[socket.socket](), 0
    while not full:
        early.append(socket.socket(socket.AF_UNIX))
        early[-1].setblocking(False)
        full = early[-1].connect_ex(f"\0{place.url.partition('://')[2]}")
    assert full == errno.EAGAIN
    start = time.monotonic()
    with pytest.raises(netstack.ChannelTimeout, match="did not accept in time") as told:
        fabric.connect(place.url, netstack.Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=0.2)
    assert not isinstance(told.value, netstack.ChannelUnreachable)
    assert 0.2 <= time.monotonic() - start < SOON_S
    connect(fabric, place)  # once the listener accepts
    for each in early:
        each.close()
    fabric.close()


def test_where_nothing_answers_a_connector_says_so() -> None:
    """The kernel drops a connection that comes to a full queue, as on the way to a host that is not there. A live
    listener that never accepts, or a Unix socket, is another matter.
    """
    with socket.socket() as full, closing(netstack.open("tcp", key=KEY)) as fabric:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        terms = netstack.Terms(outbound=GEOMETRY, inbound=GEOMETRY)
        url = f"tcp://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(netstack.ChannelUnreachable, match=f"^{url}: connect: the listener did not accept in time"):
            fabric.connect(url, terms, timeout_s=0.3)
        alive = fabric.listen()
        with pytest.raises(netstack.ChannelTimeout) as slow:
            fabric.connect(alive.url, terms, timeout_s=0.3)
        assert not isinstance(slow.value, netstack.ChannelUnreachable)
        for each in waiting:
            each.close()


def test_what_is_set_up_behind_the_handshake_goes_on_over_several_accepts() -> None:
    """Each of them ends at its own deadline, whatever the peer still owes."""

    def slowly(welcome: Welcome, sock: socket.socket, session: AuthenticatedTerms) -> Meeting:
        yield {sock.fileno(): select.POLLIN}
        assert sock.recv(1) == b"x"
        channel = welcome(sock, session)
        assert not isinstance(channel, Generator)
        return channel

    fabric = Welcoming(slowly)
    place = fabric.listen()
    hello = Hello(scheme="tcp", outbound=GEOMETRY, inbound=GEOMETRY)
    with ThreadPoolExecutor(1) as pool, caller(place) as sock:
        proving = pool.submit(run, sock, offer(KEY, hello), place.url, deadline=time.monotonic() + SOON_S)
        while not proving.done():
            with pytest.raises(netstack.ChannelTimeout):
                place.accept(timeout_s=0.05)
        proving.result()
        for _ in range(3):
            with pytest.raises(netstack.ChannelTimeout):
                place.accept(timeout_s=0.01)
        sock.send(b"x")
        place.accept(timeout_s=SOON_S).close()
    fabric.close()


@pytest.mark.parametrize("transport", ["nic-model", STAND_IN, "verbs"])
def test_one_that_holds_the_key_and_then_says_nothing_holds_up_nobody(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A friend gets in while it is still there, by the same call; then its time is over."""
    ahead_s, waits_s = [0.0], [0.0]

    def poll() -> SimpleNamespace:
        poller = select.poll()

        def wait(timeout_ms: float) -> list[tuple[int, int]]:
            ready = poller.poll(timeout_ms)
            ahead_s[0] += waits_s[0]
            return ready

        return SimpleNamespace(register=poller.register, poll=wait)

    monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(module, "select", SimpleNamespace(poll=poll, POLLIN=select.POLLIN))
    with scheme_of(transport) as scheme, closing(open_or_skip(scheme)) as fabric, ThreadPoolExecutor(1) as pool:
        listener = fabric.listen()
        assert isinstance(listener, StreamListener)
        accepting = pool.submit(listener.accept, timeout_s=SOON_S)
        with caller(listener) as mute:
            hello = Hello(scheme=getattr(fabric, "spoken", scheme), outbound=GEOMETRY, inbound=GEOMETRY)
            run(mute, offer(KEY, hello), listener.url, deadline=time.monotonic() + SOON_S)
            friend = fabric.connect(listener.url, netstack.Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=SOON_S)
            send(friend, b"friend")
            assert accepting.result(SOON_S).wait_signal(timeout_s=SOON_S).data == b"friend"
            assert listener.half_open == 1
            waits_s[0] = 2 * module.HANDSHAKE_S
            with pytest.raises(netstack.ChannelTimeout, match="silent"):
                listener.accept(timeout_s=0.1)
            assert listener.half_open == 0


@pytest.mark.parametrize("transport", ["nic-model", STAND_IN])
def test_those_that_hold_the_key_and_have_no_channel_yet_count_for_the_ceiling(transport: str) -> None:
    """They may have their inboxes already."""
    with scheme_of(transport) as scheme, closing(open_or_skip(scheme)) as fabric, ThreadPoolExecutor(1) as pool:
        listener = fabric.listen(reception=netstack.ListenTerms(channels=1))
        assert isinstance(listener, StreamListener)
        accepting = pool.submit(listener.accept, timeout_s=SOON_S)
        with caller(listener) as mute:
            hello = Hello(scheme=getattr(fabric, "spoken", scheme), outbound=GEOMETRY, inbound=GEOMETRY)
            run(mute, offer(KEY, hello), listener.url, deadline=time.monotonic() + SOON_S)
            with pytest.raises(netstack.HandshakeError, match="as many channels as its ceiling allows"):
                fabric.connect(listener.url, netstack.Terms(outbound=GEOMETRY, inbound=GEOMETRY), timeout_s=SOON_S)
        listener.close()
        with pytest.raises(netstack.ChannelError):
            accepting.result(SOON_S)
