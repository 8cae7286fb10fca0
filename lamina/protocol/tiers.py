"""What driver and memory workers tell each other of the pages that are kept beside the pools."""

from __future__ import annotations

import msgspec

MOST_LISTED = 1 << 17  # keys that a memory worker tells of


class TierPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a memory worker keeps pages beside its pool. ``size``, ``memory``: bytes of all ``workers``, each has an
    equal part. See kv.media.MediumPlace. ``chunk``: tokens of a prompt's chunks; ``ranks``: that share the model's
    heads, of which the worker is of number ``rank``. ``ttl_s``: for which pages that nobody uses are kept; 0 = ever.
    """

    medium: str
    size: int
    workers: int
    policy: str
    identity: bytes
    rank: int = 0
    ranks: int = 1
    chunk: int = 0
    ttl_s: float = 0.0
    directory: str = ""
    secret: bytes = b""
    server: str = ""
    memory: int = 0


class StoredPages(msgspec.Struct, frozen=True, kw_only=True, tag="stored-pages"):
    """Memory worker -> driver, in answer to a Connect with a tier, once it is bound: the keys of pages with every atom
    that this worker can need, in the order of their last use; MOST_LISTED at most. ``room``: number of pages whose part
    it can keep. ``gone``: keys of pages that it has just given up for all workers, although another one may have listed
    them before.
    """

    view: int
    keys: list[bytes]
    room: int = 0
    gone: list[bytes] = []


class Transferred(msgspec.Struct, frozen=True, kw_only=True, tag="transferred"):
    """Memory worker -> driver: transfer ``id`` has ended here. So many ``pages``, from its first one on, are where they
    were to be; ``error``: why not all. ``gone``: keys of pages that have given way.
    """

    view: int
    id: int
    pages: int
    gone: list[bytes] = []
    error: str = ""


class GateOpened(msgspec.Struct, frozen=True, kw_only=True, tag="gate-opened"):
    """Memory worker -> driver: transfer ``id`` has loaded enough for rows of its sequence to come. The transfer reports
    its end as others do. If that is an error, these rows attended KV that was never there.
    """

    view: int
    id: int


class TierFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver knows of the pages beside the pools, when all have met. ``secret``, ``identity``, ``era``: of
    their keys; ``page``: tokens; ``pages``, ``rooms``: what each memory worker has told; ``medium``: the name of where
    they are; ``complete``: it has every page, of whatever tokens.
    """

    secret: bytes
    identity: bytes
    page: int
    pages: list[list[bytes]]
    medium: str = "host"
    rooms: list[int] = []
    era: bytes = b""
    complete: bool = False
