"""Queries to which the engine replies between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import structs

from .messages import SessionsReply, SessionsRequest

ANSWER_S = 10.0


class EngineQueries:
    """The open queries to the engine. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[SessionsReply]] = {}
        self._next = 0

    async def query(self, send: Callable[[SessionsRequest], None], question: SessionsRequest) -> SessionsReply:
        """Send one query, which gets its number here, and return the engine's reply. Raises TimeoutError after
        ANSWER_S, and the error that ``fail`` gets.
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
        """End all open queries with ``error``, because the engine is gone."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)

    def on_answer(self, reply: SessionsReply) -> None:
        """Deliver a reply. One without a waiting caller is ignored."""
        answer = self._open.get(reply.number)
        if answer is not None and not answer.done():
            answer.set_result(reply)
