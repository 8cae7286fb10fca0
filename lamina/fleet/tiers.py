"""Where memory workers keep pages beside their pools, as the driver tells them; and transfers that are under way."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from msgspec import structs

from lamina.kv.keys import ERA_BYTES, SECRET_BYTES
from lamina.kv.pages import PAGE
from lamina.kv.store.folder import SECRET, StoreFolder, begin_era, read_secret, store_era, store_secret
from lamina.protocol.control import ComputeReady, RunRound
from lamina.protocol.options.declare import parse_seconds
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.options.tier import TierOptions
from lamina.protocol.plan import Export, Import, MoveStripes
from lamina.protocol.sparse_ops import Score
from lamina.protocol.tiers import StoredPages, TierFacts, TierPlace

log = logging.getLogger(__name__)


class TierKeeper:
    """The tier of one engine. ``server``: its name, which no other engine has. Raises ValueError for a directory that
    cannot be used.
    """

    def __init__(self, config: EngineConfig, server: str) -> None:
        self._options, self._server, self._chunk = config.tier, server, config.batching.prefill_chunk
        self._ranks = config.topology.tensor_parallel_size
        self._secret, self._era = _keys_of(config.tier)
        self.of_hosts = bool(config.tier.kv_store_dir and config.launching.elsewhere)  # each has a directory

    @property
    def wanted(self) -> bool:
        """Whether there is one."""
        return bool(self._options.medium)

    def place(self, index: int, workers: int, identity: bytes) -> TierPlace | None:
        """Of memory worker ``index`` of so many; None where nothing is kept."""
        if not self.wanted:
            return None
        return TierPlace(
            medium=self._options.medium,
            size=self._options.size,
            workers=workers,
            policy=self._options.kv_eviction_policy,
            identity=identity,
            rank=index % self._ranks,
            ranks=self._ranks,
            chunk=self._chunk,
            ttl_s=parse_seconds(self._options.kv_store_ttl, "--kv-store-ttl"),
            directory=self._options.kv_store_dir,
            secret=self._secret,
            server=self._server,
            memory=self._options.memory,
        )

    def begin_era(self) -> bytes:
        """Have no engine find the present pages any more, this one or a later one. Returns the era, which is a part of
        later keys.
        """
        self._era = secrets.token_bytes(ERA_BYTES)
        if self._options.kv_store_dir:
            try:
                with closing(StoreFolder(self._options.kv_store_dir)) as folder:
                    self._era = begin_era(folder)
            except (OSError, ValueError) as error:
                log.error("the next start will find the pages from before the reset: %s", error)
        return self._era

    def completed(self, ready: ComputeReady, identity: bytes, said: Sequence[StoredPages]) -> ComputeReady:
        """With what memory workers have ``said``, in their order."""
        if not self.wanted:
            return ready
        tier = TierFacts(
            secret=self._secret, identity=identity, page=PAGE, pages=_left(said),
            medium=self._options.medium, rooms=[each.room for each in said], era=self._era,
            complete=self._options.decode_only,
        )  # fmt: skip
        return structs.replace(ready, tier=tier)


def _left(said: Sequence[StoredPages]) -> list[list[bytes]]:
    """What each has told of, but for what another one has given up since."""
    gone = {key for each in said for key in each.gone}
    return [[key for key in each.keys if key not in gone] for each in said]


def _keys_of(options: TierOptions) -> tuple[bytes, bytes]:
    """Secret and era of the store, so that a later start finds its pages; nobody finds those of the host's memory
    again.
    """
    if not options.kv_store_dir:
        return secrets.token_bytes(SECRET_BYTES), b""
    with closing(StoreFolder(options.kv_store_dir)) as folder:
        return store_secret(folder, options.kv_key_file), store_era(folder)


def check_store(options: TierOptions) -> None:
    """Raises ValueError where a start would refuse the directory of the store, or its secret; makes neither."""
    if not options.kv_store_dir:
        return
    path = Path(options.kv_store_dir).expanduser().absolute()
    if os.path.lexists(path):
        with closing(StoreFolder(options.kv_store_dir, make=False)) as folder:
            if options.kv_key_file or folder.read(SECRET) is not None:
                store_secret(folder, options.kv_key_file, make=False)
            store_era(folder)
        return
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"--kv-store-dir {options.kv_store_dir}: it cannot be made in {path.parent}: name one that you may write"
        )
    if options.kv_key_file:
        read_secret(options.kv_key_file, "--kv-key-file")


def num_reports(new: RunRound) -> int:
    """Of each memory worker, on what a round begins: transfers, scores, and copies of stripes."""
    return sum(isinstance(op, Export | Import | Score | MoveStripes) for step in new.steps for op in step.plan.ops)
