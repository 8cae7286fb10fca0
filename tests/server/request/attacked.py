"""A server process under attack, without an engine: its memory, its health, and clients that send what they like."""

from __future__ import annotations

import json
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from forked import ROOT, ForkedProgram, Program

HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PIECE = b"x" * (1 << 16)
FILES = 1024


class Attacked:
    """The server's process. ``port``: where it listens."""

    def __init__(self, process: Program, port: int) -> None:
        self._process = process
        self.port = port

    @property
    def peak(self) -> int:
        """The most bytes that the process has had resident since ``mark``."""
        return self._status("VmHWM")

    def mark(self) -> int:
        """Begin to measure ``peak``. Returns the bytes that are resident now."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    def may_grow(self, nbytes: int) -> None:
        """Let the kernel refuse the process more than ``nbytes`` of further address space."""
        most = self._status("VmSize") + nbytes
        resource.prlimit(self._process.pid, resource.RLIMIT_AS, (most, most))

    def lives(self) -> bool:
        return self._process.poll() is None

    def connect(self, stack: ExitStack, receive_buffer: int = 0) -> socket.socket:
        sock = stack.enter_context(socket.socket())
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def health(self) -> str:
        """The status line of /health, asked over a connection of its own."""
        with ExitStack() as stack:
            sock = self.connect(stack)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return answer(sock).partition("\r\n")[0]

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def _fresh(code: str, words: list[str]) -> Any:
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@contextmanager
def attacked(files: int = FILES, *, fresh: bool = False, **options: float | str) -> Iterator[Attacked]:
    """A server with these options of ServerConfig, which may open so many files. ``fresh``: its heap has no free room
    that imports have left, which a forked one may have tens of megabytes of.
    """
    here = Path(__file__).resolve().parents[2] / "support" / "server"
    code = f"import runpy, sys; sys.path[:0] = {[str(here), str(here.parent), str(here.parents[1])]}; "
    code += f"runpy.run_path({str(here / 'no_engine.py')!r}, run_name='__main__')"
    words = [str(files), json.dumps(options)]
    process: Program = _fresh(code, words) if fresh else ForkedProgram(words, code=code)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], 60)
        assert readable
        yield Attacked(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()


def head(path: str, size: int | None, key: str = "") -> bytes:
    """The head of a POST whose body has ``size`` bytes, or comes in chunks where that is None."""
    length = "Transfer-Encoding: chunked\r\n" if size is None else f"Content-Length: {size}\r\n"
    secret = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{HEAD.format(path)}{secret}{length}\r\n".encode()


def push(sock: socket.socket, nbytes: int, *, chunked: bool = False) -> str:
    """Send so many bytes of a body, or fewer where an answer comes or the server takes no more. Returns the answer's
    status line, which may be empty.
    """
    left = nbytes
    with suppress(ConnectionError, TimeoutError):
        while left > 0:
            if select.select([sock], [], [], 0)[0]:
                break
            piece = PIECE[:left]
            sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            left -= len(piece)
    return answer(sock).partition("\r\n")[0] if select.select([sock], [], [], 0)[0] else ""


def answer(sock: socket.socket) -> str:
    """Everything that comes until the end of an answer's head, or of the connection."""
    got = b""
    with suppress(ConnectionError, TimeoutError):
        while b"\r\n\r\n" not in got and (data := sock.recv(4096)):
            got += data
    return got.decode()


class HealthWatch:
    """Asks for /health all the time on a thread of its own; ``slowest_s``: the longest wait for an answer."""

    def __init__(self, server: Attacked) -> None:
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(0.02):
            began = time.perf_counter()
            if (line := self._server.health()) != "HTTP/1.1 200 OK":
                self.failures.append(line)
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
