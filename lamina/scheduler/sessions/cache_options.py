"""The terms on which a request is taken: the requests that its KV may serve, and its place in the queue."""

from __future__ import annotations

import msgspec

from .session_table import SessionName
from .token_ranges import TokenRanges


class CacheOptions(msgspec.Struct, frozen=True):
    """``salt``: it shares KV with requests of the same salt only. ``session``: it is the next turn of that one.
    ``affinity_key``: where there is room it begins where others of its kin did; empty: it has none. ``retention_s``:
    its pages are not given up sooner after its end, as long as others can be. ``discard_ranges``: tokens that it
    loses, and its session for ever. ``priority``: those with a lower number come first, whenever they have come.
    """

    salt: bytes = b""
    session: SessionName | None = None
    affinity_key: bytes = b""
    retention_s: float = 0.0
    discard_ranges: TokenRanges = ()
    priority: int = 0


DEFAULT_CACHE_OPTIONS = CacheOptions()
