"""The ops of a plan that concern the medium beside the pool alone, and no block."""

from __future__ import annotations

import msgspec

from .kv_placement import FIRST_LOCATION, KvLocation

MAX_HINTED_PAGES = 1 << 16  # pages, of all turns that wait
MAX_RETENTION_S = 1e6  # for which pages are kept at least, behind the last word about them


class DeletePages(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Forget pages in the medium, behind what is being saved there. Nobody waits for it. ``sequence``: whose they were;
    it need not exist.
    """

    sequence: int
    keys: list[bytes]


class PrefetchHint(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """A sequence that waits needs pages of the medium, from page ``first`` on, and will most likely lie at
    ``location``. A smaller ``order`` needs its pages earlier. No keys: it needs no pages any more. No worker waits for
    this op.
    """

    order: int
    first: int = 0
    keys: list[bytes] = []
    location: KvLocation = FIRST_LOCATION


class SetRetention(msgspec.Struct, frozen=True, array_like=True, tag="prolong"):
    """Keep pages of the medium for ``seconds``: other pages give way before them, and none is given up for its age. It
    is done behind the saves that are under way; no worker waits for it. ``sequence``: the one that had the pages; it
    need not exist.
    """

    sequence: int
    seconds: float
    keys: list[bytes]


StorageOp = DeletePages | SetRetention | PrefetchHint
