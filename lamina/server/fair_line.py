"""A lock whose waiters take turns by tenant, so that one tenant's work does not keep another's waiting.

Start-time fair queueing, as for requests (lamina.scheduler.fair_order): each tenant has a virtual clock, which advances
by the size of its work. Of one tenant the order is that of arrival.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

Waiter = tuple[int, int, asyncio.Future[None]]  # its stamp, its number, and what wakes it


class FairLine:
    """One holder at a time. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []  # a heap
        self._numbers = count()
        self._is_held = False
        self._clocks: dict[bytes, int] = {}  # of tenants since the line was last empty: the stamp of their next work
        self._now = 0  # the stamp of the holder

    @asynccontextmanager
    async def turn(self, tenant: bytes, size: int) -> AsyncIterator[None]:
        """Hold the line within the block, for work of ``size``."""
        stamp = max(self._now, self._clocks.get(tenant, 0))
        self._clocks[tenant] = stamp + size
        await self._wait(stamp)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, stamp: int) -> None:
        if not self._is_held:
            self._is_held, self._now = True, stamp
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (stamp, next(self._numbers), woken))
        try:
            await woken
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():  # it has been given the line
                self._release()
            raise

    def _release(self) -> None:
        while self._waiters:
            stamp, _, woken = heapq.heappop(self._waiters)
            if not woken.done():
                self._now = stamp
                woken.set_result(None)
                return
        self._is_held, self._now = False, 0
        self._clocks.clear()
