"""Tokens for which a step has a sequence hold blocks: its rows, and what a prefill worker has from another one."""

from __future__ import annotations

import msgspec

from .kv_placement import FIRST_LOCATION, KvLocation


class RowRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive new tokens of one sequence: positions ``first .. first + count``. A sequence is in a step once.

    Attention reads positions ``0 .. first`` from the store and the new ones from this step; rows stored behind
    ``first`` do not count. Writes are positional, so a step can be sent again. ``location``: where the sequence lies,
    these rows too.
    """

    sequence: int
    first: int
    count: int
    location: KvLocation = FIRST_LOCATION


class FetchPrefix(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Hold blocks as Rows do, for whole ones that prefill worker ``worker`` has of ``source``, at the same positions:
    this prefill worker takes them from there, layer by layer, before it attends them. Until the step is done, that one
    must not free ``source``. Nothing has a window.
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
