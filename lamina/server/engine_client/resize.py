"""Requests to change the memory workers of a running engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .engine_restarts import PlanFailedError
from .messages import CordonWorker, ScaleMemory, ScaleReply

log = logging.getLogger(__name__)


class EngineBusyError(Exception):
    """The engine is being replaced, and cannot be changed now."""


class ResizeRequests:
    """At most one request at a time. All methods belong to the event loop's thread."""

    def __init__(self, send: Callable[[ScaleMemory | CordonWorker], None]) -> None:
        """``send``: sends a message to the engine."""
        self._send = send
        self._open: asyncio.Future[ScaleReply] | None = None

    async def change(self, wanted: ScaleMemory, adopt: Callable[[], None]) -> float | None:
        """Change the memory workers, and call ``adopt`` after success. Returns the seconds in which no step was done,
        or None if all workers must start anew. Raises EngineBusyError, PlanFailedError.
        """
        done = await self._ask(wanted)
        if not done.in_place and not wanted.leaving_workers:
            log.info("all workers start anew, as %s", done.error)
            return None
        if done.error:
            raise PlanFailedError(done.error)
        adopt()
        return done.pause_s

    async def cordon(self, order: CordonWorker) -> list[int]:
        """Carry out ``order`` and return all cordoned memory workers. Raises as ``change``."""
        done = await self._ask(order)
        if done.error:
            raise PlanFailedError(done.error)
        return done.cordoned

    def check(self) -> None:
        """Raises EngineBusyError while another request is open."""
        if self._open is not None:
            raise EngineBusyError("its memory workers are already changing: request it again after that")

    async def _ask(self, order: ScaleMemory | CordonWorker) -> ScaleReply:
        """Send ``order`` and wait for the reply. The end of the engine counts as a reply."""
        self.check()
        self._open = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            return await self._open
        finally:
            self._open = None

    def on_answer(self, reply: ScaleReply) -> None:
        """Deliver a reply. It is ignored if no caller waits, or if the server did not request the change."""
        if reply.was_requested and self._open is not None and not self._open.done():
            self._open.set_result(reply)
