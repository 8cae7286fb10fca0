"""An operator's command says in one line what is wrong with its flags, or with the server at that address.

Covers: lamina/cli/operate/drain.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from lamina.cli.launch import main

ASKS = (
    ["scale", "--memory-workers", "2"],
    ["drain"],
    ["drain", "--memory-worker", "0"],
    ["cordon", "--memory-worker", "0"],
)
ELSE = "has answered something else: is it the address of a server of Lamina?"
ANSWERS = {
    b"SSH-2.0-OpenSSH_9.6\r\n": "does not answer: BadStatusLine: SSH-2.0-OpenSSH_9.6",
    b"": "does not answer: RemoteDisconnected: Remote end closed connection without response",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{": "does not answer: IncompleteRead: IncompleteRead(1 bytes",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}": ELSE,
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]": ELSE,
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello": ELSE,
}


def whole_request(peer: socket.socket) -> bytes:
    """Head and body: who closes with some of it unread resets the connection, and what was answered with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (more := peer.recv(1 << 16))
        if not more:
            return data
    head, body = data.split(b"\r\n\r\n", 1)
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < sum(map(int, lengths)) and (more := peer.recv(1 << 16)):
        body += more
    return head + body


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], str]]:
    """Begins to answer every request with some bytes; the address."""
    monkeypatch.setenv("LAMINA_ADMIN_KEY", "key")
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve(data: bytes) -> None:
            with suppress(OSError):  # the test is over
                while True:
                    peer, _ = door.accept()
                    with peer:
                        whole_request(peer)
                        peer.sendall(data)

        def begin(data: bytes) -> str:
            threading.Thread(target=serve, args=(data,), daemon=True).start()
            return f"http://127.0.0.1:{door.getsockname()[1]}"

        yield begin
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("data", ANSWERS, ids=repr)
def test_who_is_no_server_of_ours_is_told_in_one_line(
    data: bytes, answering: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = answering(data)
    for command, *flags in ASKS:
        assert main([command, url, *flags]) == 2
        line, *more = capsys.readouterr().err.splitlines()
        assert line.startswith(f"lamina-launch {command}: {url}/{command} {ANSWERS[data]}")
        assert not more


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "http://a:x", "http://a:99999", "http://a..b", "ftp://a", "a"]
)
def test_what_is_no_address_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *flags in ASKS:
        assert main([command, url, *flags, "--dry-run"]) == 2
        assert f"{url!r} is no address of a server: give one such as http" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e300", "0"])
def test_what_is_no_time_to_wait_is_named(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *flags in ASKS[:2]:
        status = main([command, "http://a", *flags, "--dry-run", "--timeout-s", seconds])
        allowed = command == "drain" and seconds == "0"  # it does not wait
        assert status == (0 if allowed else 2)
        assert ("--timeout-s must be a number of seconds" in capsys.readouterr().err) != allowed


@pytest.mark.parametrize(
    ("command", "flag", "number", "words"),
    [
        ("scale", "--memory-workers", "0", "--memory-workers must be at least 1, not 0"),
        ("scale", "--prefill-workers", "-1", "--prefill-workers must be at least 0, not -1"),
        ("scale", "--tensor-parallel-size", "0", "--tensor-parallel-size must be at least 1, not 0"),
        ("scale", "--pipeline", "-2", "--pipeline must be at least 1, not -2"),
        ("drain", "--memory-worker", "-1", "--memory-worker -1: memory workers are counted from 0"),
        ("cordon", "--memory-worker", "-1", "--memory-worker -1: memory workers are counted from 0"),
    ],
)
def test_a_number_that_cannot_be_is_told_by_its_flag_before_anybody_is_asked(
    command: str, flag: str, number: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--dry-run"]):
        assert main([command, "http://a", flag, number, *more]) == 2
        assert capsys.readouterr().err == f"lamina-launch {command}: {words}\n"


@pytest.mark.parametrize("key", ["пароль", "a\nb"])
def test_a_key_that_no_request_bears_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAMINA_ADMIN_KEY", key)
    assert main(["drain", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "lamina-launch drain: LAMINA_ADMIN_KEY, or --admin-key, has characters that no request bears"
    )
    assert key not in said
