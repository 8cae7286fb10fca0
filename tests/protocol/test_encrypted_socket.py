"""Control links to other hosts: who may come, and what a stream may do to records on their way.

Covers: lamina/executor/launchers/remote_links.py.
"""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.executor.launchers.remote_links import ControlListener, connect
from lamina.netstack import ChannelAborted, HandshakeError
from lamina.protocol import encrypted_socket
from lamina.protocol.control import ControlLink, LinkClosedError, Stats, StatsRequest
from lamina.protocol.encrypted_socket import KEY_BYTES, TAG_BYTES, EncryptedSocket

KEY = bytes(range(32))
THERE, BACK = b"t" * KEY_BYTES, b"b" * KEY_BYTES
SOON_S = 10.0
NAMES = {"name": "driver", "peer": "worker"}


def pair(*, also: socket.socket | None = None) -> tuple[EncryptedSocket, EncryptedSocket]:
    listener = socket.create_server(("127.0.0.1", 0))
    first = socket.create_connection(listener.getsockname())
    second, _ = listener.accept()
    listener.close()
    return EncryptedSocket(first.detach(), THERE + BACK), EncryptedSocket(second.detach(), BACK + THERE)


@pytest.fixture
def ends() -> Iterator[tuple[EncryptedSocket, EncryptedSocket]]:
    both = pair()
    yield both
    for each in both:
        each.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8), st.integers(1, 64))
def test_records_arrive_as_one_stream(records: list[bytes], piece: int) -> None:
    one, other = pair()
    with one, other:
        for record in records:
            one.sendall(record)
        one.shutdown(socket.SHUT_WR)
        found, view = b"", memoryview(bytearray(piece))
        while got := other.recv_into(view):
            found += view[:got]
        assert found == b"".join(records)
        assert other.pending == 0


def wire(data: bytes) -> bytes:
    """Shows a record in flight, the first of its session."""
    sender, receiver = pair()
    with sender, socket.socket(fileno=receiver.detach()) as plain:
        sender.sendall(data)
        return plain.recv(4096)


@pytest.mark.parametrize("at", [0, 4, 20, 35, 36, 40])
def test_a_changed_bit_ends_the_link(ends: tuple[EncryptedSocket, EncryptedSocket], at: int) -> None:
    raw = bytearray(wire(b"hello"))
    raw[at] ^= 0x40
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        plain.sendall(raw)
        ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        ends[1].recv_into(memoryview(bytearray(9)))


def test_no_memory_is_taken_for_a_length_that_somebody_else_wrote(
    ends: tuple[EncryptedSocket, EncryptedSocket],
) -> None:
    """It would be 256 MiB, and the wait for them."""
    raw = bytearray(wire(b"hello"))
    raw[0] ^= 0x10
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        plain.sendall(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionError, match="wrong code"):
            ends[1].recv_into(memoryview(bytearray(9)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_record_is_not_in_clear() -> None:
    sent = wire(b"hello" * 20)
    assert b"hello" not in sent
    assert len(sent) == 4 + TAG_BYTES + 100 + TAG_BYTES
    assert wire(b"hello" * 21)[: 4 + TAG_BYTES] != sent[: 4 + TAG_BYTES]


@pytest.mark.parametrize("times", [1, 2])
def test_a_record_counts_once(ends: tuple[EncryptedSocket, EncryptedSocket], times: int) -> None:
    view = memoryview(bytearray(5))
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        plain.sendall(wire(b"hello") * times)
    assert ends[1].recv_into(view) == 5
    ends[0].shutdown(socket.SHUT_WR)
    if times == 1:
        assert ends[1].recv_into(view) == 0
    else:
        with pytest.raises(ConnectionError, match="wrong code"):
            ends[1].recv_into(view)


def test_a_reflected_record_is_none(ends: tuple[EncryptedSocket, EncryptedSocket]) -> None:
    ends[1].sendall(b"hello")
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        back = plain.recv(4096)
        plain.sendall(back)
    with pytest.raises(ConnectionError, match="wrong code"):
        ends[1].recv_into(memoryview(bytearray(5)))


def test_a_record_that_stops_half_way_ends_the_link(
    ends: tuple[EncryptedSocket, EncryptedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted_socket, "STALL_S", 0.05)
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        plain.sendall(wire(b"hello")[:-1])
    with pytest.raises(ConnectionError, match="stopped within"):
        ends[1].recv_into(memoryview(bytearray(5)))


def test_control_messages_go_through_with_a_deadline(ends: tuple[EncryptedSocket, EncryptedSocket]) -> None:
    driver, worker = ControlLink(ends[0], Stats), ControlLink(ends[1], StatsRequest)
    driver.send(StatsRequest())
    assert isinstance(worker.recv(timeout_s=SOON_S), StatsRequest)
    worker.send(Stats(values={"steps": 3.0}))
    assert driver.recv(timeout_s=SOON_S) == Stats(values={"steps": 3.0})
    with pytest.raises(TimeoutError):
        driver.recv(timeout_s=0.01)
    worker.close()
    with pytest.raises(LinkClosedError):
        driver.recv(timeout_s=SOON_S)


def test_only_who_has_the_key_comes_in() -> None:
    listener = ControlListener("127.0.0.1", KEY, "worker", "driver")
    accepted: list[tuple[socket.socket, bytes]] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(SOON_S)))
    thread.start()
    stranger = socket.create_connection(("127.0.0.1", listener.port))  # silent: it delays no other
    with pytest.raises(HandshakeError, match="keys differ"):
        connect("127.0.0.1", listener.port, bytes(32), SOON_S, **NAMES)
    with connect("127.0.0.1", listener.port, KEY, SOON_S, **NAMES) as driver:
        thread.join(SOON_S)
        ((sock, keys),) = accepted
        with EncryptedSocket(sock.detach(), keys) as worker:
            driver.sendall(b"hello")
            view = memoryview(bytearray(5))
            assert worker.recv_into(view) == 5
            assert bytes(view) == b"hello"
    stranger.close()
    listener.close()


def test_closing_the_listener_ends_the_wait() -> None:
    listener = ControlListener("127.0.0.1", KEY, "worker", "driver")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            listener.accept(SOON_S)
        except ChannelAborted as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    listener.close()
    thread.join(SOON_S)
    assert len(ended) == 1


def test_another_than_the_driver_is_turned_away() -> None:
    """It holds the key, as all workers do."""
    listener = ControlListener("127.0.0.1", KEY, "worker", "driver")
    refused: list[BaseException] = []

    def wait() -> None:
        try:
            listener.accept(SOON_S)
        except HandshakeError as error:
            refused.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(HandshakeError, match="not the peer that we want, 'other'"):
        connect("127.0.0.1", listener.port, KEY, SOON_S, name="driver", peer="other")
    with connect("127.0.0.1", listener.port, KEY, SOON_S, name="other", peer="worker") as link:
        assert link.recv_into(memoryview(bytearray(1))) == 0
    thread.join(SOON_S)
    assert "'other' came in place of the driver, 'driver'" in str(refused[0])
    listener.close()
