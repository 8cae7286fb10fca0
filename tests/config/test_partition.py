"""Partitions: every KV head of every sequence has one owner, and the work is spread by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.config.partition import (
    MAX_KV_SHARDS,
    MAX_SHARE_ERROR,
    PARTITIONS,
    KvShards,
    Partition,
    Piece,
    across_ranks,
    by_head,
    by_request,
)

WEIGHTS = st.lists(st.floats(0.5, 4.0), min_size=1, max_size=6)


def cells(partition: Partition, layer: int) -> Counter[int]:
    """(KV head, KV shard) pairs of every worker; each pair must have one owner."""
    owners = Counter[tuple[int, int]]()
    work = Counter[int]()
    for worker in range(partition.num_workers):
        for piece in partition.pieces(layer, worker):
            for head in range(piece.head_start, piece.head_stop):
                for lane in range(partition.num_kv_shards):
                    owners[head, lane] += lane in piece.kv_shards
                    work[worker] += lane in piece.kv_shards
    assert set(owners.values()) == {1}
    return work


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PARTITIONS)), st.lists(st.integers(1, 12), min_size=1, max_size=3), WEIGHTS)
def test_every_head_of_every_sequence_has_one_owner_and_weights_hold(
    name: str, kv_heads: list[int], weights: list[float]
) -> None:
    partition = PARTITIONS[name](kv_heads, weights)
    partition.check(kv_heads)
    for layer, heads in enumerate(kv_heads):
        work, total = cells(partition, layer), heads * partition.num_kv_shards
        unit = 1 if name == "head" else heads  # heads that stay together
        for worker, weight in enumerate(weights):
            exact = total * weight / sum(weights)
            assert abs(work[worker] - exact) <= max(MAX_SHARE_ERROR * exact, unit), (partition, worker)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_equal_workers_do_the_same(heads: int, workers: int) -> None:
    for make in (by_head, by_request):
        partition = make([heads, heads], [1.0] * workers)
        assert len(set(cells(partition, 1).values())) == 1
        assert len(partition.tables) == 1


def test_heads_that_divide_stay_whole() -> None:
    partition = by_head([4, 8], [1.0, 1.0])
    assert partition.num_kv_shards == 1
    assert [partition.pieces(layer, 1) for layer in (0, 1)] == [[Piece(2, 4, KvShards())], [Piece(4, 8, KvShards())]]


def test_a_head_on_the_border_is_shared_by_lanes() -> None:
    partition = by_head([3], [1.0, 1.0])
    assert partition.pieces(0, 0) == [Piece(0, 1, KvShards()), Piece(1, 2, KvShards((True, False)))]
    assert partition.pieces(0, 1) == [Piece(1, 2, KvShards((False, True))), Piece(2, 3, KvShards())]
    assert 1 in partition.pieces(0, 1)[0].kv_shards
    assert 0 not in partition.pieces(0, 1)[0].kv_shards
    assert all(lane in partition.pieces(0, 1)[1].kv_shards for lane in range(2))


def test_lanes_of_one_worker_lie_apart() -> None:
    """The first sequences to come, which take the KV shards in order, are spread by weight as well."""
    (share,) = by_request([4], [3.0, 1.0]).tables[0]
    assert sorted(share.owners) == [0, 0, 0, 1]
    assert share.owners not in ([0, 0, 0, 1], [1, 0, 0, 0])


@pytest.mark.parametrize(("make", "heads", "weights"), [(by_head, 1, [1.0, 1000.0]), (by_request, 4, [1.0, 0.001])])
def test_a_worker_with_nothing_to_do_is_an_error(make: object, heads: int, weights: list[float]) -> None:
    assert len(weights) < MAX_KV_SHARDS
    with pytest.raises(ValueError, match=r"memory worker [01] of 2 would get nothing of . KV heads: use fewer"):
        make([heads], weights)  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(PARTITIONS)), st.lists(st.integers(1, 6), min_size=1, max_size=3), WEIGHTS, st.integers(1, 4)
)
def test_ranks_have_their_own_workers_and_heads(
    name: str, kv_heads: list[int], weights: list[float], ranks: int
) -> None:
    """``kv_heads``: of a rank."""
    own = PARTITIONS[name](kv_heads, weights)
    whole = across_ranks(own, ranks)
    whole.check([heads * ranks for heads in kv_heads])
    for layer, heads in enumerate(kv_heads):
        for worker in range(own.num_workers):
            for rank in range(ranks):
                assert whole.pieces(layer, worker * ranks + rank) == [
                    piece._replace(head_start=piece.head_start + rank * heads, head_stop=piece.head_stop + rank * heads)
                    for piece in own.pieces(layer, worker)
                ]
