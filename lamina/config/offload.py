"""The options of KV that is kept outside of the memory workers' pools."""

from __future__ import annotations

from typing import Annotated

from .option import Choices, Options, ParsedBy, check_size, parse_seconds, parse_size

LOAD_FAILURE_POLICIES = ("recompute", "fail")
STORE_SIZE = "10GiB"
UNLIMITED_BYTES = 1 << 60  # bytes, of what takes no room
EVICTION_POLICIES = ("lru", "fifo", "lfu", "length")  # see kv.eviction_policy, which has one rank for each


class OffloadOptions(Options, frozen=True, kw_only=True):
    """The places that keep the KV of finished requests after it has left the pool, for prompts that begin like them."""

    kv_offloading_size: Annotated[
        str,
        ParsedBy(check_size),
        "host memory of all memory workers together for the KV of finished requests, such as 4GiB. With "
        "--kv-offload dir= pages go here first, then to disk; empty = none",
    ] = ""
    kv_store_dir: Annotated[
        str, "directory in which memory workers keep the KV of finished requests, even for later starts; empty = none"
    ] = ""
    kv_key_file: Annotated[
        str, "file with the secret of the directory, 64 hexadecimal digits; empty = a file `secret` in it"
    ] = ""
    kv_store_size: Annotated[str, ParsedBy(check_size), "the most bytes in the directory, such as 100GiB"] = STORE_SIZE
    kv_store_ttl: Annotated[
        str,
        "how long unused pages are kept, such as 12h or 7d; empty = until others need the space",
    ] = ""
    kv_eviction_policy: Annotated[
        str,
        Choices(EVICTION_POLICIES),
        "pages that are evicted first from memory and the directory: least recently used (lru), first stored "
        "(fifo), least often used (lfu), or furthest from the beginning of their sequence (length)",
    ] = "lru"
    kv_load_failure_policy: Annotated[
        str,
        Choices(LOAD_FAILURE_POLICIES),
        "what happens if KV cannot be loaded: recompute it, or fail the request",
    ] = "recompute"
    decode_only: Annotated[
        bool,
        "replace K and V of prompts by zeros, and compute only each prompt's last token. This measures decoding "
        "without prompts, as the paper does; the answers mean nothing",
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_seconds(self.kv_store_ttl, "--kv-offload ttl=")
        parse_size(self.kv_store_size, "--kv-offload size=")
        if self.kv_offloading_size:
            parse_size(self.kv_offloading_size, "--kv-offloading-size")

    @property
    def backend(self) -> str:
        """The name of the storage in kv.storage.MEDIA; empty: none."""
        if self.kv_store_dir:
            return "layered" if self.kv_offloading_size else "file"
        return "host" if self.kv_offloading_size else "zeros" if self.decode_only else ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all memory workers together; of a layered medium those of the disk."""
        if self.backend == "zeros":
            return UNLIMITED_BYTES
        return parse_size(self.kv_store_size, "--kv-offload size=") if self.kv_store_dir else self.memory_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the hosts' memory, of all memory workers together."""
        return parse_size(self.kv_offloading_size, "--kv-offloading-size") if self.kv_offloading_size else 0
