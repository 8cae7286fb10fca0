"""A budget of memory that many requests share: each holder counts its bytes, and all of them stay within one limit."""

from __future__ import annotations


class MemoryBudget:
    """Bytes that all holders together may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def hold(self) -> Holding:
        """Return a new holding without any bytes."""
        return Holding(self)

    def has_room(self, nbytes: int, leave: int = 0) -> bool:
        """Tell whether ``nbytes`` more fit now and ``leave`` bytes stay free."""
        return self.used + nbytes <= self.limit - leave

    def could_fit(self, nbytes: int, leave: int = 0) -> bool:
        """Tell whether ``nbytes`` fit while nothing else is held."""
        return nbytes <= self.limit - leave


class Holding:
    """The bytes of one holder. Its owner calls ``close`` on every path; after that it stays empty."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._closed = False
        self.size = 0

    def resize(self, size: int, leave: int = 0) -> bool:
        """Count ``size`` bytes in place of what was counted. Return False, and change nothing, where more bytes are
        wanted than the budget has, less ``leave``. Fewer bytes are always granted.
        """
        more = size - self.size
        if more > 0 and (self._closed or not self._budget.has_room(more, leave)):
            return False
        self._budget.used += more
        self.size = size
        return True

    def close(self) -> None:
        """Give back all bytes. Idempotent."""
        self.resize(0)
        self._closed = True
