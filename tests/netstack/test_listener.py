"""What strangers cost a listener: a bounded number of sockets, each for a bounded time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from wiring import GEOMETRY, KEY, connect, send

from lamina import netstack
from lamina.netstack import listener as module
from lamina.netstack.listener import StreamListener


@pytest.fixture
def place() -> Iterator[StreamListener]:
    fabric = netstack.open("tcp", key=KEY)
    place = fabric.listen()
    assert isinstance(place, StreamListener)
    yield place
    fabric.close()


def stranger(place: StreamListener) -> socket.socket:
    host, _, port = place.url.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=0.2)


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_silent_strangers_are_dropped_after_a_while(place: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.1)
    sock = stranger(place)
    start = time.monotonic()
    with pytest.raises(netstack.ChannelTimeout, match="silent"):
        place.accept(timeout_s=0.5)
    assert time.monotonic() - start >= 0.5  # the drop did not end the wait
    assert hung_up(sock)
    sock.close()


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


def test_a_peer_whose_memory_cannot_be_had_is_dropped(place: StreamListener) -> None:
    fabric = netstack.open("tcp", key=KEY)
    (fd, door), refused = next(iter(place._doors.items())), []

    def no_memory(sock: socket.socket, terms: object) -> netstack.Channel:
        if not refused:
            refused.append(terms)
            raise OSError(12, "Cannot allocate memory")
        return door.welcome(sock, terms)  # type: ignore[arg-type]

    place._doors[fd] = replace(door, welcome=no_memory)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fabric.connect, place.url, outbound=GEOMETRY, inbound=GEOMETRY)
        with pytest.raises(netstack.ChannelTimeout, match="memory"):
            place.accept(timeout_s=0.5)
    a, b = connect(fabric, place)
    send(a, b"second")
    assert b.wait_signal(timeout_s=5).data == b"second"
    fabric.close()
