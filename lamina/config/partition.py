"""The partition of attention over memory workers. It is data, and gives every message its layout.

A layer's KV heads are split into ranges. One memory worker keeps a range for all tokens, or several deal the tokens out
among them: the *KV shard* of a token tells whose it is. A sequence begins in one KV shard and goes on to the next one
after each *stripe*, or stays in it, but for stripes on loan (protocol.kv_placement). So any number of memory workers,
of any weights, can share any number of KV heads, and the scheduler balances with the KV shards in which sequences
begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import msgspec

MAX_KV_SHARDS = 64
MAX_STRIPE = 1 << 20
STRIPES_PER_WORKER = (
    4  # of a sequence of full length on one memory worker, about: each is a partial result that travels
)
SPILL_STRIPES_FACTOR = (
    8  # stripes on loan than those that are dealt out: 32 of a sequence of full length on one memory worker
)
MAX_SHARE_ERROR = 0.01  # of a memory worker's share, for which more KV shards do not pay


class HeadShare(msgspec.Struct, frozen=True, array_like=True):
    """KV heads ``head_start .. head_stop`` of a layer, and who keeps them."""

    head_start: int
    head_stop: int
    owners: list[int]  # KV shard -> memory worker; a single one keeps all KV shards


class KvShards(msgspec.Struct, frozen=True, array_like=True):
    """Some of the KV shards, by number; a single entry stands for all of them."""

    pattern: tuple[bool, ...] = (True,)

    def __contains__(self, kv_shard: int) -> bool:
        return self.pattern[kv_shard if len(self.pattern) > 1 else 0]

    @property
    def has_all(self) -> bool:
        return all(self.pattern)

    @property
    def portion(self) -> float:
        """The share of all KV shards that these are."""
        return sum(self.pattern) / len(self.pattern)


class Piece(NamedTuple):
    """One memory worker's piece of a layer: KV heads ``head_start .. head_stop`` of the tokens in ``kv_shards``."""

    head_start: int
    head_stop: int
    kv_shards: KvShards

    @property
    def num_kv_heads(self) -> int:
        return self.head_stop - self.head_start


class Partition(msgspec.Struct, frozen=True):
    """The shares of every layer. Layers with equal shares point at one table entry."""

    num_workers: int
    num_kv_shards: int
    stripe_chunks: int  # chunks of ops.attention.merge, a power of two; 0 = a sequence stays in one KV shard
    tables: list[list[HeadShare]]  # each in the order of its heads, which it covers exactly once
    layer_table: list[int]  # layer -> index into tables
    single_shard: bool = False  # a sequence stays in one KV shard, but for stripes on loan

    def pieces(self, layer: int, worker: int) -> list[Piece]:
        """The pieces of ``layer`` that ``worker`` has, in the order of heads; there may be none."""
        return [
            Piece(s.head_start, s.head_stop, KvShards(tuple(owner == worker for owner in s.owners)))
            for s in self.tables[self.layer_table[layer]]
            if worker in s.owners
        ]

    def check(self, kv_heads: Sequence[int]) -> None:
        """Raises ValueError unless this is a partition of layers with ``kv_heads[i]`` KV heads."""
        if len(kv_heads) != len(self.layer_table):
            raise ValueError(f"a partition of {len(self.layer_table)} layers for {len(kv_heads)}")
        if not 1 <= self.num_kv_shards <= MAX_KV_SHARDS:
            raise ValueError(f"a partition of {self.num_kv_shards} KV shards")
        if self.stripe_chunks and not (0 < self.stripe_chunks <= MAX_STRIPE and self.stripe_chunks.bit_count() == 1):
            raise ValueError(f"a partition in stripes of {self.stripe_chunks} chunks")
        if self.single_shard and not self.stripe_chunks:
            raise ValueError("a partition that lends stripes, and has none")
        for heads, index in zip(kv_heads, self.layer_table, strict=True):
            if not 0 <= index < len(self.tables):
                raise ValueError(f"a partition without table {index}")
            stops = [0]
            for share in self.tables[index]:
                if share.head_start != stops[-1] or share.head_stop <= share.head_start:
                    raise ValueError(f"heads {share.head_start}..{share.head_stop} of a partition follow {stops[-1]}")
                if len(share.owners) not in (1, self.num_kv_shards):
                    raise ValueError(f"{len(share.owners)} owners for {self.num_kv_shards} KV shards")
                if not all(0 <= owner < self.num_workers for owner in share.owners):
                    raise ValueError(f"a partition over {self.num_workers} memory workers names {share.owners}")
                stops.append(share.head_stop)
            if stops[-1] != heads:
                raise ValueError(f"a partition of {stops[-1]} KV heads for a layer of {heads}")


def by_head(kv_heads: Sequence[int], weights: Sequence[float], stripe_chunks: int = 1) -> Partition:
    """Whole heads, in order (arXiv 2405.01814 section 5). Two workers share a head on their border by tokens.

    ``kv_heads[i]``: layer i's number of KV heads. ``weights[w]``: memory worker w's part of the work, in any unit.
    ``stripe_chunks``: chunks of a sequence that stay together if tokens are shared. Raises ValueError if a worker would
    get nothing.
    """
    return _partition(kv_heads, weights, lambda heads: [1] * heads, stripe_chunks)


def by_token(kv_heads: Sequence[int], weights: Sequence[float], stripe_chunks: int = 1) -> Partition:
    """Every sequence dealt out over all memory workers, in stripes. Arguments and errors as of ``by_head``."""
    return _partition(kv_heads, weights, lambda heads: [heads], stripe_chunks)


def by_request(kv_heads: Sequence[int], weights: Sequence[float], stripe_chunks: int = 1) -> Partition:
    """Every sequence whole on one memory worker. Arguments and errors as of ``by_head``; there are no stripes."""
    return _partition(kv_heads, weights, lambda heads: [heads], 0)


def by_spill(kv_heads: Sequence[int], weights: Sequence[float], stripe_chunks: int = 1) -> Partition:
    """Every sequence whole on one memory worker, except stripes that do not fit there (arXiv 2401.02669).

    Stripes are finer than those of ``by_token``, so that little of a worker stays unused. Arguments and errors as of
    ``by_head``.
    """
    partition = _partition(kv_heads, weights, lambda heads: [heads], max(1, stripe_chunks // SPILL_STRIPES_FACTOR))
    return msgspec.structs.replace(partition, single_shard=partition.stripe_chunks > 0)


def across_ranks(partition: Partition, ranks: int) -> Partition:
    """Return the partition of whole layers, of which each of ``ranks`` ranks has as many KV heads, in order.

    ``partition``: of a rank's heads over its own memory workers. Its worker w is number w * ranks + r for rank r.
    """
    tables = list[list[HeadShare]]()
    for table in partition.tables:
        heads = table[-1].head_stop
        tables.append(
            [
                HeadShare(r * heads + x.head_start, r * heads + x.head_stop, [w * ranks + r for w in x.owners])
                for r in range(ranks)
                for x in table
            ]
        )
    return msgspec.structs.replace(partition, num_workers=partition.num_workers * ranks, tables=tables)


def state_shares(
    name: str, partition: Partition, heads: int, weights: Sequence[float], unit: int = 1
) -> list[HeadShare]:
    """The owners of the states of a recurrent layer: of runs of its heads with ``head``, of sequences with ``request``.

    ``partition``: that of KV, called ``name``, over memory workers of these ``weights``. ``unit``: heads that stay
    together, if each worker can get some then. Raises ValueError for one that divides the tokens of a sequence.
    """
    if len(weights) == 1:
        return [HeadShare(0, heads, [0])]
    if name == "request":
        return [HeadShare(0, heads, partition.tables[0][0].owners)]
    if name != "head":
        raise ValueError(f"--partition {name} divides sequences by tokens, and a recurrent state has all of them")
    cuts = [min(unit * cut, heads) for cut in _cuts(-(-heads // unit), weights)]
    if any(low == high for low, high in pairwise(cuts)):
        cuts = _cuts(heads, weights)
    return [HeadShare(low, high, [worker]) for worker, (low, high) in enumerate(pairwise(cuts)) if low < high]


def choose_stripe(max_chunks: int, num_workers: int) -> int:
    """The stripe for sequences of up to ``max_chunks`` chunks: a power of two."""
    return 1 << max(0, -(-max_chunks // (STRIPES_PER_WORKER * num_workers)) - 1).bit_length()


Make = Callable[[Sequence[int], Sequence[float], int], Partition]
PARTITIONS: dict[str, Make] = {  # values of --partition
    "head": by_head, "token": by_token, "request": by_request, "spill": by_spill
}  # fmt: skip


def _partition(
    kv_heads: Sequence[int], weights: Sequence[float], split: Callable[[int], list[int]], stripe_chunks: int
) -> Partition:
    """``split``: KV heads -> the sizes of the units of heads that stay together."""
    distinct = list(dict.fromkeys(kv_heads))
    units = [len(split(heads)) for heads in distinct]
    lanes = next((n for n in range(1, MAX_KV_SHARDS) if all(_fits(u * n, weights) for u in units)), MAX_KV_SHARDS)
    tables = [_table(split(heads), lanes, weights) for heads in distinct]
    layers = [distinct.index(heads) for heads in kv_heads]
    return Partition(len(weights), lanes, stripe_chunks if lanes > 1 else 0, tables, layers)


def _table(sizes: list[int], lanes: int, weights: Sequence[float]) -> list[HeadShare]:
    """The shares of a layer whose units have ``sizes`` heads: unit u is worth ``lanes`` cells, cut in order."""
    cuts, stops = _cuts(len(sizes) * lanes, weights), [0, *accumulate(sizes)]
    for worker, (low, high) in enumerate(pairwise(cuts)):
        if low == high:
            raise ValueError(
                f"memory worker {worker} of {len(weights)} would get nothing of {stops[-1]} KV heads: "
                f"use fewer --memory-workers, or weights that differ less"
            )
    owners = [_interleave(cuts, u * lanes, (u + 1) * lanes) for u in range(len(sizes))]
    shares, at = list[HeadShare](), 0
    for same, group in groupby(owners):
        first, at = at, at + len(list(group))
        shares.append(HeadShare(stops[first], stops[at], same))
    return shares


def _cuts(cells: int, weights: Sequence[float]) -> list[int]:
    """Return the beginning of each worker's cells, and the end of all."""
    total = sum(weights)
    return [0, *(round(cells * upto / total) for upto in accumulate(weights))]


def _fits(cells: int, weights: Sequence[float]) -> bool:
    """Return True if cells that cannot be divided come close enough to the weights."""
    exact = [cells * w / sum(weights) for w in weights]
    got = [high - low for low, high in pairwise(_cuts(cells, weights))]
    return all(abs(g - e) <= MAX_SHARE_ERROR * e for g, e in zip(got, exact, strict=True))


def _interleave(cuts: list[int], low: int, high: int) -> list[int]:
    """The owner of every KV shard of the unit of cells ``low .. high``; each worker's KV shards far from each other."""

    def places() -> Iterator[tuple[float, int]]:
        for worker, (begin, end) in enumerate(pairwise(cuts)):
            count = min(end, high) - max(begin, low)
            yield from (((i + 0.5) / count, worker) for i in range(count))

    owners = [worker for _, worker in sorted(places())]
    return owners[:1] if len(set(owners)) == 1 else owners
