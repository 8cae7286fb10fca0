"""Bodies that never end, with and without a key: they take no more memory than the limit, and others are served."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from target import KEYS, Target
from verdict import Verdict, first_failure

COUNT, BODY, PIECE, LIMIT_S = 150, 8 << 20, 1 << 16, 90
TOTAL = 128 << 20
MOST = 2 * TOTAL + (64 << 20)  # bodies, connections, and what a process varies by
PATHS = ("/health", "/scale", "/v1/completions", "/v1/chat/completions")


def attack(folder: Path, server: Callable[..., AbstractContextManager[Target]]) -> Verdict:
    with server(folder, f"--limits=body-total={TOTAL}", "--timeouts=body=120") as target, ExitStack() as stack:
        before = target.resident()
        end = time.monotonic() + LIMIT_S
        for number in range(COUNT):
            if time.monotonic() > end:
                return Verdict(False, f"only {number} connections in {LIMIT_S} s")
            with suppress(OSError):
                sock = stack.enter_context(target.connect())
                sock.settimeout(0.5)
                key = f"Authorization: Bearer {KEYS[0]}\r\n" if number % 2 else ""
                path = PATHS[number % len(PATHS)]
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}"
                sock.sendall(f"{head}Content-Length: {BODY}\r\n\r\n".encode())
                for _ in range(BODY // PIECE - 1):
                    sock.sendall(b" " * PIECE)
        grown = target.resident() - before
        small = target.ask("POST", "/v1/completions", {"prompt": "import", "max_tokens": 2}, key=KEYS[1])[0]
        checks = {
            "health is answered": target.ask("GET", "/health")[0] == 200,
            "another key is served meanwhile": small == 200,
            f"it grew by {grown >> 20} MB, at most {MOST >> 20}": grown <= MOST,
        }
    return first_failure(checks, f"{COUNT} bodies of {BODY >> 20} MB: grew by {grown >> 20} MB")
