"""A server without an engine in this process, over real sockets, and how to speak to it byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from fake import FakeClient, make_service
from test_flow import until

from lamina.request import SamplingParams
from lamina.server.call import Service
from lamina.server.engine_client.messages import Delta
from lamina.server.engine_client.open_prompts import DeltaObserver
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.run import HttpServer

FOREVER = 600.0
GOOD = {"prompt": "x", "max_tokens": 2}


def post(body: dict[str, Any], *, headers: str = "", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Later(FakeClient):
    """Finishes its prompts when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[int, SamplingParams, ReplyQueue, DeltaObserver]] = []

    def add(
        self, prompt: list[int], params: SamplingParams, replies: ReplyQueue, meter: DeltaObserver, **_: Any
    ) -> int:
        key = len(self.added)
        self.added.append((prompt, params))
        self._held.append((key, params, replies, meter))
        return key

    def grow(self, text: str, *, key: int = 0, **more: Any) -> None:
        """A token more."""
        self._of(key).push(Delta(key=key, index=0, token_ids=[5], text=text, **more))

    def fail(self, error: Exception) -> None:
        self._of(0).fail(error)

    def finish(self, key: int = 0) -> None:
        (held,) = [h for h in self._held if h[0] == key]
        _, params, replies, meter = held
        for delta in self.deltas_of(key, 0, params, last=True):
            meter.on_delta(delta)
            replies.push(delta)

    def _of(self, key: int) -> ReplyQueue:
        (replies,) = [replies for k, _, replies, _ in self._held if k == key]
        return replies


class Place:
    """The address where a server listens, and its connections."""

    def __init__(self, service: Service, send_buffer: int) -> None:
        self.service = service
        self.server = HttpServer(service, lambda: None)
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.sock.bind(("127.0.0.1", 0))

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    async def connect(
        self, data: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self.sock.getsockname())
        name = None if tls is None else "localhost"
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12, ssl=tls, server_hostname=name)
        writer.write(data)
        return reader, writer

    async def ask(self, data: bytes) -> bytes:
        """All that comes, of a connection that the server ends."""
        reader, _ = await self.connect(data)
        return await reader.read()


@asynccontextmanager
async def serving(client: FakeClient | None = None, send_buffer: int = 4096, **options: Any) -> AsyncIterator[Place]:
    """``send_buffer``: bytes of an answer that the kernel takes; few, so that little is under way."""
    service = make_service(client, **{"header_timeout_s": FOREVER, "slow_reader_timeout_s": FOREVER, **options})
    place = Place(service, send_buffer)
    task = asyncio.create_task(place.server.run(place.sock))
    try:
        await until(lambda: place.server.started)
        yield place
    finally:
        place.server.should_exit = place.server.force_exit = True
        await task


def run(work: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(work, 30))


async def answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The status line and the body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return head[0], await reader.readexactly(int(headers["content-length"]))
