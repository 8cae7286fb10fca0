"""The pace at which large bodies are read, so that one API key's bodies keep no other key's requests waiting.

To read and decode a body takes time of the event loop, also where it is refused. The pace is far above what prompts
need: 4 MB are a million tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BYTES_PER_S = 4 << 20  # of one tenant while others have requests
AT_ONCE = 16 << 20  # bytes of a tenant that are read without a wait, first and after a pause
ACTIVE_S = 5.0  # since its last request, a tenant counts as one that has requests


class BodyPace:
    """Says how long a tenant's next body waits: while others have requests, its bytes are a debt that falls with time.
    Of a server without keys, and of a tenant alone, no body waits.
    """

    def __init__(self, num_tenants: int, now: Callable[[], float] = time.monotonic) -> None:
        """``num_tenants``: API keys, at least 1."""
        self._is_shared = num_tenants > 1
        self._now = now
        self._seen: dict[bytes, float] = {}  # tenant -> when its last request came
        self._debts: dict[bytes, tuple[float, float]] = {}  # tenant -> its bytes, and when they were counted

    def note(self, tenant: bytes) -> None:
        """Note a request of ``tenant``."""
        if self._is_shared:
            self._seen[tenant] = self._now()

    def wait_s(self, tenant: bytes, nbytes: int, most_s: float) -> float:
        """Count ``nbytes`` that ``tenant`` is about to send, and return the seconds until they are read. Beyond
        ``most_s`` nothing is counted.
        """
        now = self._now()
        others = any(at > now - ACTIVE_S for other, at in self._seen.items() if other != tenant)
        if not others:
            self._debts.pop(tenant, None)
            return 0.0
        debt, since = self._debts.get(tenant, (0.0, now))
        debt = max(0.0, debt - (now - since) * BYTES_PER_S)
        wait_s = max(0.0, debt - AT_ONCE) / BYTES_PER_S
        self._debts[tenant] = debt + (nbytes if wait_s <= most_s else 0), now
        return wait_s
