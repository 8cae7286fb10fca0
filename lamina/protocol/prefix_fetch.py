"""How prefill workers fetch beginnings of prompts from each other: the addresses, the meetings, the questions. Where
several workers compute a prompt together, workers of one stage fetch from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lamina.config.engine_config import BatchingOptions

from .blocks.block_tables import BlockTables
from .control import Address, ComputeReady
from .kv_placement import FIRST_LOCATION


def prompt_cache_tokens(
    windows: Sequence[int], num_blocks: Sequence[int], block_size: int, longest: int, batching: BatchingOptions
) -> list[int] | None:
    """Of a prefill worker's store of ``num_blocks`` by layer group, those that kept prompts never take: for the prompt
    that is computed, of up to ``longest`` tokens, and for the first chunk of the next, in whose plan others give way.
    None where it has no more than that.
    """
    one = BlockTables(windows, num_blocks, block_size).max_blocks(FIRST_LOCATION, longest, batching.max_rows)
    room = [n + -(-batching.prefill_chunk // block_size) + 1 for n in one]
    return room if all(n > r for n, r in zip(num_blocks, room, strict=True)) else None


def can_cache_prompts(
    windows: Sequence[int], num_blocks: Sequence[int], block_size: int, longest: int, batching: BatchingOptions
) -> bool:
    """Whether such a store keeps prompts, and all layers of them: others may have beginnings from it."""
    return not any(windows) and prompt_cache_tokens(windows, num_blocks, block_size, longest, batching) is not None


def can_fetch_prefixes(prefill: Sequence[ComputeReady], batching: BatchingOptions, groups: int) -> bool:
    """Whether prefill workers can have beginnings of prompts from each other, where prompts are kept at all."""
    each = [(s.windows, s.num_blocks, r.block_size, r.max_model_len) for r in prefill for s in r.prefill_stores]
    return groups > 1 and all(can_cache_prompts(*store, batching) for store in each)


class ConnectPrefillPeers(msgspec.Struct, frozen=True, kw_only=True, tag="meet-prefill"):
    """Driver -> prefill worker, once all of them have answered their Connect: each opens a channel to each other one of
    ``peers``, of which it is number ``own_index``, and to the stages before and behind it, under the same epoch. No
    answer: what is to be computed and fetched comes behind it.
    """

    peers: list[Address] = []  # empty: nobody fetches
    own_index: int = 0
    previous_stage: str = ""  # the name of the stage before it; empty: it is the first
    next_stage: Address | None = None  # None: it is the last


class PrefixRequest(msgspec.Struct, frozen=True, array_like=True):
    """Send K and V of whole blocks of ``sequence``, of ``count`` tokens from position ``first`` on, for a step."""

    sequence: int
    first: int
    count: int
    batch: int
    step: int
