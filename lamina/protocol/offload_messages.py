"""Messages between the driver and memory workers about offloaded KV pages."""

from __future__ import annotations

import msgspec

MAX_LISTED_PAGES = 1 << 17  # keys that a memory worker lists


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The storage in which a memory worker keeps offloaded pages; see kv.storage.StorageConfig. ``total_bytes``,
    ``memory_bytes``: bytes of all ``workers`` together; each has an equal part. ``chunk_tokens``: tokens of a prefill
    chunk. ``rank``: the worker's rank, of ``ranks`` that share the model's heads. ``ttl_s``: seconds after which unused
    pages are deleted; 0: never. ``keeps``: False for workers on loan and for parity, which store nothing.
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
    keeps: bool = True


class StoredPages(msgspec.Struct, frozen=True, kw_only=True, tag="stored-pages"):
    """Memory worker -> driver, in reply to a Connect with storage, once the worker is bound: the pages that it has.
    ``keys``: pages of which it has every fragment that it can need, in the order of their last use, MAX_LISTED_PAGES at
    most. ``states``: the same for recurrent states. ``capacity``: the number of pages whose part it can keep.
    ``evicted``: pages that it has just discarded for all workers, although another worker may have listed them before.
    """

    epoch: int
    keys: list[bytes]
    capacity: int = 0
    evicted: list[bytes] = []
    states: list[bytes] = []


class TransferDone(msgspec.Struct, frozen=True, kw_only=True, tag="transferred"):
    """Memory worker -> driver: transfer ``transfer_id`` has ended here. Its first ``num_pages`` pages are at their
    destination; ``error``: why not all. ``is_miss``: the next page to load was no longer stored, as if it had not been
    found. ``evicted``: keys of pages that were evicted for them.
    """

    epoch: int
    transfer_id: int
    num_pages: int
    evicted: list[bytes] = []
    error: str = ""
    is_miss: bool = False


class PagesExpired(msgspec.Struct, frozen=True, kw_only=True, tag="expired"):
    """Memory worker -> driver: it has deleted pages, for all workers, that were not used for ``ttl_s`` seconds."""

    epoch: int
    keys: list[bytes]


class LoadReady(msgspec.Struct, frozen=True, kw_only=True, tag="gate-opened"):
    """Memory worker -> driver: transfer ``transfer_id`` has loaded enough for rows of its sequence to come. The
    transfer still reports its end in a TransferDone. If that has an error, these rows attended KV that was never there.
    """

    epoch: int
    transfer_id: int


class OffloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about offloaded pages that the driver knows, once all workers have connected. ``secret``, ``identity``,
    ``era``: parts of page keys. ``page_size``: in tokens. ``pages``, ``states``, ``capacities``: by memory worker, as
    it has reported. ``backend``: the storage backend's name. ``is_complete``: it has every page, of any tokens.
    """

    secret: bytes
    identity: bytes
    page_size: int
    pages: list[list[bytes]]
    backend: str = "host"
    capacities: list[int] = []
    era: bytes = b""
    states: list[list[bytes]] = []
    is_complete: bool = False
