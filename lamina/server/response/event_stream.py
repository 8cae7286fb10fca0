"""Sends a call's reply, whole or as server-sent events, until its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from io import StringIO
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.server.call import Call
from lamina.server.engine_client.messages import Delta, merge_delta
from lamina.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from lamina.server.request.openai_protocol import StreamOptions

from .openai_logprobs import SCORE_BYTES
from .openai_shapes import ResponseShape
from .rows import LARGE, Rows, encode, pieces, units

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


async def json_response_of(request: Request, call: Call, shape: ResponseShape, encoder: Executor) -> Response:
    """Return the whole reply as one JSON object; ``encoder`` encodes large ones."""
    try:
        deltas = await run_until_disconnect(request.receive, _collect(call))
    finally:
        call.close()
    if deltas is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_answer(whole_answer(shape, deltas, call.usage), encoder)


async def _collect(call: Call) -> list[tuple[int, Delta]]:
    """Return the merged delta of each completion, with the number of its prompt, in order."""
    gathered: dict[tuple[int, int], _Gathered] = {}
    async for batch in call.batches():
        for number, delta in batch:
            gathered.setdefault((number, delta.index), _Gathered()).add(delta)
    return [(number, gathered[number, index].whole()) for number, index in sorted(gathered)]


class _Gathered:
    """Merges the deltas of one completion. Texts are joined at the end, as adding each one would take
    quadratic time.
    """

    def __init__(self) -> None:
        self._held: Delta | None = None
        self._text = StringIO()

    def add(self, delta: Delta) -> None:
        self._text.write(delta.text)
        delta.text = ""
        if self._held is None:
            self._held = delta
        else:
            merge_delta(self._held, delta)

    def whole(self) -> Delta:
        assert self._held is not None
        self._held.text = self._text.getvalue()
        return self._held


def whole_answer(shape: ResponseShape, deltas: Sequence[tuple[int, Delta]], usage: dict[str, Any]) -> dict[str, Any]:
    """Return a whole reply, whose choices are made as it is encoded. ``deltas``: one for each completion, with its
    prompt's number, in order.
    """
    for number, delta in deltas:
        shape.note(number, delta)
    choices = Rows((shape.full_choice(*one) for one in deltas), 1, sum(_units(delta) for _, delta in deltas), deep=True)
    return {**shape.head(stream=False), "choices": choices, "usage": usage | shape.usage_details()}


def _units(delta: Delta) -> int:
    scores = (*(delta.logprobs or ())[-1:], *(delta.prompt_logprobs or ())[-1:])
    many = max(len(delta.logprobs or ()), len(delta.prompt_logprobs or ()))
    return len(delta.token_ids) + many * sum(memoryview(raw).nbytes for raw in scores) // SCORE_BYTES


def json_answer(value: dict[str, Any], encoder: Executor) -> Response:
    """Return ``value``, which may have Rows, as a JSON reply: encoded at once if small, else by ``encoder``
    in pieces.
    """
    if units(value) < LARGE:
        return Response(encode(value), media_type="application/json")
    return PiecewiseAnswer(value, encoder)


async def made(parts: Iterator[bytes], encoder: Executor) -> AsyncIterator[bytes]:
    """Yield ``parts``. ``encoder`` makes each while other requests continue; parts of several replies take turns."""
    loop = asyncio.get_running_loop()
    while (part := await loop.run_in_executor(encoder, next, parts, None)) is not None:
        yield part


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``, or None if the client left first, and ``work`` was cancelled."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _StreamedReply(Response):
    """A reply in parts. Its status is sent with the first part, so a failure before that gets an error status."""

    def __init__(self, parts: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["left"] = not await run_until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> bool:
        part: bytes | None = await anext(self._parts)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while part is not None:
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            part = await anext(self._parts, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


class PiecewiseAnswer(_StreamedReply):
    """A large JSON object. Only a few pieces of it are in memory at a time, even if its client reads slowly."""

    media_type = "application/json"

    def __init__(self, value: dict[str, Any], encoder: Executor) -> None:
        super().__init__(made(pieces(value), encoder))


class EventStream(_StreamedReply):
    """Server-sent events: one chunk for each choice that has grown, usage if requested, then [DONE]."""

    media_type = "text/event-stream"

    def __init__(
        self, call: Call, shape: ResponseShape, options: StreamOptions | None, encoder: Executor, *, alive_s: float
    ) -> None:
        """``encoder``: makes large chunks; ``alive_s``: seconds of silence before a comment is sent, 0 = never."""
        super().__init__(self._events(), {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call
        self._shape = shape
        self._encoder = encoder
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats and self._usage)
        self._alive_s = alive_s

    async def _events(self) -> AsyncIterator[bytes]:
        head = self._shape.head(stream=True)
        opening = self._shape.first_chunks()  # sent with the first token, as clients measure that token's time by it
        yield b""  # the status comes at once
        try:
            async for batch in self._call.batches(self._alive_s):
                events = bytearray()
                for chunk in opening if batch else ():
                    events += _event(self._chunk(head, chunk, begun=False))
                opening = [] if batch else opening
                for choice in (choice for one in batch for choice in self._shape.choices(*one)):
                    if units(choice) < LARGE:
                        events += _event(self._chunk(head, {"choices": [choice]}))
                        continue
                    yield bytes(events)
                    events.clear()
                    large = self._chunk(head, {"choices": Rows([choice], 1, deep=True)})
                    async for piece in made(_pieces_of_event(large), self._encoder):
                        yield piece
                yield bytes(events) if batch else KEEP_ALIVE
            if self._usage:
                yield _event({**head, "choices": [], "usage": self._usage_so_far})
        except ApiError as e:
            yield _event(e.body)
        yield DONE

    @property
    def _usage_so_far(self) -> dict[str, Any]:
        return self._call.usage | self._shape.usage_details()

    def _chunk(self, head: dict[str, Any], chunk: dict[str, Any], *, begun: bool = True) -> dict[str, Any]:
        """Join ``head`` and ``chunk``, with usage if requested. ``begun``: False until the client has a token."""
        if not self._usage:
            return {**head, **chunk}
        so_far = self._usage_so_far
        if not begun:
            so_far = {**so_far, "completion_tokens": 0, "total_tokens": so_far["prompt_tokens"]}
        return {**head, **chunk, "usage": so_far if self._usage_always else None}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(chunk)


def _pieces_of_event(chunk: dict[str, Any]) -> Iterator[bytes]:
    yield b"data: "
    yield from pieces(chunk)
    yield b"\n\n"
