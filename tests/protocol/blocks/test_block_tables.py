"""Block tables: nothing is lost or owned twice, plans apply as a whole or not at all, windows give blocks back.

Covers: lamina/protocol/blocks/block_counts.py, lamina/protocol/blocks/extents.py,
lamina/protocol/blocks/held_blocks.py, lamina/protocol/step_plan.py.
"""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_counts import split_memory
from lamina.protocol.blocks.block_tables import (
    BlockTables,
    NoBlocksError,
    PlanError,
)
from lamina.protocol.blocks.extents import max_blocks_of_sequence
from lamina.protocol.blocks.held_blocks import BlockPool
from lamina.protocol.kv_placement import KvLocation, KvPlacement, StripeRun
from lamina.protocol.step_plan import (
    ContextShift,
    Fork,
    Free,
    New,
    PrefillGrant,
    RowRange,
    SequenceOp,
    StepPlan,
    SurvivingKv,
    Truncate,
)

SIZE = 4


def plan(*parts: SequenceOp | RowRange, step: int = 0) -> StepPlan:
    rows = [p for p in parts if isinstance(p, RowRange)]
    return StepPlan(step=step, ops=[p for p in parts if not isinstance(p, RowRange)], rows=rows)


def tables(windows: list[int] | None = None, blocks: int = 10) -> BlockTables:
    windows = windows or [0]
    return BlockTables(windows, [blocks] * len(windows), SIZE)


def snapshot(t: BlockTables) -> object:
    state = [(s, t.length(s), [t.block_table(g, s) for g in range(len(t.windows))]) for s in t.sequences]
    return copy.deepcopy((state, t.free_blocks))


def test_blocks_that_are_taken_at_once_are_those_of_one_after_the_other() -> None:
    one, many = BlockPool(9), BlockPool(9)
    for pool in (one, many):
        pool.free([pool.allocate() for _ in range(3)])
    assert list(many.allocate_many(4)) == [one.allocate() for _ in range(4)]
    assert list(many.allocate_many(0)) == []
    with pytest.raises(IndexError, match="6 blocks are needed, and 5 are free"):
        many.allocate_many(6)
    assert list(many.allocate_many(5)) == [one.allocate() for _ in range(5)]
    assert many.num_free == one.num_free == 0


def test_blocks_follow_the_tokens() -> None:
    t = tables()
    t.apply(plan(New(7), RowRange(7, 0, 5)))
    assert t.free_blocks == (8,)
    start, ids = t.block_table(0, 7)
    assert (start, len(ids)) == (0, 2)
    t.apply(plan(RowRange(7, 5, 3)))
    assert t.block_table(0, 7)[1] == ids
    t.apply(plan(RowRange(7, 8, 1)))
    assert t.block_table(0, 7)[1][:2] == ids[:2]
    assert t.free_blocks == (7,)
    t.apply(plan(Truncate(7, 4)))
    assert t.free_blocks == (9,)
    assert t.length(7) == 4
    t.apply(plan(Free(7), New(8)))
    assert t.free_blocks == (10,)
    assert t.sequences == [8]


def test_a_plan_may_be_sent_again() -> None:
    t = tables([0, 6])
    t.apply(plan(New(1), RowRange(1, 0, 20), step=1))
    for step in (plan(RowRange(1, 20, 9), step=2), plan(Free(1), New(2), New(3), RowRange(2, 0, 40), step=3)):
        t.apply(step)
        before = snapshot(t)
        assert t.can_apply(step)
        t.apply(step)
        assert snapshot(t) == before


def test_what_can_be_applied_is_looked_at_anew_behind_another_plan() -> None:
    t = tables(blocks=2)
    t.apply(plan(New(1), New(2), step=1))
    one, other = (plan(RowRange(s, 0, 8), step=step) for s, step in ((1, 2), (2, 3)))
    assert t.can_apply(one)
    t.apply(other)
    with pytest.raises(NoBlocksError):
        t.apply(one)
    t.apply(plan(Free(2), step=4))
    assert t.can_apply(one)
    one.ops.append(New(3))
    t.apply(one)
    assert t.sequences == [1, 3]


def test_without_blocks_nothing_happens() -> None:
    t = tables(blocks=4)
    t.apply(plan(New(1), RowRange(1, 0, 6), New(2), RowRange(2, 0, 1)))
    before = snapshot(t)
    too_much = plan(Truncate(1, 3), New(3), RowRange(2, 1, 1), RowRange(3, 0, 12))
    assert not t.can_apply(too_much)
    with pytest.raises(NoBlocksError, match="1 KV blocks of 4 tokens more than the 4"):
        t.apply(too_much)
    assert snapshot(t) == before
    enough = plan(Free(1), New(3), RowRange(2, 1, 1), RowRange(3, 0, 12))
    assert t.can_apply(enough)
    t.apply(enough)
    assert t.free_blocks == (0,)


@pytest.mark.parametrize(
    "bad",
    [
        plan(New(1)),
        plan(Free(9)),
        plan(Free(1), Free(1)),
        plan(Truncate(1, 7)),
        plan(Truncate(1, -1)),
        plan(RowRange(9, 0, 1)),
        plan(RowRange(1, 7, 1)),
        plan(RowRange(1, -1, 1)),
        plan(RowRange(1, 6, 0)),
        plan(RowRange(1, 6, 1), RowRange(1, 7, 1)),
        plan(Free(1), RowRange(1, 6, 1)),
        plan(Free(1), New(1), RowRange(1, 6, 1)),
    ],
    ids=str,
)
def test_plans_that_do_not_fit_change_nothing(bad: StepPlan) -> None:
    t = tables()
    t.apply(plan(New(1), RowRange(1, 0, 6)))
    before = snapshot(t)
    with pytest.raises(PlanError):
        t.apply(plan(New(2), *bad.ops, RowRange(2, 0, 3), *bad.rows))
    with pytest.raises(PlanError):
        t.can_apply(bad)
    assert snapshot(t) == before


def test_a_window_gives_back_what_no_query_can_see() -> None:
    window, t = 6, tables([6], blocks=20)
    t.apply(plan(New(1), RowRange(1, 0, 30)))
    previous = 0
    for first in range(30, 60):
        t.apply(plan(RowRange(1, first, 1)))
        start, ids = t.block_table(0, 1)
        oldest = previous - window + 1  # the step before may be sent again, and still finds what it sees
        assert start == max(0, oldest // SIZE)
        assert start + len(ids) == -(-(first + 1) // SIZE)
        previous = first
    assert t.free_blocks[0] >= 20 - max_blocks_of_sequence(1000, window, SIZE, 1)


def test_the_last_two_steps_of_a_window_can_be_replayed() -> None:
    t = tables([6], blocks=20)
    t.apply(plan(New(1), RowRange(1, 0, 30)))
    for first in range(30, 50):
        t.apply(plan(RowRange(1, first, 1)))
        if first > 40:
            t.apply(plan(RowRange(1, first - 1, 1)))
            t.apply(plan(RowRange(1, first, 1)))
    with pytest.raises(PlanError, match="given back"):
        t.apply(plan(RowRange(1, 30, 1)))
    t.apply(plan(Truncate(1, 0)))
    t.apply(plan(RowRange(1, 0, 3)))
    t.check_integrity()


def test_blocks_needed_counts_what_comes_back_too() -> None:
    t = tables([0, 6], blocks=40)
    assert t.blocks_needed([RowRange(1, 0, 9), RowRange(2, 0, 1)]) == (4, 4)
    t.apply(plan(New(1), RowRange(1, 0, 40)))
    t.apply(plan(RowRange(1, 40, 1)))
    for rows in ([RowRange(1, 41, 1)], [RowRange(1, 41, 20)], [RowRange(1, 41, 1), RowRange(5, 0, 4)]):
        free, needed = t.free_blocks, t.blocks_needed(rows)
        probe = copy.deepcopy(t)
        probe.apply(plan(*[New(5)] * (len(rows) - 1), *rows))
        assert probe.free_blocks == tuple(f - n for f, n in zip(free, needed, strict=True))


def test_behind_a_loss_there_is_what_is_to_be_kept_and_nothing_else() -> None:
    t = tables(blocks=10)
    t.apply(plan(New(1), New(2), New(3), RowRange(1, 0, 9), RowRange(2, 0, 4), RowRange(3, 0, 6)))
    ids = list(t.block_table(0, 1)[1])
    t.reconcile([SurvivingKv(1, 5), SurvivingKv(3, 6)])
    assert (t.sequences, t.length(1), t.length(3)) == ([1, 3], 5, 6)
    assert list(t.block_table(0, 1)[1]) == ids[:2], "what stays stays where it was"
    assert t.free_blocks == (6,)
    t.check_integrity()
    t.apply(plan(RowRange(1, 5, 4), step=1))
    t.reconcile([])
    assert (t.sequences, t.free_blocks) == ([], (10,))


@pytest.mark.parametrize(
    "keep",
    [[SurvivingKv(1, 10)], [SurvivingKv(4, 1)], [SurvivingKv(1, 5), SurvivingKv(1, 5)], [SurvivingKv(1, 0)]],
    ids=str,
)
def test_what_is_not_there_cannot_be_kept(keep: list[SurvivingKv]) -> None:
    t = tables()
    t.apply(plan(New(1), RowRange(1, 0, 9)))
    before = snapshot(t)
    with pytest.raises(PlanError, match="sequence [14]"):
        t.reconcile(keep)
    assert snapshot(t) == before, "nothing has changed"


def test_nor_can_what_a_window_has_given_back() -> None:
    """The older of two steps in flight is the first that can be done again."""
    t = tables([6], blocks=20)
    t.apply(plan(New(1), RowRange(1, 0, 20)))
    for step in range(1, 10):
        t.apply(plan(RowRange(1, 19 + step, 1), step=step))
    assert t.surviving_blocks(SurvivingKv(1, 12)) is None
    for length in (27, 28):
        other = copy.deepcopy(t)
        assert other.surviving_blocks(SurvivingKv(1, length)) is not None
        other.reconcile([SurvivingKv(1, length)])
        other.check_integrity()
        other.apply(plan(RowRange(1, length, 1), step=20))
    lagging = tables([6], blocks=20)
    lagging.apply(plan(New(1), RowRange(1, 0, 27)))
    t.reconcile([SurvivingKv(1, 27)])
    lagging.reconcile([SurvivingKv(1, 27)])
    assert t.block_table(0, 1)[0] == lagging.block_table(0, 1)[0], "all hold the same, however far they were"


def test_a_fork_shares_whole_blocks_and_takes_none() -> None:
    t = tables()
    t.apply(plan(New(1), RowRange(1, 0, 11)))
    assert t.free_blocks == (7,)
    t.apply(plan(Fork(2, 1, 8), RowRange(2, 8, 5), step=1))
    assert t.free_blocks == (5,), "for 5 tokens behind the 8"
    assert t.block_table(0, 2)[1][:2] == t.block_table(0, 1)[1][:2]
    assert (t.exclusive_blocks(1), t.exclusive_blocks(2)) == ((1,), (2,))
    t.apply(plan(Free(1), step=2))
    assert t.free_blocks == (6,), "what the fork holds stays"
    assert (t.length(2), t.exclusive_blocks(2)) == (13, (4,))
    t.apply(plan(Free(2), step=3))
    assert t.free_blocks == (10,)
    t.check_integrity()


def test_a_fork_gets_a_copy_of_a_block_that_it_begins_with() -> None:
    t = tables()
    t.apply(plan(New(1), RowRange(1, 0, 11)))
    forks = plan(Fork(2, 1, 10), Fork(3, 1, 9), RowRange(2, 10, 1), Free(1), step=1)
    source = t.block_table(0, 1)[1][2]
    t.apply(forks)
    assert t.free_blocks == (6,), "two are shared, and each has one of its own"
    assert t.pending_copies == [[(source, t.block_table(0, 2)[1][2]), (source, t.block_table(0, 3)[1][2])]]
    assert len({*t.block_table(0, 2)[1][2:], *t.block_table(0, 3)[1][2:]}) == 2
    t.apply(forks)
    assert t.pending_copies == [[]], "it comes again"
    t.apply(plan(RowRange(3, 9, 4), step=2))
    t.check_integrity()


def test_a_begun_block_needs_room() -> None:
    t = tables(blocks=4)
    t.apply(plan(New(1), RowRange(1, 0, 16)))
    assert not t.can_apply(plan(Fork(2, 1, 10), step=1))
    assert t.can_apply(plan(Fork(2, 1, 8), step=1))
    assert t.forkable_blocks(SurvivingKv(1, 10)) == t.forkable_blocks(SurvivingKv(1, 8)) == (2,)
    t.check_integrity()


def test_a_fork_and_the_end_of_its_source_may_be_one_plan() -> None:
    t = tables(blocks=4)
    t.apply(plan(New(1), RowRange(1, 0, 16)))
    ends = plan(Fork(2, 1, 12), Free(1), step=1)
    t.apply(ends)
    t.apply(ends)  # which changes nothing
    assert (t.sequences, t.free_blocks) == ([2], (1,))
    assert not t.can_apply(plan(RowRange(2, 12, 5), step=2)), "shared blocks were never free"
    t.apply(plan(RowRange(2, 12, 4), step=2))
    t.check_integrity()


def test_blocks_of_several_holders_do_not_count_as_free_before_they_are() -> None:
    t = tables(blocks=4)
    t.apply(plan(New(1), RowRange(1, 0, 12)))
    t.apply(plan(Fork(2, 1, 12), step=1))
    assert not t.can_apply(plan(Free(1), New(3), RowRange(3, 0, 8), step=2))
    t.apply(plan(Free(1), New(3), RowRange(3, 0, 4), step=2))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([Fork(3, 1, 0)], "a fork of 0 tokens"),
        ([Fork(3, 1, 12)], "it has fewer"),
        ([Fork(3, 4, 4)], "sequence 4 does not exist"),
        ([Fork(2, 1, 4)], "exists already"),
        ([New(3), Fork(3, 1, 4)], "exists already"),
        ([New(3), RowRange(3, 0, 8), Fork(4, 3, 4)], "it has fewer"),
        ([Free(1), Fork(3, 1, 4)], "sequence 1 does not exist"),
        ([Truncate(1, 4), Fork(3, 1, 8)], "it has fewer"),
        ([Fork(3, 1, 8), RowRange(3, 7, 2)], "others hold blocks from that of position 7 on"),
        ([Fork(3, 1, 8), RowRange(1, 7, 2)], "others hold blocks from that of position 7 on"),
        ([RowRange(1, 3, 1)], "others hold blocks from that of position 3 on"),
        ([RowRange(2, 2, 4)], "others hold blocks from that of position 2 on"),
        ([Truncate(2, 0), RowRange(2, 0, 1)], "others hold blocks from that of position 0 on"),
        (
            [Fork(3, 1, 8), Truncate(3, 0), New(4), RowRange(4, 0, 16)],
            "sequence 3 is forked in step 2: it may have rows",
        ),
        ([Fork(3, 1, 8), Free(3), New(3)], "sequence 3 is forked in step 2: it may have rows"),
        ([Fork(3, 1, 8), Free(3), Fork(3, 1, 4)], "sequence 3 is forked in step 2: it may have rows"),
        ([Fork(3, 1, 8), PrefillGrant(3, 0, 4, 0, 0)], "sequence 3 is forked in step 2: it may have rows"),
        ([Fork(3, 1, 8), PrefillGrant(1, 4, 4, 0, 0)], "others hold blocks from that of position 4 on"),
        ([PrefillGrant(1, 0, 4, 0, 0)], "others hold blocks from that of position 0 on"),
    ],
    ids=str,
)
def test_forks_that_cannot_be_are_refused(parts: list[SequenceOp | RowRange], why: str) -> None:
    t = tables(blocks=20)
    t.apply(plan(New(1), RowRange(1, 0, 11)))
    t.apply(plan(Fork(2, 1, 4), RowRange(2, 4, 1), step=1))
    before = snapshot(t)
    with pytest.raises(PlanError, match=why):
        t.apply(plan(*parts, step=2))
    assert snapshot(t) == before


@pytest.mark.parametrize(
    ("lanes", "refused"),
    [([KvShards((True, False)), KvShards((False, True))], True), ([KvShards()], False)],
    ids=["each has its own sequences", "all is here"],
)
def test_a_fork_lies_where_its_source_does_unless_all_is_here(lanes: list[KvShards], refused: bool) -> None:
    """A prefill worker has all of its prompts, wherever memory workers have them."""
    t = BlockTables([0] * len(lanes), [20] * len(lanes), SIZE, lanes)
    t.apply(plan(New(1), RowRange(1, 0, 11)))
    before, fork = snapshot(t), plan(Fork(2, 1, 8), RowRange(2, 8, 1, KvLocation(1)), step=1)
    if refused:
        with pytest.raises(PlanError, match="it lies where its source does"):
            t.apply(fork)
        assert snapshot(t) == before
    else:
        t.apply(fork)
        assert t.block_table(0, 2)[1][:2] == t.block_table(0, 1)[1][:2]
    t.check_integrity()


def test_a_fork_finds_its_window_or_is_refused() -> None:
    t = tables([0, 6], blocks=20)
    t.apply(plan(New(1), RowRange(1, 0, 20)))
    t.apply(plan(RowRange(1, 20, 4), step=1))
    t.apply(plan(RowRange(1, 24, 4), step=2))
    with pytest.raises(PlanError, match="their KV is not here"):
        t.apply(plan(Fork(2, 1, 8), step=3))
    t.apply(plan(Fork(2, 1, 24), RowRange(2, 24, 1), step=3))
    assert t.block_table(1, 2)[0] == (24 - 6 + 1) // SIZE
    t.check_integrity()


def test_a_sequence_that_lies_elsewhere_can_begin_here() -> None:
    """So it is on a worker that is new, or has not seen the last plans."""
    t = BlockTables([0], [10], SIZE, [KvShards((True, False))])
    t.reconcile([SurvivingKv(7, 12, KvLocation(1))])
    assert (t.length(7), t.free_blocks) == (12, (10,))
    t.apply(plan(RowRange(7, 12, 1, KvLocation(1))))
    with pytest.raises(PlanError, match="sequence 8"):
        t.reconcile([SurvivingKv(8, 12, KvLocation(0))])


def test_memory_is_split_for_full_sequences_first() -> None:
    fields = {"block_size": 16, "max_rows": 64, "max_len": 1024}
    assert split_memory(1000 * 65, [1000], [0], [KvShards()], **fields) == [64]
    words = r"^63\.4KiB of KV memory .* needs 63\.5KiB on each memory worker: raise --kv-cache-memory-bytes or lower "
    with pytest.raises(ValueError, match=words):
        split_memory(1000 * 65 - 1, [1000], [0], [KvShards()], **fields)
    for kv_bytes in (10**6, 10**7 + 123):
        full, windowed = split_memory(kv_bytes, [2000, 5000], [0, 100], [KvShards()] * 2, **fields)
        assert full >= max_blocks_of_sequence(1024, 0, 16, 64)
        assert windowed >= max_blocks_of_sequence(1024, 100, 16, 64)
        assert kv_bytes - 7000 * 2 < (full + 1) * 2000 + (windowed + 1) * 5000 <= kv_bytes


WINDOWS = [0, 5, 11, 0]
LANES = [KvShards(), KvShards(), KvShards((True, False, False)), KvShards((False, True, True))]
MAX_ROWS = 9
LANE = st.integers(0, 2)
PLACES = st.builds(
    lambda lane, to, start, count: KvLocation(lane, (StripeRun(start, start + count, to),) if count else ()),
    LANE, LANE, st.integers(0, 6), st.integers(0, 4),
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Random plans against a model that knows lengths only."""

    stripe = 0

    @initialize(blocks=st.integers(8, 20))
    def start(self, blocks: int) -> None:
        self.tables = BlockTables(WINDOWS, [blocks, blocks, blocks - 3, blocks - 3], SIZE, LANES, self.stripe)
        self.lengths: dict[int, int] = {}
        self.places: dict[int, KvLocation] = {}
        self.next_id = 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        lengths, ops, rows = dict(self.lengths), list[SequenceOp](), list[RowRange]()
        places = dict(self.places)
        source = self.fork(data, lengths, places, ops, rows)
        for sequence in self.lengths:
            action = data.draw(st.sampled_from(["grow", "grow", "grow", "free", "truncate", "shift", "rest"]))
            if action == "free":
                ops.append(Free(sequence))
                del lengths[sequence]
                continue
            if action == "shift":
                unit = SIZE * max(1, 3 * self.stripe)
                first = SIZE * data.draw(st.integers(0, 3))
                op = ContextShift(sequence, first, unit * data.draw(st.integers(1, 3)))
                if sequence != source and self.tables.can_shift(op):
                    ops.append(op)
                    lengths[sequence] -= op.count
                continue
            if action == "truncate":
                shared = sequence == source or self.tables.exclusive_blocks(sequence) != tuple(
                    len(self.tables.block_table(g, sequence)[1]) for g in range(len(WINDOWS))
                )
                lengths[sequence] = data.draw(st.sampled_from([0, lengths[sequence]][shared:]))
                ops.append(Truncate(sequence, lengths[sequence]))
            if action in ("grow", "truncate"):
                if data.draw(st.sampled_from([True, False, False, False])):
                    places[sequence] = data.draw(
                        PLACES if self.stripe else PLACES.map(lambda p: KvLocation(p.kv_shard))
                    )
                rows.append(
                    RowRange(sequence, lengths[sequence], data.draw(st.integers(1, MAX_ROWS)), places[sequence])
                )
        if data.draw(st.booleans()):
            ops.append(New(self.next_id))
            places[self.next_id] = KvLocation(self.next_id % 3)
            rows.append(RowRange(self.next_id, 0, data.draw(st.integers(1, MAX_ROWS)), places[self.next_id]))
        this = plan(*ops, *rows)
        before, fits = snapshot(self.tables), self.tables.can_apply(this)
        try:
            self.tables.apply(this)
        except NoBlocksError:
            assert not fits
            assert snapshot(self.tables) == before
            return
        assert fits
        self.next_id += 2
        self.places = places
        self.lengths = lengths | {r.sequence: r.first + r.count for r in rows}
        if rows and data.draw(st.booleans()):
            after = snapshot(self.tables)
            self.tables.apply(plan(*rows))
            assert {s: self.tables.length(s) for s in self.tables.sequences} == self.lengths
            if not ops:
                assert snapshot(self.tables)[0] == after[0]  # type: ignore[index]

    def fork(
        self,
        data: st.DataObject,
        lengths: dict[int, int],
        places: dict[int, KvLocation],
        ops: list[SequenceOp],
        rows: list[RowRange],
    ) -> int | None:
        """Perhaps fork a sequence, and let the new one grow; returns the source."""
        if not lengths or not data.draw(st.booleans()):
            return None
        source, new = data.draw(st.sampled_from(sorted(lengths))), self.next_id + 1
        length = data.draw(st.integers(0, lengths[source]))
        if not length or self.tables.surviving_blocks(SurvivingKv(source, length, places[source])) is None:
            return None
        ops.append(Fork(new, source, length))
        lengths[new], places[new] = length, places[source]
        if data.draw(st.booleans()):
            rows.append(RowRange(new, length, data.draw(st.integers(1, MAX_ROWS)), places[new]))
        return source

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        if not hasattr(self, "tables"):
            return
        self.tables.check_integrity()
        assert {s: self.tables.length(s) for s in self.tables.sequences} == self.lengths
        for sequence, length in self.lengths.items():
            for g, window in enumerate(WINDOWS):
                start, ids = self.tables.block_table(g, sequence)
                kept = [self.stripe and block // self.stripe for block in range(start, -(-length // SIZE))]
                place, lane_of = self.places[sequence], KvPlacement(3, self.stripe).kv_shard_of
                assert len(ids) == sum(lane_of(place, stripe) in LANES[g] for stripe in kept)
                assert start * SIZE <= max(0, length - window + 1 if window else 0), "the next query misses tokens"
                assert len(ids) <= max_blocks_of_sequence(10**6, window, SIZE, MAX_ROWS)
                assert len(ids) <= self.tables.max_blocks(place, length, MAX_ROWS)[g]


class StripedMachine(Machine):
    """The same where sequences are dealt out."""

    stripe = 2


for machine in (Machine, StripedMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase
TestStripedMachine = StripedMachine.TestCase


@given(order=st.randoms(use_true_random=False))
def test_blocks_that_become_free_are_told_once(order: random.Random) -> None:
    """Only those are reported, whichever sequences share them: a set of the blocks in tables is the reference."""
    tables = BlockTables([0, 12], [30, 30], SIZE)
    assert tables.take_freed() == [[], []]
    lengths, held = dict[int, int](), [set[int](), set[int]()]
    for step in range(12):
        ops, rows = list[SequenceOp](), list[RowRange]()
        for sequence, length in list(lengths.items()):
            match order.choice(["free", "grow", "fork", "rest"]):
                case "free":
                    ops.append(Free(sequence))
                    del lengths[sequence]
                case "grow":
                    rows.append(RowRange(sequence, length, order.randint(1, 6)))
                    lengths[sequence] += rows[-1].count
                case "fork" if length >= SIZE and tables.surviving_blocks(SurvivingKv(sequence, SIZE)) is not None:
                    ops.insert(0, Fork(100 * step + sequence, sequence, SIZE))
                    lengths[100 * step + sequence] = SIZE
        ops.append(New(1000 + step))
        rows.append(RowRange(1000 + step, 0, order.randint(1, 9)))
        lengths[1000 + step] = rows[-1].count
        try:
            tables.apply(StepPlan(step=step, ops=ops, rows=rows))
        except (NoBlocksError, PlanError):
            assert tables.take_freed() == [[], []], "nothing has changed"
            return
        for group, (freed, before) in enumerate(zip(tables.take_freed(), held, strict=True)):
            now = {b for s in lengths for b in tables.block_table(group, s)[1]}
            assert len(set(freed)) == len(freed)
            assert before - now <= set(freed) <= before
            held[group] = now
