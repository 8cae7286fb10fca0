"""Sends a call's answer, whole or as server-sent events, and ends the call when its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.server.calls import Call
from lamina.server.errors import GONE, ApiError, json_response
from lamina.server.request.protocol import StreamOptions

from .shapes import Shape

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


async def whole(request: Request, call: Call, shape: Shape) -> Response:
    """All of the answer as one JSON object."""
    try:
        answer = await until_gone(request.receive, _collect(call, shape))
    finally:
        call.close()
    return Response(status_code=GONE) if answer is None else json_response(answer)


async def _collect(call: Call, shape: Shape) -> dict[str, Any]:
    parts: dict[int, list[dict[str, Any]]] = {}
    async for batch in call.batches():
        for number, delta in batch:
            choice = shape.choice(number, delta)
            parts.setdefault(choice["index"], []).append(choice)

    def put_together() -> dict[str, Any]:
        choices = [shape.whole(parts[index]) for index in sorted(parts)]
        return {**shape.head(stream=False), "choices": choices, "usage": call.usage}

    # Scores of a long prompt take a second.
    scored = call.params.prompt_logprobs is not None
    return await asyncio.to_thread(put_together) if scored else put_together()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None where the client left first, and ``work`` was cancelled."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one chunk for each choice that has grown, usage if asked for, then [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, shape: Shape, options: StreamOptions | None, *, alive_s: float) -> None:
        """``alive_s``: seconds of silence before a comment is sent, 0 = never."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._shape = shape
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats and self._usage)
        self._alive_s = alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["state"]["left"] = not await until_gone(receive, self._send_all(send))
        finally:
            self._call.close()

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _events(self) -> AsyncIterator[bytes]:
        head = self._shape.head(stream=True)
        opening = self._shape.opening()  # leaves with the first token: clients take its time for that one's
        try:
            async for batch in self._call.batches(self._alive_s):
                events = [self._event(head, {"choices": [self._shape.choice(*one)]}) for one in batch]
                if events:
                    events = [*(self._event(head, chunk, begun=False) for chunk in opening), *events]
                    opening = []
                yield b"".join(events) or KEEP_ALIVE
            if self._usage:
                yield b"data: %b\n\n" % _encode({**head, "choices": [], "usage": self._call.usage})
        except ApiError as e:
            yield b"data: %b\n\n" % _encode(e.body)
        yield DONE

    def _event(self, head: dict[str, Any], chunk: dict[str, Any], *, begun: bool = True) -> bytes:
        """``begun``: whether a token has come, as far as its reader knows."""
        so_far = self._call.usage
        if not begun:
            so_far = {**so_far, "completion_tokens": 0, "total_tokens": so_far["prompt_tokens"]}
        usage = {"usage": so_far if self._usage_always else None} if self._usage else {}
        return b"data: %b\n\n" % _encode({**head, **chunk, **usage})
