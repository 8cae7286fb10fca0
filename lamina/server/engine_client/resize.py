"""A change of the memory workers that the engine makes while it runs, and whoever waits for it."""

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
    """One at a time. All methods belong to the event loop's thread."""

    def __init__(self, send: Callable[[ScaleMemory | CordonWorker], None]) -> None:
        """``send``: to the engine."""
        self._send = send
        self._open: asyncio.Future[ScaleReply] | None = None

    async def change(self, wanted: ScaleMemory, adopt: Callable[[], None]) -> float | None:
        """Seconds in which no step was done; ``adopt`` once it is so. None where all workers are to start anew. Raises
        EngineBusyError, PlanFailedError.
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
        """All memory workers on which no sequence begins, once ``order`` is carried out. Raises as ``change``."""
        done = await self._ask(order)
        if done.error:
            raise PlanFailedError(done.error)
        return done.cordoned

    def check(self) -> None:
        """Raises EngineBusyError while there is one."""
        if self._open is not None:
            raise EngineBusyError("its memory workers come or go already: ask again once they have")

    async def _ask(self, order: ScaleMemory | CordonWorker) -> ScaleReply:
        """What became of it; the end of the engine is an answer, too."""
        self.check()
        self._open = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            return await self._open
        finally:
            self._open = None

    def on_answer(self, reply: ScaleReply) -> None:
        """Also where nobody waits any more, or nobody has asked."""
        if reply.was_requested and self._open is not None and not self._open.done():
            self._open.set_result(reply)
