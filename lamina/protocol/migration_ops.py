"""What plans say of stripes that go from one memory worker to another while their sequence goes on decoding, or of a
whole sequence, which has no rows meanwhile, and what memory workers answer.

A CopyStripes has them copied: whoever has them goes on serving. Once the copy is there, a later plan's Adopt has the
sequence lie there; then, and not before, the blocks that it had are free. Where anything ends before that, it lies as
it did.
"""

from __future__ import annotations

import msgspec

from .kv_placement import KvLocation


class CopyStripes(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Begin ``sequence``, which holds the stripes ``stripe .. stripe + count`` of ``source`` in ``kv_shard`` and
    nothing else, and have their K and V copied there by the one memory worker that has them. All rows in them are of
    plans before this one. Where sequences lie whole, ``count`` is 0: all of it goes, and it has no rows before it
    adopts the copy. Answered by StripesCopied, once by every memory worker.
    """

    sequence: int
    source: int
    stripe: int
    count: int
    kv_shard: int


class CommitMigration(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """``sequence`` has the blocks of ``copy``, which is gone, and lies at ``location`` from now on; its other stripes
    lie where they did.
    """

    sequence: int
    copy: int
    location: KvLocation


class MigrationPeer(msgspec.Struct, frozen=True, array_like=True):
    """A memory worker, as another worker or itself is told of it. ``connects``: the other one connects to it at
    ``url``, by ``key`` if it has its own; ``is_awaited``: it connects to the other one. Two workers with keys of their
    own do not meet.
    """

    name: str
    connects: bool = False
    is_awaited: bool = False
    url: str = ""
    key: bytes = b""


class StripesCopied(msgspec.Struct, frozen=True, kw_only=True, tag="stripes-copied"):
    """Memory worker -> driver: its part of the CopyStripes of ``sequence`` is done. ``nbytes``: of K and V that have
    come, and whose checksums are right; ``error``: why it could not be done.
    """

    epoch: int
    sequence: int
    nbytes: int = 0
    error: str = ""
