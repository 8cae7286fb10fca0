"""Connections of those who send nothing, or not enough, against a real server process with few files to open.

Covers: lamina/server/middleware/connection_limit.py, lamina/server/middleware/tls.py.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import ROOT, certificate

from lamina.server.middleware.connection_limit import LEAST, ConnectionLimiter

pytestmark = pytest.mark.timeout(120)
FILES, SILENT = 256, 300
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)


@contextmanager
def serving(files: int = FILES, **options: float | str) -> Iterator[int]:
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[2] / "support" / "server" / "no_engine.py"),
        str(files),
        json.dumps(options),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], 60)
            assert readable
            yield int(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(20)


def connect(stack: ExitStack, port: int, data: bytes = b"") -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    sock.sendall(data)
    return sock


def answer(sock: socket.socket) -> bytes:
    """All that comes until the end, or the head of an answer."""
    got = b""
    try:
        while b"\r\n\r\n" not in got and (data := sock.recv(4096)):
            got += data
    except ConnectionResetError:
        pass
    return got


@pytest.fixture(scope="module")
def patient() -> Iterator[int]:
    """Its headers may take so long that no test sees the end of it."""
    with serving(header_timeout_s=600, body_timeout_s=600) as port:
        yield port


@pytest.mark.long(but=["no body", "idle"])
@pytest.mark.parametrize(
    ("data", "rest"),
    [(b"", b""), (HEALTH, b""), (POST, b""), (HEALTH + b"\r\n", b""), (POST.replace(b"json", b"text"), b"x" * 98)],
    ids=["nothing", "half", "no body", "idle", "refused before all of it came"],
)
def test_300_that_owe_a_request_shut_out_nobody(patient: int, data: bytes, rest: bytes) -> None:
    with ExitStack() as stack:
        socks = [connect(stack, patient)]
        for _ in range(SILENT - 1):
            try:
                socks.append(connect(stack, patient, data))
                if rest:
                    assert answer(socks[-1]).startswith(b"HTTP/1.1 415")
                    socks[-1].sendall(rest)
            except ConnectionResetError:
                continue
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{patient}/health", timeout=20).status_code == 200
        assert answer(socks[0]) == b"", "the oldest is the first to go"


@pytest.mark.long
def test_headers_have_a_deadline_on_every_request_of_a_connection() -> None:
    with serving(header_timeout_s=3.0) as port, ExitStack() as stack:
        silent, half = connect(stack, port), connect(stack, port, HEALTH)
        second = connect(stack, port, HEALTH + b"\r\n")
        assert answer(second).startswith(b"HTTP/1.1 200")
        second.settimeout(4.0)
        with pytest.raises(TimeoutError):
            answer(second)  # between requests it may rest
        second.settimeout(30)
        second.sendall(HEALTH)
        assert [answer(s) for s in (silent, half, second)] == [b"", b"", b""]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def small(tls: dict[str, str]) -> Iterator[int]:
    """Over TLS, and with room for LEAST."""
    with serving(48, **tls, header_timeout_s=600) as port:
        yield port


def hello() -> bytes:
    """Returns the first message of a client of TLS."""
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


@pytest.mark.long
def test_300_that_do_not_end_their_handshakes_shut_out_nobody(small: int) -> None:
    whole = hello()
    with ExitStack() as stack:
        socks = [connect(stack, small)]
        for i in range(SILENT - 1):
            with suppress(ConnectionResetError):
                socks.append(connect(stack, small, (b"", whole[:20], whole)[i % 3]))
        for _ in range(3):
            assert httpx.get(f"https://127.0.0.1:{small}/health", verify=False, timeout=20).status_code == 200
        assert answer(socks[0]) == b"", "the oldest is the first to go"


@pytest.mark.long
def test_a_handshake_that_failed_counts_no_longer_and_one_that_ended_once(small: int) -> None:
    context = ssl._create_unverified_context()
    with ExitStack() as stack:
        for i in range(3 * LEAST):
            with ExitStack() as short, suppress(ConnectionResetError):
                sock = connect(short, small, HEALTH + b"\r\n" if i % 2 else hello())
                assert sock.recv(1) in (b"", b"\x15", b"\x16"), "an alert, or its part of the handshake"
        clients = [context.wrap_socket(connect(stack, small)) for _ in range(LEAST)]
        for _ in range(2):
            for client in clients:
                client.sendall(HEALTH + b"\r\n")
                assert b"HTTP/1.1 200" in answer(client)


@pytest.mark.long
def test_a_handshake_has_a_deadline(tls: dict[str, str]) -> None:
    with serving(**tls, header_timeout_s=1.0) as port, ExitStack() as stack:
        for sock in [connect(stack, port, data) for data in (b"", hello())]:
            while sock.recv(4096):
                pass


class Stub:
    """A connection as the crowd sees it."""

    def __init__(self, limiter: ConnectionLimiter, gone: list[Stub]) -> None:
        self.limiter, self.gone = limiter, gone

    def close_now(self) -> None:
        self.limiter.on_request(self)
        self.gone.append(self)


@pytest.mark.long
@given(st.lists(st.sampled_from(["came", "asked", "answered"]), max_size=60), st.integers(1, 5))
def test_only_those_that_owe_a_request_go_and_the_oldest_first(acts: list[str], limit: int) -> None:
    limiter, gone = ConnectionLimiter(limit), list[Stub]()
    owing, busy = list[Stub](), list[Stub]()
    for act in acts:
        if act == "came":
            one = Stub(limiter, gone)
            owing.append(one)
            expected = owing[0] if len(owing) + len(busy) > limit else None
            limiter.on_open(one)
            assert gone == ([] if expected is None else [expected])
            for lost in gone:
                owing.remove(lost)
                limiter.on_close(lost)
            gone.clear()
        elif act == "asked" and owing:
            busy.append(owing.pop(0))
            limiter.on_request(busy[-1])
        elif act == "answered" and busy:
            owing.append(busy.pop(0))
            limiter.on_response(owing[-1])
