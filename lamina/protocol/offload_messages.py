"""What driver and memory workers tell each other of the pages that are kept beside the pools."""

from __future__ import annotations

import msgspec

MAX_LISTED_PAGES = 1 << 17  # keys that a memory worker tells of


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a memory worker keeps pages beside its pool. ``total_bytes``, ``memory_bytes``: bytes of all ``workers``,
    each has an equal part. See kv.storage.StorageConfig. ``chunk_tokens``: tokens of a prompt's chunks; ``ranks``: that
    share the model's heads, of which the worker is of number ``rank``. ``ttl_s``: for which pages that nobody uses are
    kept; 0 = ever.
    """

    backend: str
    total_bytes: int
    workers: int
    policy: str
    identity: bytes
    rank: int = 0
    ranks: int = 1
    chunk_tokens: int = 0
    ttl_s: float = 0.0
    directory: str = ""
    secret: bytes = b""
    server: str = ""
    memory_bytes: int = 0


class StoredPages(msgspec.Struct, frozen=True, kw_only=True, tag="stored-pages"):
    """Memory worker -> driver, in answer to a Connect with a tier, once it is bound: the keys of pages with every
    fragment that this worker can need, in the order of their last use; MAX_LISTED_PAGES at most. ``capacity``: number
    of pages whose part it can keep. ``evicted``: keys of pages that it has just given up for all workers, although
    another one may have listed them before.
    """

    epoch: int
    keys: list[bytes]
    capacity: int = 0
    evicted: list[bytes] = []


class TransferDone(msgspec.Struct, frozen=True, kw_only=True, tag="transferred"):
    """Memory worker -> driver: transfer ``transfer_id`` has ended here. So many ``num_pages``, from its first one on,
    are where they were to be; ``error``: why not all. ``evicted``: keys of pages that have given way.
    """

    epoch: int
    transfer_id: int
    num_pages: int
    evicted: list[bytes] = []
    error: str = ""


class LoadReady(msgspec.Struct, frozen=True, kw_only=True, tag="gate-opened"):
    """Memory worker -> driver: transfer ``transfer_id`` has loaded enough for rows of its sequence to come. The
    transfer reports its end as others do. If that is an error, these rows attended KV that was never there.
    """

    epoch: int
    transfer_id: int


class OffloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver knows of the pages beside the pools, when all have met. ``secret``, ``identity``, ``era``: of
    their keys; ``page_size``: tokens; ``pages``, ``capacities``: what each memory worker has told; ``backend``: the
    name of where they are; ``is_complete``: it has every page, of whatever tokens.
    """

    secret: bytes
    identity: bytes
    page_size: int
    pages: list[list[bytes]]
    backend: str = "host"
    capacities: list[int] = []
    era: bytes = b""
    is_complete: bool = False
