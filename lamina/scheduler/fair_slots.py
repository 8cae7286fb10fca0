"""Fair shares of what runs: a tenant with many running sequences gives one up to a tenant with few that waits.

``FairOrder`` alone lets a tenant wait until a sequence of another ends, and a single tenant's may fill all places for
minutes. Each exchange makes the shares more equal, so there are at most as many as places, and none with one tenant.
Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lamina.kv.page_keys import tenant_of

from .sequence import Sequence


def find_exchange(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> tuple[Sequence, Sequence] | None:
    """Return the first waiting sequence of a tenant that runs less than its share, and the running one that gives its
    place to it; None if shares are fair.

    The latter belongs to the tenant that runs most, is no more urgent, and has the least KV to compute again.
    """
    able = [s for s in running if not s.finished]
    shares, seen = Counter(tenant_of(s.salt) for s in able), set[tuple[bytes, int]]()
    able = [s for s in able if _may_stop(s)]
    most = max(shares.values(), default=0)
    for first in waiting:
        tenant = tenant_of(first.salt)
        if (tenant, first.priority) in seen or first.finished or first.follows or shares[tenant] + 1 >= most:
            continue
        seen.add((tenant, first.priority))
        victims = [s for s in able if s.priority >= first.priority and shares[tenant_of(s.salt)] == most]
        if victims:
            return first, min(victims, key=lambda s: (s.num_computed_tokens, -s.request_id, -s.output.index))
    return None


def _may_stop(sequence: Sequence) -> bool:
    """Return whether none of its KV is in transfer."""
    transfer = sequence.transfer
    return sequence.follows is None and not (transfer.awaits_report or transfer.writes_blocks)
