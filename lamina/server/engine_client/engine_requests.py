"""Requests to the engine that wait for one reply each: queries about sessions, and changes of memory workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

import msgspec


class EngineRequests:
    """The open requests, by key. All methods belong to the event loop's thread."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        """``send``: sends a message to the engine."""
        self._send = send
        self._open: dict[Hashable, asyncio.Future[Any]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    async def ask(self, key: Hashable, message: msgspec.Struct, limit_s: float | None = None) -> Any:
        """Send ``message`` and return the reply to ``key``. Raises TimeoutError after ``limit_s`` seconds, and the
        error that ``fail`` gets.
        """
        reply = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            async with asyncio.timeout(limit_s):
                return await reply
        finally:
            del self._open[key]

    def on_reply(self, key: Hashable, reply: Any) -> None:
        """Deliver a reply. One without a waiting caller is ignored."""
        waiting = self._open.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail(self, error: Exception) -> None:
        """End all open requests with ``error``, because the engine is gone."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
