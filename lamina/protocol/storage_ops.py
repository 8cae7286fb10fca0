"""The ops of a plan that only concern the storage of offloaded pages, and no KV block."""

from __future__ import annotations

import msgspec

from .kv_placement import FIRST_LOCATION, KvLocation

MAX_HINTED_PAGES = 1 << 16  # pages of all waiting turns together
MAX_RETENTION_S = 1e6  # the longest retention after the last op about a page


class DeletePages(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Delete pages from storage, after the saves that are in progress. No worker waits for it. ``sequence``: the one
    that had the pages; it need not exist.
    """

    sequence: int
    keys: list[bytes]


class PrefetchHint(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """A waiting sequence needs stored pages from page ``first`` on, and will probably lie at ``location``. A smaller
    ``order`` needs its pages earlier. No keys: it needs no pages any more. No worker waits for this op.
    """

    order: int
    first: int = 0
    keys: list[bytes] = []
    location: KvLocation = FIRST_LOCATION


class SetRetention(msgspec.Struct, frozen=True, array_like=True, tag="prolong"):
    """Keep stored pages for ``seconds``: other pages are evicted before them, and their age does not matter. It takes
    effect after the saves in progress; no worker waits for it. ``sequence``: the one that had the pages; it need not
    exist.
    """

    sequence: int
    seconds: float
    keys: list[bytes]


StorageOp = DeletePages | SetRetention | PrefetchHint
