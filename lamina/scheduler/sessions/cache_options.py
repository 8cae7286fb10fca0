"""The cache options of a request: which requests may share its KV, and its priority."""

from __future__ import annotations

import msgspec

from .session_table import SessionName
from .token_ranges import TokenRanges


class CacheOptions(msgspec.Struct, frozen=True):
    """The rules by which the KV of a request is shared and kept.

    ``salt``: it shares KV only with requests of the same salt. ``session``: it is the next turn of this session.
    ``affinity_key``: if there is room, it begins on the worker of the last request with this key; empty: none.
    ``retention_s``: seconds after its end for which other pages are evicted first. ``discard_ranges``: tokens to drop
    from its context, and from its session's later turns. ``priority``: the lowest number runs first.
    """

    salt: bytes = b""
    session: SessionName | None = None
    affinity_key: bytes = b""
    retention_s: float = 0.0
    discard_ranges: TokenRanges = ()
    priority: int = 0


DEFAULT_CACHE_OPTIONS = CacheOptions()
