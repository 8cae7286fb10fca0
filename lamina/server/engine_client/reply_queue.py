"""Answers of the engine that have come, and that their readers have not taken yet."""

from __future__ import annotations

import asyncio

from .messages import Delta, merge_delta


class ReplyQueue:
    """Deltas of one or more prompts that their reader has not taken yet: at most one for each completion, added up, so
    that a slow reader holds its own tokens and nothing more.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Delta] = {}
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    def push(self, delta: Delta) -> None:
        """A delta has come."""
        held = self._waiting.setdefault((delta.key, delta.index), delta)
        if held is not delta:
            merge_delta(held, delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._failure = error
        self._arrived.set()

    async def wait_any(self) -> list[Delta]:
        """Wait for something, which stays. Raises what ``fail`` was told, if there is nothing else."""
        await self._arrived.wait()
        if self._failure is not None and not self._waiting:
            raise self._failure
        return list(self._waiting.values())

    async def get(self) -> list[Delta]:
        """What has come since the last call; waits for something. Raises what ``fail`` was told, after the deltas."""
        await self._arrived.wait()
        self._arrived.clear()
        deltas, self._waiting = list(self._waiting.values()), {}
        if self._failure is not None:
            if not deltas:
                raise self._failure
            self._arrived.set()
        return deltas
