"""Token ranges for which a step allocates blocks of a sequence: its rows, and prefixes fetched from a
prefill worker.
"""

from __future__ import annotations

import msgspec

from .kv_placement import FIRST_LOCATION, KvLocation


class RowRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive new tokens of one sequence: positions ``first .. first + count``. A sequence is in a step once.

    Attention reads positions ``0 .. first`` from the store and the new ones from this step; it ignores rows stored
    after ``first``. Writes are positional, so a step can be sent again. ``location``: of the sequence, including these
    rows.
    """

    sequence: int
    first: int
    count: int
    location: KvLocation = FIRST_LOCATION


class FetchPrefix(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Hold blocks, as for rows, for whole blocks that prefill worker ``worker`` has of ``source``, at the same
    positions. The receiving prefill worker fetches them layer by layer, before it attends them. Until the step is done,
    the other worker must not free ``source``. No layer has a window.
    """

    sequence: int
    first: int
    count: int
    worker: int
    source: int

    @property
    def rows(self) -> RowRange:
        """The tokens for which the sequence holds blocks."""
        return RowRange(self.sequence, self.first, self.count)
