"""Wherever a sequence lies, and while its stripes move, the result is the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from both_sides import Both
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_peer import bind, shape
from torch import Tensor

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.codec import max_nodes, owned_nodes
from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation, KvPlacement, ShardCounter, StripeRun
from lamina.protocol.loan_placement import spill_locations
from lamina.protocol.step_plan import MessageKind, New, RowRange, StepPlan
from lamina.workers.memory.kv_store import KvStore

pytestmark = pytest.mark.no_retry

LAYERS = [shape(4, 2, 8, 8), shape(6, 3, 8, 8, window=200, sinks=1)]
MAX_LEN = 1024
BLOCK = 16
# (sequence, first, count) of every step
STEPS = [
    [(1, 0, 300)], [(1, 300, 300), (2, 0, 130)], [(1, 600, 1), (2, 130, 120)], [(1, 601, 39), (2, 250, 6)],
    [(1, 640, 1), (2, 256, 1)], [(2, 257, 1), (1, 641, 120)], [(1, 761, 1), (2, 258, 1)],
]  # fmt: skip
Kept = dict[tuple[int, int, int, int, int], list[Tensor]]  # worker, layer, sequence, KV head, block -> K, V, scales


def both(partition: str, weights: list[float], stored: str) -> Both:
    fields = {"max_rows": 512, "max_model_len": MAX_LEN, "kv_bytes": 4 << 20, "kv_cache_dtype": stored}
    return Both([bind(LAYERS, weights, w, partition, **fields) for w in range(len(weights))])


def blocks(x: Both, places: dict[int, KvLocation], lengths: dict[int, int]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Returns what every worker keeps of every sequence, with its tensors in the store, to be changed in place."""
    for worker, store in enumerate(side.store for side in x.sides):
        tables, placement = store.tables, store.placement
        for layer, pieces in enumerate(store.layers):
            for piece, held in zip(pieces, store.pieces[layer], strict=True):
                for sequence, length in lengths.items():
                    start, _ = tables.block_table(piece.group, sequence)
                    for n in range(start, -(-length // BLOCK)):
                        stripe = n * BLOCK // placement.stripe if placement.stripe else 0
                        if placement.kv_shard_of(places[sequence], stripe) in tables.kv_shards[piece.group]:
                            (at,) = tables.block_ids(piece.group, sequence, n, n + 1)
                            for i, head in enumerate(range(held.head_start, held.head_stop)):
                                of = [piece.kv.k, piece.kv.v, *(piece.kv.scales or ())]
                                yield (worker, layer, sequence, head, n), [y[at, i] for y in of]


def legal(x: Both, place: KvLocation) -> bool:
    stripes = -(-MAX_LEN // 128)
    return all(
        len(owned_nodes(lanes, s.placement, place, range(stripes))[0]) <= max_nodes(lanes, s.placement, stripes)
        for s in (side.store for side in x.sides)
        for lanes in s.tables.kv_shards
        if s.placement.stripe
    )


class Moving:
    """Takes steps at places that change; ``copy``: a move of stripes brings their tokens along."""

    def __init__(self, x: Both, copy: bool = True) -> None:
        self.x, self.copy = x, copy
        self.places: dict[int, KvLocation] = {}
        self.lengths: dict[int, int] = {}

    def step(self, number: int, rows: list[RowRange]) -> list[Tensor]:
        before = {at: [y.clone() for y in of] for at, of in blocks(self.x, self.places, self.lengths)}
        ops, old = [New(r.sequence) for r in rows if not r.first], dict(self.lengths)
        self.x.begin(StepPlan(step=number, ops=list(ops), rows=rows))
        self.places |= {r.sequence: r.location for r in rows}
        by_block = {at[1:]: of for at, of in before.items()}
        for at, of in blocks(self.x, self.places, old) if self.copy else ():
            if at not in before and at[1:] in by_block:
                for there, here in zip(of, by_block[at[1:]], strict=True):
                    there.copy_(here)
        self.lengths |= {r.sequence: r.first + r.count for r in rows}
        found = list[Tensor]()
        for layer, of in enumerate(LAYERS):
            g = torch.Generator().manual_seed(100 * number + layer)
            count = sum(r.count for r in rows)
            q, k, v = (torch.randn(count, h, 8, generator=g) for h in (of.q_heads, of.kv_heads, of.kv_heads))
            found.append(self.x.layer(layer, q, k, v))
        return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@st.composite
def places(draw: st.DrawFn, x: Both) -> KvLocation:
    placement = x.sides[0].store.placement
    lanes, at, runs = st.integers(0, placement.num_kv_shards - 1), 0, list[StripeRun]()
    while placement.stripe and at < 8 and draw(st.booleans()):
        start = at + draw(st.integers(0, 3))
        at = start + draw(st.integers(1, 4))
        runs.append(StripeRun(start, at, draw(lanes)))
    found = KvLocation(draw(lanes), tuple(runs))
    return found if legal(x, found) else KvLocation(found.kv_shard)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    data=st.data(),
    split=st.sampled_from(
        [("token", [1.0, 1.0]), ("token", [2.0, 1.0, 1.0]), ("head", [1.0, 1.0]), ("head", [0.7, 0.3]),
         ("request", [1.0, 2.0]), ("spill", [1.0, 1.0]), ("spill", [2.0, 1.0, 1.0])]
    ),
    stored=st.sampled_from(["auto", "int8"]),
)  # fmt: skip
def test_any_legal_place_gives_the_same_bits(data: st.DataObject, split: tuple[str, list[float]], stored: str) -> None:
    static, moving = (Moving(both(*split, stored)) for _ in range(2))
    for number, step in enumerate(STEPS):
        rows = [RowRange(*row) for row in step]
        moved = [RowRange(*row, data.draw(places(moving.x))) for row in step]
        assert equal(static.step(number, rows), moving.step(number, moved)), number
        for side in moving.x.sides:
            side.store.tables.check_integrity()


def test_a_stripe_that_moves_without_its_tokens_is_seen() -> None:
    """The control."""
    static, there, lost = (Moving(both("token", [1.0, 1.0], "auto"), copy) for copy in (True, True, False))
    for number, step in enumerate(STEPS):
        place = KvLocation(0, (StripeRun(0, 2, 1),)) if number > 2 else FIRST_LOCATION
        rows, moved = [RowRange(*row) for row in step], [RowRange(*row, place) for row in step]
        expected = static.step(number, rows)
        assert equal(expected, there.step(number, moved))
        assert equal(expected, lost.step(number, moved)) == (number <= 2)


def test_a_sequence_on_loan_has_the_bits_of_one_at_home() -> None:
    """And the creditor is asked for what it holds, and for nothing of a sequence that it does not know."""
    home, lent = (Moving(both("spill", [1.0, 1.0], "auto")) for _ in range(2))
    place = KvLocation(0, (StripeRun(1, 3, 1),))
    for number, step in enumerate(STEPS):
        at = [RowRange(*row, place) if row[0] == 1 else RowRange(*row) for row in step]
        assert equal(home.step(number, [RowRange(*row) for row in step]), lent.step(number, at)), number
    creditors = [x.x.sides[1] for x in (home, lent)]
    assert [side.largest[MessageKind.Q] > 0 for side in creditors] == [False, True]
    assert [side.store.tables.count_blocks([2]) for side in creditors] == [(0, 0)] * 2


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(rooms=st.lists(st.integers(1, 6), min_size=2, max_size=3), homes=st.tuples(st.integers(0, 1), st.integers(0, 1)))
@example(rooms=[2, 4], homes=(0, 1))
def test_random_loans_have_the_bits_of_token_and_request(rooms: list[int], homes: tuple[int, int]) -> None:
    """The loans are those of the policy, into so many stripes of room, from any home: six are asked for."""
    workers = len(rooms)
    room = dict(enumerate(rooms)) | ({0: 6} if sum(rooms) < 6 else {})
    places = dict(
        enumerate((spill_locations(KvLocation(home), 0, 6, room) or KvLocation(home) for home in homes), start=1)
    )
    found = {name: Moving(both(name, [1.0] * workers, "auto")) for name in ("spill", "token", "request")}
    for number, step in enumerate(STEPS):
        lent = found["spill"].step(number, [RowRange(*row, places[row[0]]) for row in step])
        for name in ("token", "request"):
            assert equal(lent, found[name].step(number, [RowRange(*row) for row in step])), (number, name)
    holders = {lane for p in places.values() for lane in (p.kv_shard, *(run.kv_shard for run in p.moved_runs))}
    for worker, side in enumerate(found["spill"].x.sides):
        assert (side.largest[MessageKind.Q] > 0) == (worker in holders)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (KvLocation(2), "KV shard 2 of 2"),
        (KvLocation(-1), "KV shard -1 of 2"),
        (KvLocation(0, (StripeRun(0, 1, 2),)), "in KV shard 2 of 2"),
        (KvLocation(0, (StripeRun(3, 3, 1),)), r"stripes 3\.\.3"),
        (KvLocation(0, (StripeRun(0, 3, 1), StripeRun(2, 4, 0))), "after 3"),
        (KvLocation(0, tuple(StripeRun(n, n + 1, 1) for n in range(65))), "65 runs"),
    ],
)
def test_places_that_cannot_be_are_refused_and_change_nothing(place: KvLocation, why: str) -> None:
    x = both("token", [1.0, 1.0], "auto")
    for side in x.sides:
        refuse(side.store, place, why)


def test_a_place_in_more_pieces_than_slots_hold_is_refused() -> None:
    x = both("token", [3.0, 1.0], "auto")
    store = x.sides[1].store  # by rule it keeps one stripe of four, two of the longest sequence
    (mine,) = (lane for lane in range(4) if lane in store.tables.kv_shards[0])
    first = next(KvLocation(lane) for lane in range(4) if store.placement.kv_shard_of(KvLocation(lane), 0) == mine)
    refuse(
        store,
        KvLocation(first.kv_shard, (StripeRun(2, 3, mine), StripeRun(6, 7, mine))),
        "lies here in 4 pieces, at most 2",
    )


def refuse(store: KvStore, place: KvLocation, why: str) -> None:
    for number, first in enumerate((0, 500)):
        ops = [New(1)] if not first else []
        store.apply_plan(StepPlan(step=number, ops=list(ops), rows=[RowRange(1, first, 500)]))
    free = store.tables.free_blocks
    with pytest.raises(PlanError, match=why):
        store.apply_plan(StepPlan(step=9, ops=[], rows=[RowRange(1, 1000, 1, place)]))
    assert store.tables.free_blocks == free
    store.apply_plan(StepPlan(step=9, ops=[], rows=[RowRange(1, 1000, 1)]))


@given(
    lane=st.integers(0, 2), stripe=st.integers(1, 4), units=st.integers(0, 60), pattern=st.tuples(*[st.booleans()] * 3),
    cuts=st.lists(st.integers(0, 15), max_size=6, unique=True).map(sorted), to=st.integers(0, 2),
)  # fmt: skip
def test_what_is_dealt_is_counted(
    lane: int, stripe: int, units: int, pattern: tuple[bool, ...], cuts: list[int], to: int
) -> None:
    place = KvLocation(lane, tuple(StripeRun(a, b, to) for a, b in zip(cuts[::2], cuts[1::2], strict=False)))
    placement, lanes = KvPlacement(3, stripe), KvShards(pattern)
    placement.check(place)
    kept = [n for n in range(units) if placement.kv_shard_of(place, n // stripe) in lanes]
    assert ShardCounter(lanes, placement).num_owned(place, units) == len(kept)
