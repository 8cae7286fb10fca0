"""A memory budget that many requests share: each holder counts its bytes, and their sum stays within one limit."""

from __future__ import annotations


class MemoryBudget:
    """The bytes that all holders together may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def hold(self) -> Holding:
        """Return a new holding without any bytes."""
        return Holding(self)

    def has_room(self, nbytes: int, leave: int = 0) -> bool:
        """Return True if ``nbytes`` more fit now and ``leave`` bytes stay free."""
        return self.used + nbytes <= self.limit - leave

    def could_fit(self, nbytes: int, leave: int = 0) -> bool:
        """Return True if ``nbytes`` would fit while nothing else is held."""
        return nbytes <= self.limit - leave


class Holding:
    """The bytes of one holder. Its owner calls ``close`` on every path; after that it stays empty."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._closed = False
        self.size = 0

    def resize(self, size: int, leave: int = 0) -> bool:
        """Count ``size`` bytes instead of the previous size. Returns False, and changes nothing, if the increase
        exceeds what the budget has left, less ``leave``. A decrease always succeeds.
        """
        more = size - self.size
        if more > 0 and (self._closed or not self._budget.has_room(more, leave)):
            return False
        self._budget.used += more
        self.size = size
        return True

    def close(self) -> None:
        """Release all bytes. Idempotent."""
        self.resize(0)
        self._closed = True
