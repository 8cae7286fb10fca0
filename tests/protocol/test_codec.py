"""The bytes of a layer's messages: what one side writes the other reads, and no slot is too small."""

from __future__ import annotations

import random
from math import log2
from typing import Any

import pytest
import torch
from both_sides import Both, Echo
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_peer import bind, shape
from msgspec.structs import replace
from torch import Tensor

from lamina.config.partition import PARTITIONS, HeadShare, by_token, choose_stripe
from lamina.ops.attention.merge import CHUNK_TOKENS
from lamina.protocol import codec
from lamina.protocol.codec import max_message_sizes, max_nodes, maximal_nodes, owned_runs, row_layout
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.step_plan import BindRequest, LayerShape, MessageKind, New, RowRange, StepPlan
from lamina.workers.memory.kv_store import DTYPES

MAX_ROWS, MAX_LEN = 48, 1024


@st.composite
def setups(draw: st.DrawFn) -> list[BindRequest]:
    heads = [draw(st.sampled_from([(4, 2), (6, 3), (5, 5)])) for _ in range(2)]
    layers = [shape(*h, 8, 8, window=draw(st.sampled_from([0, 1, 100, 300]))) for h in heads]
    weights = draw(st.sampled_from([[1.0], [1.0, 1.0], [3.0, 1.0], [1.0] * 3, [0.7, 0.3]]))
    name, stripe = draw(st.sampled_from(sorted(PARTITIONS))), draw(st.sampled_from([1, 2]))
    partition = PARTITIONS[name]([x.kv_heads for x in layers], weights, stripe)
    fields = {"dtype": draw(st.sampled_from(["float32", "bfloat16"])), "max_rows": 4 * MAX_LEN, "kv_bytes": 8 << 20}
    fields |= {"max_model_len": MAX_LEN}
    return [replace(bind(layers, weights, w, name, **fields), partition=partition) for w in range(len(weights))]


@st.composite
def steps(draw: st.DrawFn) -> list[RowRange]:
    sequences = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    firsts = st.integers(0, MAX_LEN - 20) | st.sampled_from([0, 127, 128, 129, 512])
    counts, lanes = st.sampled_from([1, 1, 3, 16]), st.integers(0, 63)
    return [RowRange(s, draw(firsts), draw(counts), KvLocation(draw(lanes))) for s in sequences]


def codes(rows: int, layer: LayerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v whose numbers tell row and head as far as bfloat16 can, and differ within a head."""
    found = []
    for start, heads, dim in ((1, layer.q_heads, 8), (2, layer.kv_heads, 8), (3, layer.kv_heads, 8)):
        x = torch.arange(start, start + rows * heads * dim) * 7 % 251
        found.append(x.view(rows, heads, dim).to(dtype))
    return found[0], found[1], found[2]


def kept_kv(both: Both, layer: int, row: RowRange, position: int) -> tuple[Tensor, Tensor]:
    """K and V [Hkv, D] of a token, from the memory workers that keep it."""
    k, v = (torch.full((both.layers[layer].kv_heads, 8), float("nan")) for _ in range(2))
    for store in (side.store for side in both.sides):
        for piece, held in zip(store.layers[layer], store.pieces[layer], strict=True):
            if owned_runs(
                RowRange(row.sequence, position, 1, row.location), store.tables.kv_shards[piece.group], store.placement
            ):
                block = position // store.tables.block_size
                (here,) = store.tables.block_ids(piece.group, row.sequence, block, block + 1)
                heads, at = slice(held.head_start, held.head_stop), position % store.tables.block_size
                assert k[heads].isnan().all(), "kept twice"
                k[heads], v[heads] = piece.kv.k[here, :, at], piece.kv.v[here, :, at]
    return k, v


def run(both: Both, rows: list[RowRange]) -> bool:
    """A step of ``rows``: whether every number of Q, K and V came where it belongs, and O came back."""
    dtype, new = DTYPES[both.sides[0].store.bind_request.dtype], [New(r.sequence) for r in rows]
    before = [RowRange(r.sequence, 0, r.first, r.location) for r in rows if r.first]
    for side in both.sides:
        side.store.apply_plan(StepPlan(step=0, ops=list(new), rows=before))
    both.begin(StepPlan(step=1, ops=[], rows=rows))
    good = True
    for index, layer in enumerate(both.layers):
        q, k, v = codes(sum(r.count for r in rows), layer, dtype)
        good &= torch.equal(both.layer(index, q, k, v), q)
        at = 0
        for row in rows:
            for position in range(row.first, row.first + row.count):
                there = kept_kv(both, index, row, position)
                good &= all(torch.equal(a, b.float()) for a, b in zip(there, (k[at], v[at]), strict=True))
                at += 1
    return good


@settings(max_examples=60, deadline=None)
@given(binds=setups(), rows=steps())
def test_what_one_side_writes_the_other_reads(binds: list[BindRequest], rows: list[RowRange]) -> None:
    lanes, both = binds[0].partition.num_kv_shards, Both(binds, Echo())
    rows = [replace(r, location=KvLocation(r.location.kv_shard % lanes)) for r in rows]
    assert run(both, rows)
    itemsize, stripe = DTYPES[binds[0].dtype].itemsize, binds[0].partition.stripe_chunks * CHUNK_TOKENS
    sizes = {"max_rows": sum(r.count for r in rows), "stripes": -(-MAX_LEN // stripe) if stripe else 1}
    most = max_message_sizes(both.layers, binds[0].partition, itemsize, **sizes)
    for side in both.sides:
        assert (side.largest[MessageKind.Q] <= most.q) & (side.largest[MessageKind.KV] <= most.kv)
        assert side.largest[MessageKind.O] <= most.o


def test_two_sides_that_count_otherwise_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the round trip: on one side alone, workers that change places, and K and V that do."""
    rows, layers = [RowRange(1, 300, 3), RowRange(2, 20, 1)], [shape(6, 3, 8, 8)]
    fields = {"max_rows": 4 * MAX_LEN, "max_model_len": MAX_LEN, "kv_bytes": 8 << 20}
    binds = [bind(layers, [1.0, 1.0], w, "head", **fields) for w in range(2)]
    assert run(Both(binds, Echo()), rows)
    table = [HeadShare(s.head_start, s.head_stop, s.owners[::-1]) for s in binds[0].partition.tables[0]]
    other = type(binds[0].partition)(2, 2, binds[0].partition.stripe_chunks, [table], [0])
    with pytest.raises(AssertionError):
        run(Both(binds, Echo(), other), rows)

    def v_first(pieces: Any, groups: Any, itemsize: int) -> codec.LayerMessages:
        x = codec.messages(pieces, groups, itemsize)
        return x._replace(kv=tuple((v, k, other_v, other_k) for k, v, other_k, other_v in x.kv))

    monkeypatch.setattr("lamina.workers.memory.attention_step.messages", v_first)
    assert not run(Both(binds, Echo()), rows)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 2.0], [3.0, 5.0], [9.0, 1.0]])
def test_a_sequence_dealt_by_rule_comes_back_in_few_nodes(weights: list[float]) -> None:
    """128k tokens in the shape of a 70B model, 2 memory workers: at most 8 from each, wherever it begins and ends."""
    chunks = (128 << 10) // CHUNK_TOKENS
    partition = by_token([8] * 80, weights, choose_stripe(chunks, len(weights)))
    stripe = partition.stripe_chunks * CHUNK_TOKENS
    for worker in range(len(weights)):
        (piece,) = partition.pieces(0, worker)
        placement = KvPlacement(partition.num_kv_shards, stripe)
        most = max_nodes(piece.kv_shards, placement, -(-chunks // partition.stripe_chunks))
        assert most <= 8
        for first in range(stripe // 2, 128 << 10, stripe // 2):
            for lane in range(partition.num_kv_shards):
                for window in (0, stripe, 3 * stripe + 5):
                    assert (
                        len(
                            row_layout(
                                [RowRange(1, first, 1, KvLocation(lane))], piece.kv_shards, window, placement
                            ).merge_nodes
                        )
                        <= most
                    )


@pytest.mark.long
def test_a_run_of_chunks_comes_back_in_few_nodes() -> None:
    for start in range(70):
        for count in range(2, 140):
            run = range(start, start + count)
            nodes = maximal_nodes(run, range(start + count + 130))
            assert len(nodes) <= 2 * log2(count)
            assert [n for level, number in nodes for n in range(number << level, (number + 1) << level)] == list(run)
    assert maximal_nodes([0, 2, 4, 6], range(8)) == [(0, n) for n in (0, 2, 4, 6)], "the control: nothing is merged"


def test_fewer_stripes_make_no_more_nodes() -> None:
    random.seed(5)
    for _ in range(200):
        here = [n for n in range(32) if random.random() < 0.6]
        low, high = sorted(random.sample(range(33), 2))
        seen = range(low, high)
        assert len(maximal_nodes([n for n in here if n in seen], seen)) <= len(maximal_nodes(here, range(32)))
