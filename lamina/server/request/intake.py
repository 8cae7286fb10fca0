"""A request's share of the memory for bodies: its bytes as they arrive, then decoded values, then prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from lamina.config.flag_groups import flag_name
from lamina.facts.report import size_text
from lamina.server.errors import ApiError
from lamina.server.memory_budget import MemoryBudget
from lamina.server.memory_limits import SPARE, TOKENIZING

SMALL = 1 << 14  # bytes of a body that may use the whole budget; larger bodies leave a part of it to small ones
ALONE = 1 << 16  # bytes of text from which on only one request at a time is tokenized
RETRY_AFTER_S = 1


class Intake:
    """Counts one request's memory. ``close`` ends it on every path. All methods raise ApiError if the memory does not
    fit: 413 for what never fits, 503 for what may fit later.
    """

    def __init__(self, budget: MemoryBudget, refused: Callable[[str], None]) -> None:
        """``refused``: gets the reason of each 503, in one word."""
        self._budget = budget
        self._refused = refused
        self._holding = budget.hold()
        self._leave = 0

    def expect(self, nbytes: int) -> None:
        """Check that a body of ``nbytes`` fits now, before any of it is read."""
        self._grade(nbytes)
        self._check(nbytes, self._budget.has_room(nbytes, self._leave), "the body")

    def read(self, nbytes: int) -> None:
        """Count ``nbytes``, the part of the body that has arrived so far."""
        self._grade(nbytes)
        self.hold(nbytes)

    def hold(self, nbytes: int, what: str = "the body") -> None:
        """Count ``nbytes`` instead of the previous count."""
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
        """Release all bytes. Idempotent."""
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
        text = f"bodies and prompts of other requests fill the memory for them ({flag}): retry later"
        raise ApiError(503, text, code="no_room_for_body", retry_after_s=RETRY_AFTER_S)


class TextRoom:
    """Counts the memory that a request's texts take while they are tokenized. Long ones wait in ``line`` for each
    other, so at most one of them counts at a time.
    """

    def __init__(self, intake: Intake, line: asyncio.Lock) -> None:
        self._intake = intake
        self._line = line

    @asynccontextmanager
    async def __call__(self, texts: Iterable[str]) -> AsyncIterator[None]:
        """Count ``texts`` within the block. Raises ApiError if they do not fit."""
        nbytes = sum(len(text) * (1 if text.isascii() else 4) for text in texts)
        if nbytes < ALONE:
            yield
            return
        async with self._line:
            with self._intake.briefly(TOKENIZING * nbytes, "the text"):
                yield
