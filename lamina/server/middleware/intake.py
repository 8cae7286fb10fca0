"""A request's part of the memory for bodies: its bytes as they arrive, then decoded values, then prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from lamina.config.flag_groups import flag_name
from lamina.facts.report import size_text
from lamina.server.errors import ApiError
from lamina.server.limits import SPARE, TOKENIZING

from .budget import MemoryBudget

SMALL = 1 << 14  # bytes of a body that may use all of the budget: larger ones leave a part of it to these
ALONE = 1 << 16  # bytes of text from which on one request at a time is tokenized
RETRY_AFTER_S = 1


class Intake:
    """Counts one request. ``close`` ends it on every path. All methods raise ApiError where there is no room: 413 for
    what never fits, 503 for what may fit later.
    """

    def __init__(self, budget: MemoryBudget, refused: Callable[[str], None]) -> None:
        """``refused``: gets the reason of each 503, in one word."""
        self._budget = budget
        self._refused = refused
        self._holding = budget.hold()
        self._leave = 0

    def expect(self, nbytes: int) -> None:
        """Check that a body of ``nbytes`` has room now, before any of it is read."""
        self._grade(nbytes)
        self._check(nbytes, self._budget.has_room(nbytes, self._leave), "the body")

    def read(self, nbytes: int) -> None:
        """``nbytes`` of the body have arrived so far."""
        self._grade(nbytes)
        self.hold(nbytes)

    def hold(self, nbytes: int, what: str = "the body") -> None:
        """Count ``nbytes`` in place of what was counted."""
        self._check(nbytes, self._holding.resize(nbytes, self._leave), what)

    def add(self, nbytes: int, what: str = "the body") -> None:
        """Count ``nbytes`` more."""
        self.hold(self._holding.size + nbytes, what)

    @contextmanager
    def briefly(self, nbytes: int, what: str = "the body") -> Iterator[None]:
        """Count ``nbytes`` more within the block."""
        before = self._holding.size
        self.add(nbytes, what)
        try:
            yield
        finally:
            self._holding.resize(before)

    def close(self) -> None:
        """Give back all. Idempotent."""
        self._holding.close()

    def _grade(self, nbytes: int) -> None:
        self._leave = 0 if nbytes <= SMALL else self._budget.limit // SPARE

    def _check(self, nbytes: int, granted: bool, what: str) -> None:
        if granted:
            return
        most, flag = size_text(self._budget.limit - self._leave), flag_name("body_total")
        if not self._budget.could_fit(nbytes, self._leave):
            text = f"{what} takes {size_text(nbytes)} of memory here, more than {most} ({flag}): send less"
            raise ApiError(413, text, code="body_too_large")
        self._refused("bodies")
        text = f"bodies and prompts of other requests fill the memory for them ({flag}): ask again"
        raise ApiError(503, text, code="no_room_for_body", retry_after_s=RETRY_AFTER_S)


class TextRoom:
    """The room that a request's texts take while they are tokenized. Long ones wait in ``line`` for each other, so that
    their sum is that of one.
    """

    def __init__(self, intake: Intake, line: asyncio.Lock) -> None:
        self._intake = intake
        self._line = line

    @asynccontextmanager
    async def __call__(self, texts: Iterable[str]) -> AsyncIterator[None]:
        """Hold room for ``texts`` within the block. Raises ApiError where there is none."""
        nbytes = sum(len(text) * (1 if text.isascii() else 4) for text in texts)
        if nbytes < ALONE:
            yield
            return
        async with self._line:
            with self._intake.briefly(TOKENIZING * nbytes, "the text"):
                yield
