"""The KV that goes from one worker to another when memory workers come or go, against a count of every token of every
head.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lamina.config.engine_config import CHUNK_TOKENS
from lamina.config.partition import PARTITIONS, Partition
from lamina.protocol.blocks.extents import Extents
from lamina.protocol.kv_placement import KvLocation, KvPlacement, StripeRun
from lamina.protocol.reshard import HeadTransfers
from lamina.protocol.step_plan import SurvivingKv

BLOCK = 32
NAMES = st.sampled_from(sorted(PARTITIONS))
WORKERS = st.integers(1, 4)


def placed(draw: st.DrawFn, of: Partition) -> KvLocation:
    """Places sequences; they stay but for what is on loan, and some of their stripes are."""
    lanes, loans = st.integers(0, of.num_kv_shards - 1), tuple[StripeRun, ...]()
    if of.single_shard and draw(st.booleans()):
        start, count = draw(st.integers(0, 6)), draw(st.integers(1, 3))
        loans = (StripeRun(start, start + count, draw(lanes)),)
    return KvLocation(draw(lanes), loans)


def kept(draw: st.DrawFn, before: Partition, after: Partition) -> list[SurvivingKv]:
    lengths = draw(st.lists(st.integers(1, 900), min_size=1, max_size=4))
    return [SurvivingKv(i, n, placed(draw, after), placed(draw, before)) for i, n in enumerate(lengths)]


@st.composite
def recuts(draw: st.DrawFn) -> tuple[Partition, Partition, list[int], list[int], list[SurvivingKv]]:
    heads = draw(st.lists(st.sampled_from((2, 3, 8)), min_size=1, max_size=3))
    windows = [draw(st.sampled_from((0, 70))) for _ in heads]
    name = draw(NAMES)

    def cut() -> Partition:
        workers = draw(WORKERS if name != "head" else st.integers(1, min(4, *heads)))
        return PARTITIONS[name](heads, [1.0] * workers, draw(st.sampled_from((1, 2))))

    before, after = cut(), cut()
    return before, after, heads, windows, kept(draw, before, after)


def holders(of: Partition, layer: int, window: int, keep: SurvivingKv, place: KvLocation) -> dict[tuple[int, int], int]:
    """(head, block) -> whose it is, one token of one head at a time."""
    placement = KvPlacement(of.num_kv_shards, of.stripe_chunks * CHUNK_TOKENS // BLOCK, of.single_shard)
    first = max(0, keep.length - window + 1) // BLOCK if window else 0
    found = {}
    for share in of.tables[of.layer_table[layer]]:
        for head in range(share.head_start, share.head_stop):
            for block in range(first, -(-keep.length // BLOCK)):
                lane = placement.kv_shard_of(place, block // placement.stripe if placement.stripe else 0)
                found[head, block] = share.owners[lane if len(share.owners) > 1 else 0]
    return found


@given(recuts())
def test_each_block_of_each_head_goes_once_from_who_has_it_to_who_is_to(case: object) -> None:
    before, after, heads, windows, keep = case  # type: ignore[misc]
    strips = HeadTransfers(before, after, windows, keep, BLOCK)
    for layer in range(len(heads)):
        moved = Counter[tuple[int, int, int, int, int]]()
        for strip in strips.of_layer(layer):
            for head in range(strip.head_start, strip.head_stop):
                for sequence, blocks in strip.blocks.items():
                    moved.update((sequence, head, n, strip.source, strip.target) for n in blocks)
            given_, taken = (
                before.pieces(layer, strip.source)[strip.source_piece],
                after.pieces(layer, strip.target)[strip.target_piece],
            )
            for piece in (given_, taken):
                assert piece.head_start <= strip.head_start < strip.head_stop <= piece.head_stop
        wanted = Counter[tuple[int, int, int, int, int]]()
        for each in keep:
            assert each.previous_location is not None
            old = holders(before, layer, windows[layer], each, each.previous_location)
            new = holders(after, layer, windows[layer], each, each.location)
            assert old.keys() == new.keys()
            wanted.update((each.sequence, *at, old[at], new[at]) for at in new)
        assert moved == wanted


def test_layers_that_are_alike_share_their_strips() -> None:
    one, two = (PARTITIONS["head"]([4, 4], [1.0] * n, 1) for n in (1, 2))
    strips = HeadTransfers(one, two, [0, 0], [SurvivingKv(7, 33, KvLocation(), KvLocation())], BLOCK)
    assert strips.of_layer(0) is strips.of_layer(1)
    assert [(s.source, s.target, s.head_start, s.head_stop, s.blocks) for s in strips.of_layer(0)] == [
        (0, 0, 0, 2, {7: [0, 1]}),
        (0, 1, 2, 4, {7: [0, 1]}),
    ]


def test_extents_and_strips_count_alike() -> None:
    """The tokens that a table takes of what is moved are those that strips bring."""
    after = PARTITIONS["token"]([2], [1.0, 1.0], 1)
    keep = [SurvivingKv(0, 600, KvLocation(1), KvLocation(0))]
    strips = HeadTransfers(PARTITIONS["token"]([2], [1.0], 1), after, [0], keep, BLOCK)
    for worker in (0, 1):
        (piece,) = after.pieces(0, worker)
        extents = Extents([0], BLOCK, [piece.kv_shards], KvPlacement(after.num_kv_shards, CHUNK_TOKENS // BLOCK))
        mine = [n for s in strips.of_layer(0) if s.target == worker for n in s.blocks[0]]
        assert mine == extents.block_numbers(0, extents.extent_of_surviving(keep[0]))
