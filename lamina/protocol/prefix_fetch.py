"""Prefix fetch: addresses, connections and requests. If several workers compute a prompt
together, workers of the same stage fetch from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lamina.config.engine_config import BatchingOptions
from lamina.config.partition import KvShards

from .blocks.block_tables import BlockTables
from .control import Address, ComputeReady
from .kv_placement import FIRST_LOCATION, KvLocation, KvPlacement


def prompt_cache_tokens(
    windows: Sequence[int], num_blocks: Sequence[int], block_size: int, longest: int, batching: BatchingOptions
) -> list[int] | None:
    """Return, by layer group, the blocks of a prefill worker's store that cached prompts never take; None if that is
    all. They are for the prompt in progress, of up to ``longest`` tokens, and for the first chunk of the next one,
    whose plan evicts cached prompts. ``num_blocks``: of the store, by layer group.
    """
    one = BlockTables(windows, num_blocks, block_size).max_blocks(FIRST_LOCATION, longest, batching.max_rows)
    room = [n + -(-batching.prefill_chunk // block_size) + 1 for n in one]
    return room if all(n > r for n, r in zip(num_blocks, room, strict=True)) else None


def can_cache_prompts(
    windows: Sequence[int], num_blocks: Sequence[int], block_size: int, longest: int, batching: BatchingOptions
) -> bool:
    """Return whether such a store keeps prompts in all layers, so that other workers may fetch prefixes from it."""
    return not any(windows) and prompt_cache_tokens(windows, num_blocks, block_size, longest, batching) is not None


def can_fetch_prefixes(prefill: Sequence[ComputeReady], batching: BatchingOptions, groups: int) -> bool:
    """Return whether prefill workers can fetch prefixes from each other, given that prompts are cached at all."""
    each = [(s.windows, s.num_blocks, r.block_size, r.max_model_len) for r in prefill for s in r.prefill_stores]
    return groups > 1 and all(can_cache_prompts(*store, batching) for store in each)


class ConnectPrefillPeers(msgspec.Struct, frozen=True, kw_only=True, tag="meet-prefill"):
    """Driver -> prefill worker, once all have replied to Connect: open channels to other prefill workers, and second
    ones to memory workers, under the same epoch.

    The worker is number ``own_index`` of ``peers`` and connects to each other one, and to the stages before and after
    it. There is no reply: work that needs the channels follows on the link.
    """

    peers: list[Address] = []  # empty: no prefix fetch
    own_index: int = 0
    previous_stage: str = ""  # the name of the stage before it; empty: it is the first
    next_stage: Address | None = None  # None: it is the last
    memory: list[Address] = []  # the memory workers, if their KV is fetched; see FetchPrefix


class PrefixRequest(msgspec.Struct, frozen=True, array_like=True):
    """Prefill worker -> prefill worker: a request for K and V of whole blocks, for a step: ``count`` tokens of
    ``sequence`` from ``first`` on.
    """

    sequence: int
    first: int
    count: int
    batch: int
    step: int


def stored_prefix_reader(worker: str) -> str:
    """Return the name by which prefill worker ``worker`` connects to memory workers to fetch stored KV."""
    return f"{worker}/stored"


def owned_blocks(
    placement: KvPlacement, kv_shards: KvShards, location: KvLocation, blocks: range, block_size: int
) -> list[int]:
    """Return which ``blocks`` of a sequence lie in ``kv_shards``. ``placement``: in tokens."""
    return [n for n in blocks if placement.kv_shard_at(location, n * block_size) in kv_shards]
