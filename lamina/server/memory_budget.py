"""A memory budget that many requests share: each holder counts its bytes, and their sum stays within one limit."""

from __future__ import annotations

from collections import Counter


class MemoryBudget:
    """The bytes that all holders together may have. Of several tenants each has a share of ``kept`` bytes, in equal
    parts, that the others leave free.
    """

    def __init__(self, limit: int, num_tenants: int = 1, kept: int = 0) -> None:
        """``num_tenants``: API keys, at least 1; with one there are no shares."""
        self.limit = limit
        self.used = 0
        self._num_tenants, self._share = num_tenants, kept // num_tenants if num_tenants > 1 else 0
        self._by_tenant = Counter[bytes]()

    def hold(self, tenant: bytes = b"") -> Holding:
        """Return a new holding without any bytes. ``tenant``: empty for one that belongs to none."""
        return Holding(self, tenant)

    def has_room(self, nbytes: int, leave: int = 0, tenant: bytes = b"") -> bool:
        """Return True if ``nbytes`` more of ``tenant`` fit now and ``leave`` bytes stay free."""
        within = bool(tenant) and self._by_tenant[tenant] + nbytes <= self._share
        others = 0 if within else self._free_shares(tenant)
        return self.used + nbytes + others <= self.limit - leave

    def most(self, leave: int = 0, tenant: bytes = b"") -> int:
        """Return the most bytes that ``tenant`` may have, while nothing else is held, if ``leave`` bytes stay free."""
        return self.limit - leave - (self._num_tenants - bool(tenant)) * self._share

    def take(self, nbytes: int, tenant: bytes) -> None:
        """Count ``nbytes`` more of ``tenant``, or fewer if negative."""
        self.used += nbytes
        self._by_tenant[tenant] += nbytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def _free_shares(self, tenant: bytes) -> int:
        """Return the bytes of other tenants' shares that they do not use now."""
        if not self._share:
            return 0
        used = sum(min(held, self._share) for other, held in self._by_tenant.items() if other and other != tenant)
        return max(0, (self._num_tenants - bool(tenant)) * self._share - used)


class Holding:
    """The bytes of one holder. Its owner calls ``close`` on every path; after that it stays empty."""

    def __init__(self, budget: MemoryBudget, tenant: bytes = b"") -> None:
        self._budget = budget
        self._tenant = tenant
        self._closed = False
        self.size = 0

    def resize(self, size: int, leave: int = 0) -> bool:
        """Count ``size`` bytes instead of the previous size. Returns False, and changes nothing, if the increase
        exceeds what the budget has left, less ``leave``. A decrease always succeeds.
        """
        more = size - self.size
        if more > 0 and (self._closed or not self._budget.has_room(more, leave, self._tenant)):
            return False
        self._budget.take(more, self._tenant)
        self.size = size
        return True

    def close(self) -> None:
        """Release all bytes. Idempotent."""
        self.resize(0)
        self._closed = True
