"""Sealed sockets at their edges: exact sizes, late and missing halves, and each error word for word."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from test_encrypted_socket import THERE, pair

from lamina.netstack.host.native_module import seal
from lamina.protocol import encrypted_socket
from lamina.protocol.encrypted_socket import KEY_PAIR_BYTES, EncryptedSocket, read_key_pair

Ends = tuple[EncryptedSocket, EncryptedSocket]
LATE_S = 0.2


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = pair()
    yield both
    for each in both:
        each.close()


def head(length: int) -> bytes:
    """The first length of a session, as it is on the wire."""
    return seal(THERE, 0, length.to_bytes(4, "big"))


def put(ends: Ends, data: bytes) -> None:
    with socket.socket(fileno=os.dup(ends[0].fileno())) as plain:
        plain.sendall(data)


def error_of(end: EncryptedSocket) -> str:
    with pytest.raises(ConnectionError) as failed:
        end.recv_into(memoryview(bytearray(9)))
    return str(failed.value)


def test_a_record_of_the_largest_size_is_read_and_a_longer_one_is_refused(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted_socket, "MAX_RECORD_BYTES", 5)
    ends[0].sendall(b"12345")
    assert ends[1].recv_into(memoryview(bytearray(9))) == 5
    ends[0].sendall(b"123456")
    assert error_of(ends[1]) == "a record of 6 bytes"


def test_a_length_without_its_data_ends_the_link_after_a_while(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_socket, "STALL_S", 0.05)
    put(ends, head(5))
    assert error_of(ends[1]) == "the peer stopped within a record"


@pytest.mark.parametrize("cut", [10, 20, 25])
def test_the_rest_of_a_record_may_be_late_and_its_end_is_told(ends: Ends, cut: int) -> None:
    record = head(5) + seal(THERE, 1, b"hello")
    put(ends, record[:cut])
    late = threading.Timer(LATE_S, put, (ends, record[cut:]))
    late.start()
    view = memoryview(bytearray(9))
    assert ends[1].recv_into(view) == 5
    assert bytes(view[:5]) == b"hello"
    late.join()
    put(ends, seal(THERE, 2, (5).to_bytes(4, "big"))[:cut])
    ends[0].shutdown(socket.SHUT_WR)
    assert error_of(ends[1]) == "the stream ended within a record"


def test_a_wrong_code_is_told(ends: Ends) -> None:
    put(ends, bytes(20))
    assert error_of(ends[1]) == "a record with a wrong code"


def test_a_large_record_waits_for_its_reader(ends: Ends) -> None:
    data = os.urandom(32 << 20)
    sending = threading.Thread(target=ends[0].sendall, args=(data,))
    sending.start()
    found, view = bytearray(), memoryview(bytearray(1 << 20))
    while len(found) < len(data):
        found += view[: ends[1].recv_into(view)]
    sending.join()
    assert found == data


def test_flags_of_a_send_are_the_kernels(ends: Ends) -> None:
    with pytest.raises(BlockingIOError):
        ends[0].sendall(bytes(64 << 20), socket.MSG_DONTWAIT)


def test_a_host_that_does_not_answer_is_told_and_remembered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports it by a TimeoutError, after a poll that has reported news; here a timeout of ours does."""

    class News:
        def register(self, *_: object) -> None: ...

        def poll(self, _: object) -> list[tuple[int, int]]:
            return [(0, select.POLLIN)]

    assert [end.timed_out for end in ends] == [False, False]
    monkeypatch.setattr(encrypted_socket.select, "poll", News)
    ends[1].settimeout(0.01)
    assert error_of(ends[1]) == "the peer's host does not answer"
    assert [end.timed_out for end in ends] == [False, True]


@pytest.mark.parametrize(
    ("level", "option", "value"),
    [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000),
    ],
)
def test_the_kernel_asks_a_silent_host_once_a_second(ends: Ends, level: int, option: int, value: int) -> None:
    assert [end.getsockopt(level, option) for end in ends] == [value, value]


def test_keys_are_read_in_pieces_and_nothing_beyond_them() -> None:
    reading, writing = os.pipe()
    keys = os.urandom(KEY_PAIR_BYTES)
    os.write(writing, keys[:10])
    late = threading.Timer(LATE_S, os.write, (writing, keys[10:] + b"more"))
    late.start()
    assert read_key_pair(reading) == keys
    late.join()
    assert os.read(reading, 99) == b"more"
    for fd in (reading, writing):
        os.close(fd)


def test_keys_that_end_early_are_short() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"half")
    os.close(writing)
    assert read_key_pair(reading) == b"half"
    os.close(reading)
