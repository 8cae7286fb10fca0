"""Questions to the engine that it answers between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lamina.engine.conversations.sessions import SessionFacts

from .messages import AskSessions, SessionsAre

ANSWER_S = 10.0


class Questions:
    """The open questions to the engine. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[list[SessionFacts]]] = {}
        self._next = 0

    async def ask(self, send: Callable[[AskSessions], None], tenant: bytes, drop: str | None) -> list[SessionFacts]:
        """The engine's answer to one question. Raises TimeoutError after ANSWER_S."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[list[SessionFacts]] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            send(AskSessions(number, tenant, drop))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        finally:
            del self._open[number]

    def answered(self, said: SessionsAre) -> None:
        """Also where nobody waits any more."""
        answer = self._open.get(said.number)
        if answer is not None and not answer.done():
            answer.set_result(said.sessions)
