"""The driver's settings for offload: the storage of each memory worker, the secret and the era of page keys."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import structs

from lamina.config.engine_config import EngineConfig
from lamina.config.offload import OffloadOptions
from lamina.config.option import parse_seconds, size_flag
from lamina.kv.disk_store.store_directory import SECRET, StoreDirectory, begin_era, read_secret, store_era, store_secret
from lamina.kv.page_keys import ERA_BYTES, SECRET_BYTES
from lamina.kv.pages import PAGE
from lamina.kv.storage import STORES_NOTHING
from lamina.protocol.control import ComputeReady
from lamina.protocol.offload_messages import OffloadConfig, OffloadFacts, StoredPages

log = logging.getLogger(__name__)


class KvStorage:
    """The storage of one engine. ``server``: its unique name. Raises ValueError for an unusable directory."""

    def __init__(self, config: EngineConfig, server: str) -> None:
        self._options, self._server, self._chunk = config.offload, server, config.batching.prefill_chunk
        self._ranks = config.topology.tensor_parallel_size
        # Memory workers after these are on loan: they store nothing, and get no secret.
        self._homes = config.topology.memory_workers if config.topology.may_borrow else math.inf
        self._secret, self._era = _keys_of(config.offload)
        # Each host has a directory.
        self.is_per_host = bool(config.offload.kv_store_dir and config.launch.may_span_hosts)

    @property
    def is_enabled(self) -> bool:
        """Return whether offload is on."""
        return bool(self._options.backend)

    def config_for(self, index: int, workers: int, identity: bytes) -> OffloadConfig | None:
        """Return the storage of memory worker ``index`` of ``workers``; None without offload. Those after ``workers``
        keep the parity of what others load, and store nothing, as do workers on loan.
        """
        if not self.is_enabled:
            return None
        rank, workers = index % self._ranks, int(min(workers, self._homes))
        if index >= workers:
            return OffloadConfig(
                backend=STORES_NOTHING,
                total_bytes=0,
                workers=workers,
                policy=self._options.kv_eviction_policy,
                identity=identity,
                rank=rank,
                ranks=self._ranks,
                keeps=False,
            )
        return OffloadConfig(
            backend=self._options.backend,
            total_bytes=self._options.total_bytes,
            workers=workers,
            policy=self._options.kv_eviction_policy,
            identity=identity,
            rank=rank,
            ranks=self._ranks,
            chunk_tokens=self._chunk,
            ttl_s=parse_seconds(self._options.kv_store_ttl, "--kv-offload ttl="),
            directory=self._options.kv_store_dir,
            secret=self._secret,
            server=self._server,
            memory_bytes=self._options.memory_bytes,
        )

    def begin_era(self) -> bytes:
        """Make all present pages unreachable for this engine and later ones. Returns the era, a part of later keys."""
        self._era = secrets.token_bytes(ERA_BYTES)
        if self._options.kv_store_dir:
            try:
                with closing(StoreDirectory(self._options.kv_store_dir)) as folder:
                    self._era = begin_era(folder)
            except (OSError, ValueError) as error:
                log.error("the next start will find the pages from before the reset: %s", error)
        return self._era

    def complete_facts(self, ready: ComputeReady, identity: bytes, replies: Sequence[StoredPages]) -> ComputeReady:
        """Return ``ready`` with the facts of offload. ``replies``: of the memory workers, in their order."""
        if not self.is_enabled:
            return ready
        each_keys, each_states = [each.keys for each in replies], [each.states for each in replies]
        tier = OffloadFacts(
            secret=self._secret, identity=identity, page_size=PAGE, pages=_left(replies, each_keys),
            backend=self._options.backend, capacities=[each.capacity for each in replies], era=self._era,
            is_complete=self._options.decode_only, states=_left(replies, each_states),
        )  # fmt: skip
        return structs.replace(ready, storage=tier)


def _left(replies: Sequence[StoredPages], listed: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """Return what each worker has listed, without what another worker has evicted since."""
    gone = {key for each in replies for key in each.evicted}
    return [[key for key in keys if key not in gone] for keys in listed]


def _keys_of(options: OffloadOptions) -> tuple[bytes, bytes]:
    """Return the secret and the era of the store. A later start reads the same ones from a directory; without a
    directory they are new, so pages in host memory are never found again.
    """
    if not options.kv_store_dir:
        return secrets.token_bytes(SECRET_BYTES), b""
    with closing(StoreDirectory(options.kv_store_dir)) as folder:
        if (room := folder.room_bytes()) < options.total_bytes:
            log.warning(
                "--kv-offload size=%s is more than the %s that the disk of dir=%s has for it: pages go earlier",
                options.kv_store_size,
                size_flag(room),
                options.kv_store_dir,
            )
        return store_secret(folder, options.kv_key_file), store_era(folder)


def check_store(options: OffloadOptions) -> None:
    """Raise ValueError if a start would refuse the store's directory or its secret. Creates neither."""
    if not options.kv_store_dir:
        return
    path = Path(options.kv_store_dir).expanduser().absolute()
    if os.path.lexists(path):
        with closing(StoreDirectory(options.kv_store_dir, make=False)) as folder:
            if options.kv_key_file or folder.read(SECRET) is not None:
                store_secret(folder, options.kv_key_file, make=False)
            store_era(folder)
        return
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"--kv-offload dir={options.kv_store_dir}: it cannot be made in {path.parent}: name one that you may write"
        )
    if options.kv_key_file:
        read_secret(options.kv_key_file, "--kv-offload key=")
