"""Bytes that are no HTTP, and chunks that lie: each costs its own connection."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from target import KEYS, Target
from verdict import Verdict, first_failure

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    f"Authorization: Bearer {KEYS[0]}\r\n"
)
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
LIES = (
    CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    CHUNKED + b"ffffffffffffffffff\r\n{}",
    CHUNKED + b"2\r\n{}XX0\r\n\r\n",
    f"{HEAD}Content-Length: 2\r\nContent-Length: 9\r\n\r\n{{}}".encode(),
    f"{HEAD}Content-Length: -1\r\n\r\n{{}}".encode(),
    f"{HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
    b"GET /health HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(512),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"a" * 100_000,
    b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
)
NOISE = 300


def attack(folder: Path, server: Callable[..., AbstractContextManager[Target]]) -> Verdict:
    with server(folder) as target:
        rng, accepted = random.Random(0), list[bytes]()
        whole = CHUNKED + b'24\r\n{"prompt": "import", "max_tokens": 2}\r\n0\r\n\r\n'
        noise = [bytes(rng.randbytes(rng.randrange(1, 2000))) for _ in range(NOISE // 2)]
        for _ in range(NOISE // 2):
            at, bent = rng.randrange(len(whole)), bytearray(whole)
            bent[at] ^= 1 << rng.randrange(8)
            noise.append(bytes(bent))
        for data in LIES:
            if b" 200 " in _answer(target, data)[:15]:
                accepted.append(data[-60:])
        for data in noise if not accepted and target.serves() else ():
            _answer(target, data, read=False)
        checks = {
            f"each is refused, but {accepted[:1]}": not accepted,
            "others are served": target.serves(),
        }
    return first_failure(checks, f"{len(LIES)} lies refused, {len(noise)} frames of noise")


def _answer(target: Target, data: bytes, *, read: bool = True) -> bytes:
    with suppress(OSError), target.connect() as sock:
        sock.settimeout(3)
        sock.sendall(data)
        return sock.recv(4096) if read else b""
    return b""
