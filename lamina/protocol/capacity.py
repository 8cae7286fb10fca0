"""The combined KV capacity of memory workers. No torch here, since the driver imports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.config.partition import PARTITIONS, KvShards, Partition, choose_stripe

from .step_plan import BindReply, LayerShape


class Capacity(NamedTuple):
    """The layer groups of all memory workers, each with its blocks on every worker that holds it. A sequence takes the
    same number of blocks on each of these workers, wherever it lies.
    """

    windows: list[int]
    kv_shards: list[KvShards]
    stripe_blocks: int
    single_shard: bool
    sparse: list[bool]
    num_blocks: list[list[int]]  # group -> blocks, by holder
    holders: list[list[int]]  # group -> memory workers
    # Memory worker -> KV shards whose sequences have recurrent states there, None for none; empty: the model has none.
    state_shards: Sequence[KvShards | None] = ()
    state_slots: int = 0  # versions of states that each of these workers can hold


def partition_of(name: str, layers: Sequence[LayerShape], weights: Sequence[float], max_len: int) -> Partition:
    """Return the partition called ``name`` over memory workers with these ``weights``. Raises ValueError."""
    stripe_chunks = choose_stripe(-(-max_len // CHUNK_TOKENS), len(weights))
    return PARTITIONS[name]([s.kv_heads for s in layers], weights, stripe_chunks)


def layers_of_rank(layers: Sequence[LayerShape], rank: int, ranks: int) -> list[LayerShape]:
    """Return the layers as ``rank`` has them: its heads, in order."""
    return [
        msgspec.structs.replace(
            x,
            q_heads=x.q_heads // ranks,
            kv_heads=x.kv_heads // ranks,
            sinks=_part_of(x.sinks, rank, ranks),
            slopes=_part_of(x.slopes, rank, ranks),
        )
        for x in layers
    ]


def _part_of(operand: bytes, rank: int, ranks: int) -> bytes:
    each = len(operand) // ranks
    return operand[rank * each : (rank + 1) * each]


def num_usable_blocks(num_blocks: Sequence[Sequence[int]]) -> list[int]:
    """Return, by group, the blocks that sequences can use: those of the holder with the fewest."""
    return [min(blocks) for blocks in num_blocks]


def combined_capacity(bounds: Sequence[BindReply], number: Callable[[int], int] = int) -> Capacity:
    """Return the capacity of one rank's memory workers together, in their order. ``number``: maps a worker's index in
    this order to its number among all memory workers.
    """
    alone = [
        Capacity(
            b.windows,
            b.kv_shards,
            b.stripe_blocks,
            b.single_shard,
            b.sparse,
            [[n] for n in b.num_blocks],
            [[number(worker)] for _ in b.windows],
            [b.state_shards],
            b.state_slots,
        )
        for worker, b in enumerate(bounds)
    ]
    return capacity_of_all_ranks(alone)


def capacity_of_all_ranks(ranks: Sequence[Capacity]) -> Capacity:
    """Return the capacity of all ranks' memory workers, given each rank's. Ranks hold the same tokens, other heads."""
    groups: dict[tuple[int, KvShards, bool], tuple[list[int], list[int]]] = {}
    for each in ranks:
        sparse = each.sparse or [False] * len(each.windows)
        keys = zip(each.windows, each.kv_shards, sparse, strict=True)
        for key, counts, holders in zip(keys, each.num_blocks, each.holders, strict=True):
            blocks, workers = groups.setdefault(key, ([], []))
            blocks += counts
            workers += holders
    states = [shards for each in zip(*(rank.state_shards for rank in ranks), strict=True) for shards in each]
    return Capacity(
        [window for window, _, _ in groups],
        [lanes for _, lanes, _ in groups],
        ranks[0].stripe_blocks,
        ranks[0].single_shard,
        [sparse for _, _, sparse in groups],
        [blocks for blocks, _ in groups.values()],
        [workers for _, workers in groups.values()],
        states if any(states) else [],
        min((rank.state_slots for rank in ranks if any(rank.state_shards)), default=0),
    )
