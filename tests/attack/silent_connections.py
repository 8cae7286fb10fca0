"""Connections that send nothing, or a head byte by byte: others connect and are served."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from target import Target
from verdict import Verdict, first_failure

COUNT, LIMIT_S = 800, 60


def attack(folder: Path, server: Callable[..., AbstractContextManager[Target]]) -> Verdict:
    with server(folder, "--timeouts=header=2") as target, ExitStack() as stack:
        opened = []
        end = time.monotonic() + LIMIT_S
        for number in range(COUNT):
            if time.monotonic() > end:
                return Verdict(False, f"only {number} connections in {LIMIT_S} s")
            with suppress(OSError):
                sock = stack.enter_context(target.connect())
                sock.sendall(b"GET /health HTTP/1.1\r\nX: " if number % 2 else b"")
                opened.append(sock)
        checks = {"others are served": target.serves()}
        late = 0
        for sock in opened[:50]:
            sock.settimeout(10)
            with suppress(ConnectionError):
                try:
                    late += bool(sock.recv(1))
                except TimeoutError:
                    late += 1
        checks["silent connections are closed after their time"] = late == 0
        checks["others are served at the end"] = target.serves()
    return first_failure(checks, f"{len(opened)} silent connections")
