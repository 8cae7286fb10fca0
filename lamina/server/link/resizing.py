"""A change of the memory workers that the engine makes while it runs, and whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .messages import Scale, Scaled


class Resizing:
    """One at a time. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._open: asyncio.Future[Scaled] | None = None

    @property
    def under_way(self) -> bool:
        """Whether there is one."""
        return self._open is not None

    async def ask(self, send: Callable[[Scale], None], wanted: Scale) -> Scaled:
        """What became of it; the end of the engine is an answer, too."""
        self._open = asyncio.get_running_loop().create_future()
        try:
            send(wanted)
            return await self._open
        finally:
            self._open = None

    def answered(self, said: Scaled) -> None:
        """Also where nobody waits any more."""
        if self._open is not None and not self._open.done():
            self._open.set_result(said)
