"""Plan ops that migrate stripes, or a whole sequence, from one memory worker to another, and memory workers' replies.

Stripes are copied while their sequence continues to decode; a whole sequence has no rows meanwhile. CopyStripes begins
the copy, and the old owner continues to serve the stripes. Once the copy is there, a later plan's CommitMigration
changes the location. Only then are the old blocks free. If anything ends before that, the sequence stays where it was.
"""

from __future__ import annotations

import msgspec

from .kv_placement import KvLocation


class CopyStripes(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Start ``sequence``, which holds only the stripes ``stripe .. stripe + count`` of ``source``, in ``kv_shard``.

    The one memory worker that has these stripes copies their K and V there. All their rows are of earlier plans. Where
    sequences are not divided, ``count`` is 0: all of the source is copied, and it has no rows before CommitMigration.
    Every memory worker replies with one StripesCopied.
    """

    sequence: int
    source: int
    stripe: int
    count: int
    kv_shard: int


class CommitMigration(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Give ``sequence`` the blocks of ``copy``, which ends, and the new ``location``. Other stripes do not change."""

    sequence: int
    copy: int
    location: KvLocation


class StripesCopied(msgspec.Struct, frozen=True, kw_only=True, tag="stripes-copied"):
    """Memory worker -> driver: its part of the CopyStripes of ``sequence`` is done. ``nbytes``: K and V received, with
    right checksums; ``error``: the reason for a failure.
    """

    epoch: int
    sequence: int
    nbytes: int = 0
    error: str = ""
