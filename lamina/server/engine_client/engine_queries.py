"""Questions to the engine that it answers between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import structs

from .messages import SessionsReply, SessionsRequest

ANSWER_S = 10.0


class EngineQueries:
    """The open questions to the engine. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[SessionsReply]] = {}
        self._next = 0

    async def query(self, send: Callable[[SessionsRequest], None], question: SessionsRequest) -> SessionsReply:
        """The engine's answer to one question, which gets its number. Raises TimeoutError after ANSWER_S, and what
        ``fail`` was told.
        """
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[SessionsReply] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            send(structs.replace(question, number=number))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        finally:
            del self._open[number]

    def fail(self, error: Exception) -> None:
        """Whoever would have answered is gone."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)

    def on_answer(self, reply: SessionsReply) -> None:
        """Also where nobody waits any more."""
        answer = self._open.get(reply.number)
        if answer is not None and not answer.done():
            answer.set_result(reply)
