"""Servers to attack: a real one on loopback with a limit of memory, and one that is weak on purpose."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from running import Running

KEYS, ADMIN = ("client", "other"), "operator"
ROOM = 1 << 30  # bytes of address space that an attack may make the server take
SLOW_S = 20.0  # for an answer, on a busy machine


class Target:
    """A server that listens on loopback. ``pid``: its process; None: this one."""

    def __init__(self, host: str, port: int, pid: int | None = None) -> None:
        self.host, self.port, self.pid = host, port, pid

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str = "", timeout_s: float = SLOW_S, **headers: str
    ) -> tuple[int, bytes]:
        """The status and the body of an answer; status 0 = there is none."""
        data = None if body is None else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {key}"} if key else {}
        given |= {"Content-Type": "application/json"} if data else {}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, data, given | {k.replace("_", "-"): v for k, v in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def serves(self, key: str = KEYS[1]) -> bool:
        """Return whether it is healthy and completes a prompt."""
        if self.ask("GET", "/health")[0] != 200:
            return False
        status, body = self.ask("POST", "/v1/completions", {"prompt": "import", "max_tokens": 2}, key=key)
        return status == 200 and "choices" in json.loads(body)

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=5)
        sock.settimeout(5)
        return sock

    def resident(self) -> int:
        """Bytes of the process that are resident; 0 if it has ended."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10
        return 0


@contextmanager
def serving(folder: Path, *flags: str, keys: bool = True, env: dict[str, str] | None = None) -> Iterator[Target]:
    """A real server, whose process may take ROOM more address space than after its start."""
    secrets = {"LAMINA_API_KEY": ",".join(KEYS), "LAMINA_ADMIN_KEY": ADMIN} if keys else {}
    running = Running(folder / "log", "--dtype=float32", *flags, env=secrets | (env or {}), fresh=True)
    try:
        parts = urlsplit(running.url)
        pid = running.process.pid
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        yield Target(parts.hostname or "", parts.port or 0, pid)
    finally:
        running.kill()


class _Weak(BaseHTTPRequestHandler):
    """Reads all that a client announces, checks nothing, and serves one connection after another."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        self.rfile.read(size)
        data = b'{"status": "ok", "choices": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815 - the name is the library's

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def weak(folder: Path, *flags: str, **options: Any) -> Iterator[Target]:
    """A server without any bounds, against which attacks must succeed; arguments are those of ``serving``."""
    server = HTTPServer(("127.0.0.1", 0), _Weak)
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Target("127.0.0.1", server.server_port)
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()
        server.socket.close()
