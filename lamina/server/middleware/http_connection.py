"""Connections that cost little whatever their clients send or fail to send: they have limits in bytes and in time.

uvicorn's connections have no limits for headers, for bytes after a body, for a client that reads nothing, and for the
rest of a request with an early reply. Byte limits are not exact, as the bytes of one read are checked together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lamina.server.errors import ApiError, error_response
from lamina.server.memory_budget import MemoryBudget

from .connection_limit import ConnectionLimiter
from .counted_transport import CountedTransport

MAX_HEAD = 1 << 16  # bytes without a part of a body: request line, headers, framing of chunks
MAX_HEADERS = 256  # of a request, trailers included
FREE = 1 << 15  # uncounted bytes of a connection's requests: more than most requests have
CONNECTIONS = 4  # requests that the application has not read leave a quarter of the budget to those that it has
HEADER_BYTES = 136  # bytes of a header in addition to its name and value
MAX_PIPELINED = 8  # requests that wait for the reply to another one; then reading pauses
MAX_WAITING = 256  # the most waiting requests, if one read brings many
_OFFER = (b"upgrade", b"http2-settings")
logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):  # type: ignore[misc] # untyped for mypy
    """A client's connection."""

    parser: Any
    transport: CountedTransport

    def __init__(
        self,
        limiter: ConnectionLimiter,
        budget: MemoryBudget,
        header_s: float,
        slow_s: float,
        made: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        """``budget``: the budget of bodies; a request counts there until the application reads it. ``header_s``:
        seconds for a request's headers, and for the rest of a request with an early reply. ``slow_s``: seconds in which
        a client must read some of the bytes that wait for it. ``made`` is called first.
        """
        super().__init__(**options)
        self._limiter = limiter
        self._leave = budget.limit // CONNECTIONS
        self._holding = budget.hold()
        self._made = made
        self._header_s = header_s
        self._slow_s = slow_s
        self._head = 0  # bytes since the last part of a body, or the last request
        self._partial = False  # whether a request has arrived in part
        self._offered = False  # whether this request offers to change the protocol
        self._full = False  # whether too many requests wait; later bytes are ignored
        self._running: RequestResponseCycle | None = None  # the request that runs; ``self.cycle``: the latest one
        self._late: asyncio.TimerHandle | None = None
        self._slow: asyncio.TimerHandle | None = None

    def close_now(self) -> None:
        """Close the connection at once, even if replies are not sent yet."""
        self._limiter.on_request(self)  # never chosen twice
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(CountedTransport(transport, self._on_write))
        transport.set_write_buffer_limits(high=1, low=0)  # so that ``pause_writing`` is called for any unread byte
        self._begin()
        if self._made is not None:
            self._made()  # first, so that one connection never counts twice
        self._limiter.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._holding.close()
        if self._slow is not None:
            self._slow.cancel()
        self.resume_writing()
        self._limiter.on_close(self)
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True  # uvicorn notifies the latest request only
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._full:
            return
        self._head += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as e:
            if isinstance(own := e.__context__, ApiError):
                self._refuse(own)
            elif not self._full:
                self.send_400_response(str(e) or "the request is malformed")
            return
        if self._head > MAX_HEAD:
            text = f"headers may have {MAX_HEAD} bytes: send fewer"
            self._refuse(ApiError(431, text, code="headers_too_large"))
        self._count()

    def _count(self) -> None:
        """Count what waits for the application: a partial head, the latest request, and those before it."""
        waiting = [cycle for cycle, _ in self.pipeline]
        if self._running is not None and not self._running.response_complete:
            waiting.append(self._running)
        partial = self._head + HEADER_BYTES * len(self.headers or ()) if self._head else 0
        nbytes = partial + sum(map(_bytes_of, waiting)) - FREE
        if not self._holding.resize(max(0, nbytes), self._leave):
            text = "requests of other connections fill the memory for them (--limits body-total=): connect again"
            self._refuse(ApiError(503, text, code="no_room_for_body", retry_after_s=1))

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                data = self._without_offer() + data[e.args[0] :]

    def _without_offer(self) -> bytes:
        """Return the head of a request without its offer to change the protocol, which would keep the parser from its
        body.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            kept = value
            if name == b"connection":
                kept = b", ".join(t for x in value.split(b",") if (t := x.strip()).lower() not in _OFFER)
            if name not in _OFFER and (kept or not value):
                lines.append(name + b": " + kept)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._offered = False
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"this is not HTTP/1.1: {msg}", code="not_http"))

    def _refuse(self, error: ApiError) -> None:
        """Reply to the latest request in place of the application, and end the connection."""
        if self.transport.is_closing():
            return
        logger.warning("a connection was closed: %s", error.message)
        running = self._running if self._busy else None
        if self.pipeline or (running is not None and running.response_started):  # an earlier reply is incomplete
            self.close_now()
            return
        if running is not None:
            running.disconnected = True  # anything that the application still sends is dropped
            running.message_event.set()
        body = msgspec.json.encode(error.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._partial = True
        if not self._busy:
            self._begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MAX_HEADERS:
            raise ApiError(431, f"a request may have {MAX_HEADERS} headers: send fewer", code="headers_too_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            self._offered = True  # the head is parsed again without the offer
            return
        super().on_headers_complete()
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # an application that reads nothing would not notice that its client has left
        if len(self.pipeline) > MAX_WAITING:
            self._refuse_last()

    def _refuse_last(self) -> None:
        """Replace the latest request by a refusal, sent after the earlier replies; then close the connection."""
        text = f"{MAX_WAITING} requests of this connection already wait: read their replies first"
        logger.warning("a connection will be closed: %s", text)
        self.cycle.keep_alive = False
        self.pipeline[0] = self.cycle, error_response(ApiError(429, text, code="too_many_at_once"))
        self._full = True
        raise ValueError(text)  # ends the parser

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._head, self._partial = 0, False
        self._end()
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._limiter.on_request(self)

    def on_response_complete(self) -> None:
        if self._running is not None:
            self._running.body = bytearray()  # the part of the body that the application did not read
        super().on_response_complete()
        self._count()
        if not self._busy:  # else another request, sent before this reply, is running
            self._limiter.on_response(self)
            if self._partial:
                self._begin()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._running = cycle
        app = _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app
        super()._start_asgi_task(cycle, self._counted(app))

    def _counted(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app`` so that bytes of a body that it reads no longer count for the connection."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def taken() -> Message:
                message = await receive()
                self._count()
                return message

            await app(scope, taken, send)

        return counted

    def _on_write(self) -> None:
        if self._slow is None:
            self._slow = self.loop.call_later(self._slow_s, self._watch, self.transport.taken)

    def _watch(self, taken: int) -> None:
        """Close the connection if the client has bytes to take, and has taken none since ``taken`` of them."""
        self._slow = None
        if not self.transport.untaken:
            return
        if self.transport.taken <= taken:
            logger.warning("the client does not read: cut off after %g s", self._slow_s)
            self.close_now()
        else:
            self._on_write()

    def _begin(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._header_s, self.close_now)

    def _end(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _bytes_of(cycle: RequestResponseCycle) -> int:
    """Return the bytes of a request's headers, and of the part of its body that the application has not read."""
    headers = sum(len(name) + len(value) + HEADER_BYTES for name, value in cycle.scope["headers"])
    return headers + len(cycle.body)


def _until_closed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` for HTTP/1.0, which has no chunks: a reply of unknown length ends with its connection."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        open_end = False

        async def unchunked(message: Message) -> None:
            nonlocal open_end
            if message["type"] == "http.response.start":
                open_end = all(name != b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = False if open_end else None
            elif open_end:  # uvicorn counts: these bytes, and one more if more follow
                cycle.expected_content_length = len(message["body"]) + message["more_body"]
            await send(message)

        await app(scope, receive, unchunked)

    return plain
