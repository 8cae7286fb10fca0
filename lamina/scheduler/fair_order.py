"""Shares between tenants that wait: start-time fair queueing (Goyal, Vin and Cheng, 1996) over the tokens of requests.

Each tenant has a clock. A request that comes is stamped with its tenant's clock, which then advances by the tokens that
the request may have. Requests wait in the order of their stamps, so each tenant that waits gets the same share of
tokens. With one tenant this is the order of arrival. Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections import deque

from lamina.kv.page_keys import tenant_of

from .sequence import Sequence


class FairOrder:
    """Stamps sequences in the order in which they come."""

    def __init__(self) -> None:
        self._clocks: dict[bytes, int] = {}  # by tenant: the stamp of its next request
        self._now = 0  # tokens; no stamp from now on is lower, so a tenant that was idle has saved up nothing

    def stamp(self, sequence: Sequence, waiting: deque[Sequence]) -> None:
        """Stamp a new sequence. ``waiting``: those before it, the next one first."""
        if waiting:
            self._now = max(self._now, waiting[0].fair_stamp)
        else:
            self._now = max(self._now, *self._clocks.values(), 0)
            self._clocks.clear()
        tenant = tenant_of(sequence.salt)
        sequence.fair_stamp = max(self._now, self._clocks.get(tenant, 0))
        self._clocks[tenant] = sequence.fair_stamp + (0 if sequence.is_hidden else sequence.max_len)
