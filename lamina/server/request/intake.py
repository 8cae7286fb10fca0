"""A request's share of the memory for bodies: its bytes as they arrive, then decoded values, then prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from lamina.config.flag_groups import flag_name
from lamina.executor.long_texts import TOKENIZING
from lamina.facts.report import size_text
from lamina.server.errors import ApiError
from lamina.server.fair_line import FairLine
from lamina.server.memory_budget import MemoryBudget
from lamina.server.memory_limits import SPARE

SMALL = 1 << 14  # bytes of a body that may use the whole budget; larger bodies leave a part of it to small ones
INLINE_CHARS = 512  # shorter texts are tokenized at once, as switching threads would take longer
LONG_CHARS = 1 << 13  # longer texts of a request are tokenized in a process of their own, one request at a time
RETRY_AFTER_S = 1


class Intake:
    """Counts one request's memory. ``close`` ends it on every path. All methods raise ApiError if the memory does not
    fit: 413 for what never fits, 503 for what may fit later.
    """

    def __init__(self, budget: MemoryBudget, refused: Callable[[str], None], tenant: bytes = b"") -> None:
        """``refused``: gets the reason of each 503, in one word. ``tenant``: whose request it is."""
        self._budget = budget
        self._refused = refused
        self._tenant = tenant
        self._holding = budget.hold(tenant)
        self._leave = 0

    def expect(self, nbytes: int) -> None:
        """Check that a body of ``nbytes`` fits now, before any of it is read."""
        self._grade(nbytes)
        self._check(nbytes, self._budget.has_room(nbytes, self._leave, self._tenant), "the body")

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
        most, flag = self._budget.most(self._leave, self._tenant), flag_name("body_total")
        if nbytes > most:
            text = f"{what} takes {size_text(nbytes)} of memory here, more than {size_text(most)} ({flag}): send less"
            raise ApiError(413, text, code="body_too_large")
        self._refused("bodies")
        text = f"bodies and prompts of other requests fill the memory for them ({flag}): retry later"
        raise ApiError(503, text, code="no_room_for_body", retry_after_s=RETRY_AFTER_S)


class TextLines:
    """The lines in which texts wait: to be rendered, and to be tokenized here or in the other process."""

    def __init__(self) -> None:
        self.to_render, self.short, self.long = FairLine(), FairLine(), FairLine()


class TextRoom:
    """One request's turns in the lines for texts, and the memory that long ones take while they are tokenized. At most
    one of these counts at a time.
    """

    def __init__(self, intake: Intake, lines: TextLines, tenant: bytes) -> None:
        self._intake, self._lines, self._tenant = intake, lines, tenant

    def to_render(self, chars: int) -> AbstractAsyncContextManager[None]:
        """Hold the place of a conversation of ``chars`` characters while it is rendered."""
        return self._lines.to_render.turn(self._tenant, chars)

    @asynccontextmanager
    async def to_tokenize(self, texts: Iterable[str]) -> AsyncIterator[None]:
        """Hold the place of ``texts``, and count them, within the block. Raises ApiError if they do not fit."""
        each = list(texts)
        chars = sum(map(len, each))
        if chars <= INLINE_CHARS:
            yield
        elif chars <= LONG_CHARS:
            async with self._lines.short.turn(self._tenant, chars):
                yield
        else:
            nbytes = sum(len(text) * (1 if text.isascii() else 4) for text in each)
            async with self._lines.long.turn(self._tenant, nbytes):
                with self._intake.briefly(TOKENIZING * nbytes, "the text"):
                    yield
