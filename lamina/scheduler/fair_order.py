"""Fair queueing of tenants: start-time fair queueing (Goyal, Vin and Cheng, 1996) over the tokens of requests.

Each tenant has a virtual clock. A new request is stamped with its tenant's clock, which then advances by the most
tokens that the request may have. Requests wait in the order of their stamps, so each waiting tenant gets the same share
of tokens. With one tenant this is the order of arrival. Each priority has its own clocks. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

from collections import deque

from lamina.kv.page_keys import tenant_of

from .sequence import Sequence


class FairOrder:
    """Stamps sequences in their order of arrival."""

    def __init__(self) -> None:
        # Of priorities of which some request waits: by tenant, the stamp of its next request.
        self._clocks: dict[int, dict[bytes, int]] = {}
        # Tokens, by priority: no stamp from now on is lower, so a tenant that was idle has saved up nothing.
        self._now: dict[int, int] = {}
        self._latest = 0  # of all clocks so far

    @property
    def has_tenants(self) -> bool:
        """True if requests of several tenants, or of several priorities, may wait."""
        return len(self._clocks) > 1 or any(len(clocks) > 1 for clocks in self._clocks.values())

    def stamp(self, sequence: Sequence, waiting: deque[Sequence]) -> None:
        """Stamp a new sequence. ``waiting``: those before it, the next one first."""
        priority = sequence.priority
        first = next((s for s in waiting if s.priority == priority), None)
        if not waiting:
            self._clocks.clear()
            self._now.clear()
        if first is None:
            self._clocks[priority], self._now[priority] = {}, self._latest
        clocks = self._clocks.setdefault(priority, {})
        now = max(self._now.get(priority, self._latest), 0 if first is None else first.fair_stamp)
        tenant = tenant_of(sequence.salt)
        sequence.fair_stamp = max(now, clocks.get(tenant, 0))
        clocks[tenant] = sequence.fair_stamp + (sequence.max_len if sequence.follows is None else 0)
        self._now[priority], self._latest = now, max(self._latest, clocks[tenant])
