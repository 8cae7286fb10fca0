"""Numbers of KV blocks that sequences need, and that memory workers have. No tensors, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.config.option import size_flag
from lamina.config.partition import KvShards
from lamina.protocol.kv_placement import KvLocation, KvPlacement, ShardCounter

from .extents import max_blocks_of_sequence


def split_memory(
    kv_bytes: int,
    block_bytes: Sequence[int],
    windows: Sequence[int],
    kv_shards: Sequence[KvShards],
    *,
    stripe_blocks: int = 0,
    single_shard: bool = False,
    block_size: int,
    max_rows: int,
    max_len: int,
    max_kept_tokens: Sequence[int] = (),
) -> list[int]:
    """Return the blocks of every group that fit into ``kv_bytes``; ``block_bytes[g]``: size of a block in all layers of
    group g.

    A group's store has one block more, the null block, which also counts against ``kv_bytes``. Every group can hold one
    sequence of ``max_len`` tokens; where other workers lend (``single_shard``), one stripe of it. The rest is divided
    for sequences of a quarter of that length, spread evenly over the KV shards. With longer ones the groups without a
    window run out first, with shorter ones the others. ``max_kept_tokens[g]``: tokens that a sequence has in group g
    once blocks were dropped, 0: all. If such groups exist, the rest is divided for sequences of full length, since
    groups that drop blocks are for long ones. Each of these groups then has space for one prompt in progress. Raises
    ValueError if ``kv_bytes`` cannot hold one sequence.
    """

    placement = KvPlacement(num_kv_shards(kv_shards), 0 if single_shard else stripe_blocks)
    places = [KvLocation(lane) for lane in range(placement.num_kv_shards)]

    def most(length: int, limit: int) -> list[int]:
        whole = -(-length // block_size)
        kept = [
            min(limit, max(ShardCounter(x, placement).num_owned(place, whole) for place in places)) for x in kv_shards
        ]
        return [
            min(n, max_blocks_of_sequence(length, w, block_size, max_rows)) for n, w in zip(kept, windows, strict=True)
        ]

    everything = -(-max_len // block_size)
    counts = most(max_len, stripe_blocks if single_shard else everything)
    need = sum((n + 1) * b for n, b in zip(counts, block_bytes, strict=True))
    if need > kv_bytes:
        raise ValueError(
            f"{size_flag(kv_bytes)} of KV memory cannot hold one sequence of {max_len} tokens, which needs "
            f"{size_flag(need, least=True)} on each memory worker: raise --kv-cache-memory-bytes or lower "
            "--max-model-len"
        )
    kept = max_kept_tokens if any(max_kept_tokens) else [0] * len(kv_shards)
    usual, dealt = most(max_len if any(kept) else -(-max_len // 4), everything), stripe_blocks > 0 and not single_shard
    usual = [min(n, -(-k // block_size)) if k else n for n, k in zip(usual, kept, strict=True)]
    typical = [n * (1.0 if dealt else x.portion) for n, x in zip(usual, kv_shards, strict=True)]
    more = (kv_bytes - need) / sum(n * b for n, b in zip(typical, block_bytes, strict=True))
    return [n + int(t * more) for n, t in zip(counts, typical, strict=True)]


def num_kv_shards(kv_shards: Iterable[KvShards]) -> int:
    """Return the number of KV shards that the patterns of some pieces show. Raises ValueError if they disagree."""
    counts = {len(x.pattern) for x in kv_shards} - {1} or {1}
    if len(counts) > 1:
        raise ValueError(f"numbers of KV shards disagree: {' and '.join(map(str, sorted(counts)))}")
    return counts.pop()
