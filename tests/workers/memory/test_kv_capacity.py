"""The memory that is set aside at the start is enough: message slots for every step, KV memory by weight."""

from __future__ import annotations

import pytest
import torch
from memory_peer import bind, shape

from lamina.config.partition import PARTITIONS
from lamina.kv.stored_format import stored_dtype
from lamina.netstack import Geometry
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.protocol.capacity import capacity_of_all_ranks, combined_capacity, num_usable_blocks
from lamina.protocol.codec import row_layout
from lamina.protocol.kv_placement import KvLocation, KvPlacement, StripeRun
from lamina.protocol.step_plan import Free, LayerShape, New, RowRange, StepPlan
from lamina.workers.compute import kv_capacity
from lamina.workers.compute.kv_capacity import (
    attention_bytes,
    channel_bytes,
    choose_kv_bytes,
    inbox_geometries,
    prefill_inbox_geometries,
    split_blocks,
    store_bytes,
)
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.kv_store import DTYPES, KvStore

LAYERS = {
    "few": [shape(8, 4)],
    "some": [shape(16, 8)],
    "window": [shape(9, 3, window=200)],
    "one": [shape(4, 1, 16, 32)],
}


@pytest.mark.long(but=["float32-weights0-head-few", "float32-weights0-head-window"])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0], [1.0] * 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_hold_every_message(
    partition: str, weights: list[float], dtype: str, layers: list[LayerShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps full of rows, at the end of the longest sequences."""
    monkeypatch.setattr(kv_capacity, "LEAST_SLOT_BYTES", 1)
    max_rows, max_len = 48, 1024
    binds = [
        bind(layers, weights, w, partition, dtype=dtype, max_rows=max_rows, max_model_len=max_len, kv_bytes=8 << 20)
        for w in range(len(weights))
    ]
    itemsize = 4 if dtype == "float32" else 2
    outbound, inbound = inbox_geometries(layers, binds[0].partition, itemsize, max_rows=max_rows, max_len=max_len)
    granted, _ = prefill_inbox_geometries(layers, binds[0].partition, itemsize, max_rows=max_rows)
    most = [0, 0]
    lent = tuple(StripeRun(n, n + 1, 0) for n in range(1, 8, 2)) if binds[0].partition.single_shard else ()
    for each in binds:
        store = KvStore(each, torch.device("cpu"))
        step = 0
        for sequence in range(2):
            for first in range(0, max_len, max_rows):
                rows = [RowRange(sequence, first, min(max_rows, max_len - first), KvLocation(1 if lent else 0, lent))]
                plan = StepPlan(step=step, ops=[New(sequence)] if not first else [], rows=rows)
                store.apply_plan(plan)
                step += 1
                for x in map(AttentionStep(store, plan).messages, range(len(layers))):
                    assert max(x.q_bytes, x.kv_bytes) <= outbound.slot_bytes
                    assert x.o_bytes <= inbound.slot_bytes
                    assert x.kv_bytes <= granted.slot_bytes
                    most = [max(most[0], x.q_bytes, x.kv_bytes), max(most[1], x.o_bytes)]
    assert most[0] > 0.3 * outbound.slot_bytes, "and they are not far too large"
    assert most[1] > 0.2 * inbound.slot_bytes


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("max_len", [1, 127, 1024])
def test_a_prefill_worker_holds_one_sequence(layers: list[LayerShape], max_len: int) -> None:
    kv_bytes = store_bytes(layers, torch.float32, max_len, 16)
    tables = KvStore(bind(layers, kv_bytes=kv_bytes, max_rows=64, max_model_len=max_len), torch.device("cpu")).tables
    for step, first in enumerate(range(0, max_len, 64)):
        rows = [RowRange(1, first, min(64, max_len - first))]
        tables.apply(StepPlan(step=step, ops=[New(1)] if not step else [], rows=rows))
    tables.apply(StepPlan(step=99, ops=[Free(1), New(2)], rows=[RowRange(2, 0, min(64, max_len))]))


def test_messages_beyond_any_slot_name_the_flags() -> None:
    layers, partition = [shape(512, 512, 256, 256)], PARTITIONS["head"]([512], [1.0], 1)
    with pytest.raises(ValueError, match=r"100000 rows .*--prefill-chunk"):
        inbox_geometries(layers, partition, 4, max_rows=100_000, max_len=8192)


def test_kv_memory_follows_the_weights() -> None:
    """So that one worker's is not full long before the other's."""
    partition = PARTITIONS["head"]([8], [0.75, 0.25], 1)
    sizes = {"max_len": 1 << 17, "max_num_seqs": 64, "block_size": 32, "free": 1 << 30}
    found = [choose_kv_bytes([shape(8, 8)], partition, w, torch.bfloat16, **sizes) for w in (0, 1)]
    assert sum(found) == pytest.approx(sizes["free"] / 4, rel=0.01)
    assert found[0] / found[1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2), ("float32", 4)])
def test_stored_numbers_of_8_bits_give_so_many_times_the_tokens(name: str, dtype: str, most: int) -> None:
    """Less what the scales take: 8 bytes of a token's 264 in a head of 128."""
    layers = [shape(16, 8, 128, 128)] * 2
    for partition in ([1.0], [1.0, 1.0]):
        blocks = [
            KvStore(
                bind(layers, partition, dtype=dtype, kv_bytes=8 << 20, kv_cache_dtype=kv, max_model_len=256),
                torch.device("cpu"),
            ).bind_reply.num_blocks[0]
            for kv in ("auto", name)
        ]
        assert 0.95 * most < blocks[1] / blocks[0] <= most
    sizes = {"max_len": 4096, "max_num_seqs": 8, "block_size": 32, "free": 1 << 40}
    split, wire = PARTITIONS["head"]([8, 8], [1.0], 1), DTYPES[dtype]
    chosen = [choose_kv_bytes(layers, split, 0, stored_dtype(kv, wire), **sizes) for kv in ("auto", name)]
    assert chosen[0] / chosen[1] == pytest.approx(most * 256 / 264, rel=1e-3)


def test_blocks_of_groups_that_several_have_are_counted_by_worker() -> None:
    partition = PARTITIONS["head"]([3], [1.0, 1.0], 1)
    bounds = [
        KvStore(bind([shape(6, 3)], [1.0, 1.0], w, kv_bytes=(4 + w) << 20), torch.device("cpu")).bind_reply
        for w in (0, 1)
    ]
    found = combined_capacity(bounds)
    whole = [x.has_all for x in found.kv_shards].index(True)
    assert sorted(found.holders) == [[0], [0, 1], [1]]
    assert found.holders[whole] == [0, 1]
    assert found.num_blocks[whole] == [b.num_blocks[b.kv_shards.index(found.kv_shards[whole])] for b in bounds]
    assert found.num_blocks[whole][0] < found.num_blocks[whole][1]
    assert num_usable_blocks(found.num_blocks)[whole] == found.num_blocks[whole][0]
    assert capacity_of_all_ranks([found, combined_capacity(bounds, lambda worker: worker + 2)]).holders[whole] == [
        0,
        1,
        2,
        3,
    ]
    assert partition.num_kv_shards == 2


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [2.0, 1.0]])
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_blocks_are_counted_as_a_store_has_them(
    partition: str, weights: list[float], stored: str, layers: list[LayerShape]
) -> None:
    for worker in range(len(weights)):
        kv_bytes = 5_000_000 + 1000 * worker
        each = bind(layers, weights, worker, partition, kv_bytes=kv_bytes, kv_cache_dtype=stored)
        store = KvStore(each, torch.device("cpu"))
        have = sum(
            x.nbytes
            for layer in store.layers
            for piece in layer
            for x in (piece.kv.k, piece.kv.v, *(piece.kv.scales or ()))
        )
        counted = split_blocks(
            layers,
            each.partition,
            worker,
            store.kv_dtype,
            kv_bytes,
            block_size=each.kv.block_size,
            max_rows=each.max_rows,
            max_len=each.max_model_len,
            sparsity=each.kv,
        ).nbytes
        assert counted == have
        assert 0.9 * kv_bytes < counted <= kv_bytes


@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_bounds_of_blocks_that_queries_select_are_counted_with_them(stored: str) -> None:
    fields = {"kv_sparsity": "select", "kv_budget": 128, "kv_cache_dtype": stored, "kv_bytes": 3_000_000}
    each = bind([shape(8, 4), shape(8, 4), shape(8, 4, window=64)], **fields)
    store = KvStore(each, torch.device("cpu"))
    assert store.selects_blocks == [False, True, False], "the first layer is full, and the last one has a window"
    kept = [piece.kv for layer in store.layers for piece in layer]
    assert [kv.bounds is not None for kv in kept] == store.selects_blocks
    have = sum(x.nbytes for kv in kept for x in (*kv.tensors, *([] if kv.bounds is None else [kv.bounds])))
    options = {"block_size": 16, "max_rows": each.max_rows, "max_len": each.max_model_len, "sparsity": each.kv}
    counted = split_blocks(each.layers, each.partition, 0, store.kv_dtype, each.kv_bytes, **options)
    assert 0.9 * each.kv_bytes < counted.nbytes == have <= each.kv_bytes
    with pytest.raises(ValueError, match="^--kv-sparsity select does not go with --memory-device cuda"):
        KvStore(each, torch.device("cuda"))


def test_slots_take_whole_pages_and_a_header() -> None:
    assert channel_bytes(Geometry(slots=3, slot_bytes=4097)) == 3 * (2 + 1) * 4096
    assert channel_bytes(Geometry(slots=1, slot_bytes=1), Geometry(slots=2, slot_bytes=4096)) == (2 + 4) * 4096


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [2.0, 1.0, 1.0]])
@pytest.mark.parametrize("stripes", [2, 4, 32])
def test_the_most_partial_results_of_a_step_are_counted(weights: list[float], stripes: int) -> None:
    """The rows are at any position of a sequence at any place."""
    layers, max_rows = LAYERS["some"], 10
    partition = PARTITIONS["token"]([x.kv_heads for x in layers], weights, 1)
    max_len = stripes * CHUNK_TOKENS
    placement = KvPlacement(partition.num_kv_shards, CHUNK_TOKENS)
    (piece,) = partition.pieces(0, 0)
    found = [
        row_layout([RowRange(0, first, max_rows, KvLocation(lane))], piece.kv_shards, 0, placement)
        for lane in range(partition.num_kv_shards)
        for first in range(0, max_len - max_rows + 1, max_rows)
    ]
    results = max(max(x.num_partial, len(x.whole_rows)) for x in found)
    counted = attention_bytes(layers, partition, 0, torch.float32, max_rows=max_rows, max_len=max_len)
    assert counted == results * 16 * (layers[0].v_dim + 1) * 4
