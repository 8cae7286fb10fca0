"""Streams that are not read leave the engine to others, and lose nothing: once they are read, they have every token."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from running import Running, eventually
from sockets import post

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
KEYS = "first", "second"
PLACES = 4
BODY = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log: Path = tmp_path_factory.mktemp("keyed") / "log"
    running = Running(
        log, f"--api-key={','.join(KEYS)}", f"--max-num-seqs={PLACES}", "--dtype=float32", "--timeouts=slow-reader=120"
    )
    yield running
    running.kill()


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


def silent_stream(server: Running, stack: ExitStack) -> socket.socket:
    """A stream of the first key whose client has small buffers and reads nothing yet."""
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    parts = urlsplit(server.url)
    sock.connect((parts.hostname, parts.port))
    sock.settimeout(60)
    sock.sendall(post({**BODY, "stream": True}, headers=bearer(KEYS[0]) + "Connection: close\r\n"))
    return sock


def load(http: httpx.Client) -> tuple[int, int]:
    now = http.get("/load").json()
    return now["server_load"], now["running"]


@pytest.mark.long
def test_they_leave_the_engine_and_have_every_token_once_they_are_read(keyed: Running) -> None:
    with httpx.Client(base_url=keyed.url, timeout=120, headers={"authorization": f"Bearer {KEYS[1]}"}) as http:
        whole = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        with ExitStack() as stack:
            silent = [silent_stream(keyed, stack) for _ in range(2 * PLACES)]
            assert eventually(lambda: load(http) == (2 * PLACES, 0), 120), "all are open, and none runs"
            short = http.post("/v1/completions", json={**BODY, "max_tokens": 3})
            assert short.status_code == 200
            for sock in silent[:2]:
                assert text_of(sock) == whole


def text_of(sock: socket.socket) -> str:
    """The text of a stream, which the server ends."""
    got = bytearray()
    while data := sock.recv(1 << 16):
        got += data
    events = [line[6:] for line in bytes(got).split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)
