"""Replies of the engine that their readers have not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .messages import Delta, merge_delta


class ReplyQueue:
    """The unread deltas of one or more prompts. There is at most one merged delta for each completion, so a slow reader
    holds its own tokens and nothing more.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Delta] = {}
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()
        self._on_taken: list[Callable[[], None]] = []
        self.num_taken = 0  # how often its reader has taken all deltas

    def unread(self, key: int) -> int:
        """Return the most tokens of a completion of prompt ``key`` that were not taken."""
        return max((len(delta.token_ids) for (of, _), delta in self._waiting.items() if of == key), default=0)

    def call_when_taken(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, when the reader takes all deltas the next time."""
        self._on_taken.append(call)

    def push(self, delta: Delta) -> None:
        """Add a delta."""
        held = self._waiting.setdefault((delta.key, delta.index), delta)
        if held is not delta:
            merge_delta(held, delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the queue by ``error``: nothing more will come."""
        self._failure = error
        self._arrived.set()

    async def wait_any(self) -> list[Delta]:
        """Wait for a delta and leave it in the queue. Raises the error of ``fail`` if there are no deltas."""
        await self._arrived.wait()
        if self._failure is not None and not self._waiting:
            raise self._failure
        return list(self._waiting.values())

    async def get(self) -> list[Delta]:
        """Wait for deltas and take all of them. Raises the error of ``fail`` after the last deltas."""
        await self._arrived.wait()
        self._arrived.clear()
        deltas, self._waiting = list(self._waiting.values()), {}
        self.num_taken += 1
        calls, self._on_taken = self._on_taken, []
        for call in calls:
            call()
        if self._failure is not None:
            if not deltas:
                raise self._failure
            self._arrived.set()
        return deltas
