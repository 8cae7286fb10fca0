"""The memory that inactive sessions need, and its cost compared with computing them again (CachedAttention, arXiv
2403.19708, sections 2.4, 3.2 and 4.3.6).
"""

from __future__ import annotations

from typing import NamedTuple

HOUR_S = 3600.0
# Capacity divided by the need of all sessions of an hour -> the share of turns that were hits, in the paper's run
# (figure 23).
PAPER_HITS = {0.1: 0.51, 0.25: 0.98}


class SessionPrices(NamedTuple):
    """US dollars for an hour: of a GPU, of a GB of memory, of a GB of disk. Those of the paper (section 4.2)."""

    gpu: float = 5.0
    memory: float = 0.0088
    disk: float = 0.000082


class SessionMemory(NamedTuple):
    """Bytes. ``session``: CCpS, one at its longest; ``all``: CCpUT, all sessions of an hour. ``advised``: the share of
    these by PAPER_HITS with nearly as many hits.
    """

    session: float
    all: float
    advised: float


def session_memory(kv_bytes_per_token: float, context: int, per_hour: float) -> SessionMemory:
    """Return the memory of sessions. ``context``: most tokens; ``per_hour``: DSpUT, distinct active sessions within an
    hour, the least time that the KV of each is kept.
    """
    session = kv_bytes_per_token * context
    return SessionMemory(session, per_hour * session, max(PAPER_HITS) * per_hour * session)


def stored_cost(memory_bytes: float, disk_bytes: float, prices: SessionPrices) -> float:
    """Return the dollars for storage of one hour."""
    return (memory_bytes * prices.memory + disk_bytes * prices.disk) / 1e9


def computed_cost(tokens: float, tokens_per_s: float, prices: SessionPrices) -> float:
    """Return the dollars for computing so many tokens again, if a GPU computes ``tokens_per_s`` of a prompt."""
    return tokens / tokens_per_s / HOUR_S * prices.gpu
