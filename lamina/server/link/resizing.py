"""A change of the memory workers that the engine makes while it runs, and whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from .messages import Cordon, Scale, Scaled
from .restarts import PlanFailedError

log = logging.getLogger(__name__)


class BusyError(Exception):
    """The engine is being replaced, and cannot be changed now."""


class Resizing:
    """One at a time. All methods belong to the event loop's thread."""

    def __init__(self, send: Callable[[Scale | Cordon], None]) -> None:
        """``send``: to the engine."""
        self._send = send
        self._open: asyncio.Future[Scaled] | None = None

    async def change(self, wanted: Scale, adopt: Callable[[], None]) -> float | None:
        """Seconds in which no step was done; ``adopt`` once it is so. None where all workers are to start anew. Raises
        BusyError, PlanFailedError.
        """
        done = await self._ask(wanted)
        if not done.in_place and not wanted.leaving:
            log.info("all workers start anew, as %s", done.error)
            return None
        if done.error:
            raise PlanFailedError(done.error)
        adopt()
        return done.pause_s

    async def cordon(self, order: Cordon) -> list[int]:
        """All memory workers on which no sequence begins, once ``order`` is carried out. Raises as ``change``."""
        done = await self._ask(order)
        if done.error:
            raise PlanFailedError(done.error)
        return done.cordoned

    def check(self) -> None:
        """Raises BusyError while there is one."""
        if self._open is not None:
            raise BusyError("its memory workers come or go already: ask again once they have")

    async def _ask(self, order: Scale | Cordon) -> Scaled:
        """What became of it; the end of the engine is an answer, too."""
        self.check()
        self._open = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            return await self._open
        finally:
            self._open = None

    def answered(self, said: Scaled) -> None:
        """Also where nobody waits any more, or nobody has asked."""
        if said.asked and self._open is not None and not self._open.done():
            self._open.set_result(said)
