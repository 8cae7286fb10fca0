"""Stripes that go elsewhere while their sequence decodes: places, blocks, and when the policy has some go."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.config.partition import by_request, by_spill
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.blocks.extents import PlanError
from lamina.protocol.kv_placement import KvLocation, KvPlacement, StripeRun
from lamina.protocol.loan_placement import relocated, spill_to
from lamina.protocol.step_plan import (
    CommitMigration,
    CopyStripes,
    Fork,
    Free,
    New,
    RowRange,
    SequenceOp,
    StepPlan,
    StripesCopied,
)
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.cache_options import CacheOptions

STRIPE = 4  # blocks of a token each


def tables(blocks: list[int], window: int = 0) -> BlockTables:
    """One group for each memory worker; with a window two."""
    partition = by_spill([4], [1.0] * len(blocks), 8)
    lanes = [partition.pieces(0, w)[0].kv_shards for w in range(len(blocks))]
    each = [0, window] if window else [0]
    windows = [of for of in each for _ in blocks]
    return BlockTables(windows, blocks * len(each), 1, lanes * len(each), STRIPE, True)


def plan(step: int, *ops: SequenceOp, rows: list[RowRange] | None = None) -> StepPlan:
    return StepPlan(step=step, ops=list(ops), rows=rows or [])


def lent(length: int = 14) -> tuple[BlockTables, KvLocation]:
    """A sequence whose stripes 1 and 2 of four lie with worker 1."""
    held, place = tables([40, 40, 40]), spill_to(KvLocation(0), 1, 3, 1)
    held.apply(plan(0, New(1), rows=[RowRange(1, 0, length, place)]))
    return held, place


@settings(max_examples=300, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), max_size=8, unique=True).map(sorted), start=st.integers(0, 30),
    size=st.integers(1, 12), lane=st.integers(0, 3),
)  # fmt: skip
def test_what_is_moved_lies_there_and_nothing_else_moves(cuts: list[int], start: int, size: int, lane: int) -> None:
    place, placement = KvLocation(0), KvPlacement(4, 1, single_shard=True)
    for at, (low, high) in enumerate(zip(cuts[::2], cuts[1::2], strict=False)):
        place = spill_to(place, low, high, 1 + at % 3)
    after = relocated(place, StripeRun(start, start + size, lane), 0)
    assert after is not None
    placement.check(after)
    for n in range(48):
        inside = start <= n < start + size
        assert placement.kv_shard_of(after, n) == (lane if inside else placement.kv_shard_of(place, n))
    assert all(run.kv_shard != 0 for run in after.moved_runs)


def test_what_is_at_home_behind_all_loans_counts_among_the_pieces() -> None:
    place = spill_to(KvLocation(0), 31, 40, 1)
    assert relocated(place, StripeRun(33, 40, 0), 40) == spill_to(KvLocation(0), 31, 33, 1)
    assert relocated(place, StripeRun(33, 40, 0), 63) is None


def test_a_sequence_keeps_its_blocks_until_it_adopts_the_copy() -> None:
    held, place = lent()
    before = [list(held.block_table(g, 1)[1]) for g in range(3)]
    held.apply(plan(1, CopyStripes(5, 1, 1, 2, 2), rows=[RowRange(1, 14, 1, place)]))
    assert held.free_blocks == (40 - 4 - 3, 40 - 8, 40 - 8)
    assert list(held.block_table(1, 1)[1]) == before[1], "the source goes on"
    copy = list(held.block_table(2, 5)[1])
    there = spill_to(KvLocation(0), 1, 3, 2)
    held.apply(plan(2, CommitMigration(1, 5, there), rows=[RowRange(1, 15, 1, there)]))
    assert held.free_blocks == (40 - 4 - 4, 40, 40 - 8), "the source's free blocks rise by what has moved"
    assert list(held.block_table(2, 1)[1]) == copy, "and the copy is what it has now"
    assert held.sequences == [1]
    held.check_integrity()


def test_a_copy_that_is_not_wanted_leaves_nothing() -> None:
    held, place = lent()
    held.apply(plan(1, CopyStripes(5, 1, 1, 2, 2)))
    held.apply(plan(2, Free(5), rows=[RowRange(1, 14, 1, place)]))
    assert held.free_blocks == (40 - 4 - 3, 40 - 8, 40)
    held.apply(plan(3, CopyStripes(6, 1, 1, 1, 2)))
    held.apply(plan(4, CommitMigration(1, 6, KvLocation(0, (StripeRun(1, 2, 2), StripeRun(2, 3, 1)))), Free(1)))
    assert held.free_blocks == (40, 40, 40), "nor does one that its sequence adopts as it ends"
    held.check_integrity()


@pytest.mark.parametrize(
    "op",
    [
        CopyStripes(5, 9, 1, 1, 2), CopyStripes(1, 1, 1, 1, 2), CopyStripes(5, 1, 3, 1, 2),
        CopyStripes(5, 1, 0, 0, 2), CopyStripes(5, 1, -1, 1, 2), CopyStripes(5, 1, 1, 1, 7),
        CommitMigration(1, 9, KvLocation(0)), CommitMigration(1, 2, KvLocation(0)), CommitMigration(1, 3,
        KvLocation(0)), CommitMigration(1, 3, KvLocation(0, (StripeRun(1, 2, 2),))), CommitMigration(1, 3, KvLocation(1,
        (StripeRun(1, 3, 2),))), CommitMigration(1, 3, KvLocation(0, (StripeRun(1, 3, 9),))),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(op: SequenceOp) -> None:
    """3 is a copy of the stripes 1 and 2; 2 is another sequence."""
    held, place = lent()
    held.apply(plan(1, New(2), CopyStripes(3, 1, 1, 2, 2), rows=[RowRange(2, 0, 3, KvLocation(2))]))
    free = held.free_blocks
    with pytest.raises(PlanError):
        held.apply(plan(2, op, rows=[RowRange(1, 14, 1, place)]))
    assert held.free_blocks == free
    held.check_integrity()


def test_a_copy_cannot_be_there_as_it_is_begun() -> None:
    held, _ = lent()
    free = held.free_blocks
    with pytest.raises(PlanError, match="sequence 5 does not exist"):
        held.apply(plan(1, CopyStripes(5, 1, 1, 2, 2), CommitMigration(1, 5, spill_to(KvLocation(0), 1, 3, 2))))
    assert held.free_blocks == free
    held.check_integrity()


def test_a_fork_keeps_what_its_source_moves_away() -> None:
    held, place = lent(16)
    held.apply(plan(1, Fork(2, 1, 12)))
    held.apply(plan(2, CopyStripes(5, 1, 1, 2, 2)))
    there = spill_to(KvLocation(0), 1, 3, 2)
    shared = list(held.block_table(1, 2)[1])
    held.apply(plan(3, CommitMigration(1, 5, there), rows=[RowRange(1, 16, 1, there), RowRange(2, 12, 1, place)]))
    assert list(held.block_table(1, 2)[1]) == shared
    assert held.free_blocks[1] == 40 - 8
    held.check_integrity()


def moving(ledger: BlockTables, *, ranks: int, homes: int = 0, page: int = 0) -> Scheduler:
    """A scheduler whose sequences may move."""
    allocator, prefixes = SpillAllocator(ledger, 8 + 512, homes), PrefixCache(ledger, page)
    features = [prefixes, KvMigration(ledger, allocator, prefixes, ranks)]
    return Scheduler(ledger, max_num_seqs=8, prefill_chunk=512, allocator=allocator, features=features)


class House:
    """A scheduler, and a copy of the memory workers' tables; copies come when ``copy`` is called."""

    def __init__(self, blocks: list[int], *, ranks: int = 1, homes: int = 0, window: int = 0, page: int = 0) -> None:
        self.ledger, self.workers = tables(blocks, window), tables(blocks, window)
        self.scheduler = moving(self.ledger, ranks=ranks, homes=homes, page=page)
        self.ops, self.requests = list[SequenceOp](), count()

    def add(self, prompt: int, tokens: int) -> Sequence:
        params = SamplingParams(max_tokens=tokens)
        number, stop = next(self.requests), prompt + tokens
        of = Sequence(number, params, 0, [7] * prompt, CompletionOutput(0), stop, frozenset(), salt=bytes([number]))
        self.scheduler.add(of)
        return of

    def step(self) -> None:
        for step in self.scheduler.schedule():
            self.ops += [op for op in step.plan.ops if isinstance(op, CopyStripes | CommitMigration)]
            self.workers.apply(step.plan)
            assert self.workers.free_blocks == self.ledger.free_blocks
            self.scheduler.on_step_done(step)
            for drawn in step.sampled_sequences:
                drawn.append(7)
        self.workers.check_integrity()

    def until_moves(self) -> CopyStripes:
        for _ in range(40):
            self.step()
            if isinstance(self.ops[-1:] and self.ops[-1], CopyStripes):
                return self.ops[-1]  # type: ignore[return-value]
        pytest.fail("nothing moves")

    def copy(self, error: str = "") -> None:
        move = next(op for op in reversed(self.ops) if isinstance(op, CopyStripes))
        for nbytes in (0, 0 if error else 100):
            self.scheduler.on_report(
                StripesCopied(epoch=0, sequence=move.sequence, nbytes=nbytes, error=error * (not nbytes))
            )


def crowded(**options: int) -> tuple[House, Sequence]:
    """Two short ones at either home, and a long one that borrows until they have ended."""
    house = House([4 * STRIPE, 4 * STRIPE], **options)
    for _ in range(2):
        house.add(2 * STRIPE - 1, 2)
    long = house.add(3 * STRIPE, 40)
    house.step()
    assert long.location.moved_runs
    return house, long


def test_a_loan_goes_home_once_there_is_room() -> None:
    house, long = crowded()
    move, before = house.until_moves(), long.location
    assert move.kv_shard == long.location.kv_shard
    house.step()
    assert long.location == before, "it lies as it did while it is copied"
    house.copy()
    house.step()
    assert isinstance(house.ops[-1], CommitMigration)
    assert house.scheduler.features[KvMigration].num_moved_blocks == move.count * STRIPE
    for _ in range(12):
        house.step()
        if house.scheduler.features[KvMigration].in_flight:
            house.copy()
    assert house.ledger.free_blocks[long.location.kv_shard] < 2 * STRIPE, "home is filled first"


def test_a_copy_that_fails_is_given_up_and_none_is_tried_again() -> None:
    house, long = crowded()
    house.until_moves()
    before, free = long.location, house.ledger.free_blocks
    house.copy("the link ended")
    for _ in range(4):
        house.step()
    assert long.location.moved_runs[0] == before.moved_runs[0]
    assert sum(isinstance(op, CopyStripes) for op in house.ops) == 1
    assert sum(house.ledger.free_blocks) > sum(free) - 5, "the copy's blocks are free"


def test_a_sequence_that_ends_leaves_no_copy() -> None:
    house, long = crowded()
    house.until_moves()
    long.finish("abort")
    house.copy()
    house.step()
    house.step()
    assert sum(house.ledger.free_blocks) == sum(house.ledger.num_blocks)


@pytest.mark.parametrize("end", ["", "length"], ids=["decodes", "retained"])
def test_one_that_not_all_know_to_lie_elsewhere_is_computed_again_behind_a_loss(end: str) -> None:
    house, long = crowded(page=3 * STRIPE)  # so none but the long one leaves anything
    house.until_moves()
    house.copy()
    flight = house.scheduler.schedule()
    assert any(isinstance(op, CommitMigration) for op in flight[0].plan.ops)
    if end:
        long.finish(end)
        flight += house.scheduler.schedule()
        assert house.scheduler.features[PrefixCache].num_retained == 1
    assert not house.scheduler.roll_back(flight, lambda keep: keep.length)
    assert (long in house.scheduler.waiting) is not bool(end)


@pytest.mark.parametrize("options", [{"ranks": 0}, {"window": STRIPE}], ids=str)
def test_nothing_moves_where_nothing_may(options: dict[str, int]) -> None:
    still, _ = crowded(**options)
    for _ in range(12):
        still.step()
    assert not still.ops
    crowded()[0].until_moves()


@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "prolonged"])
def test_what_is_retained_at_home_gives_way_unless_it_was_asked_to_stay(asked: bool) -> None:
    """A pool that has served for a while is full of it."""
    house = House([6 * STRIPE, 6 * STRIPE], page=STRIPE)
    for _ in range(2):
        house.add(4 * STRIPE - 3, 2).options = CacheOptions(retention_s=60.0 * asked)
    long = house.add(4 * STRIPE, 30)
    for _ in range(3):
        house.step()
    assert long.location.moved_runs
    assert house.scheduler.features[PrefixCache].num_retained == 1 + asked, "one is in the way"
    house.step()
    assert any(isinstance(op, CopyStripes) for op in house.ops) is not asked


# Where sequences lie whole:
def whole(blocks: list[int]) -> BlockTables:
    partition = by_request([4], [1.0] * len(blocks))
    lanes = [partition.pieces(0, w)[0].kv_shards for w in range(len(blocks))]
    return BlockTables([0] * len(blocks), blocks, 4, lanes)


def test_all_of_a_sequence_goes_with_its_last_block_that_is_not_full() -> None:
    held = whole([20, 20])
    held.apply(plan(0, New(1), rows=[RowRange(1, 0, 14, KvLocation(0))]))
    held.apply(plan(1, CopyStripes(5, 1, 0, 0, 1)))
    assert held.free_blocks == (16, 16)
    copy = list(held.block_table(1, 5)[1])
    held.apply(plan(2, CommitMigration(1, 5, KvLocation(1)), rows=[RowRange(1, 14, 1, KvLocation(1))]))
    assert held.free_blocks == (20, 16)
    assert list(held.block_table(1, 1)[1]) == copy
    held.check_integrity()


@pytest.mark.parametrize(
    ("op", "rows"),
    [
        (CopyStripes(6, 9, 0, 0, 1), []), (CopyStripes(6, 1, 0, 1, 1), []), (CopyStripes(6, 1, 1, 0, 1), []),
        (CopyStripes(6, 1, 0, 0, 2), []), (CommitMigration(1, 5, KvLocation(0)), []), (CommitMigration(1, 2,
        KvLocation(1)), []), (CommitMigration(1, 5, KvLocation(1)), [RowRange(1, 14, 1, KvLocation(0))]),
    ],
)  # fmt: skip
def test_of_whole_sequences_too_what_cannot_be_is_refused(op: SequenceOp, rows: list[RowRange]) -> None:
    """5 is a copy of 1; 2 is another sequence. One that has had rows since its copy began is none that adopts it."""
    held = whole([20, 20])
    held.apply(plan(0, New(1), New(2), rows=[RowRange(1, 0, 14, KvLocation(0)), RowRange(2, 0, 3, KvLocation(1))]))
    held.apply(plan(1, CopyStripes(5, 1, 0, 0, 1)))
    if rows:
        held.apply(plan(2, rows=rows))
    free = held.free_blocks
    with pytest.raises(PlanError):
        held.apply(plan(3, op))
    assert held.free_blocks == free
    held.check_integrity()


class Exit(House):
    """Sequences of which some lie on memory worker 1, which is to go."""

    def __init__(self, blocks: list[int], prompts: list[int], page: int = 0) -> None:
        self.ledger, self.workers = whole(blocks), whole(blocks)
        self.scheduler = moving(self.ledger, ranks=1, page=page)
        self.ops, self.requests = list[SequenceOp](), count()
        self.all = [self.add(prompt, 30) for prompt in prompts]
        self.step()

    def leave(self) -> None:
        self.scheduler.cordoned.add(1)
        self.scheduler.features[KvMigration].closing_shards.add(1)

    @property
    def there(self) -> list[Sequence]:
        return [s for s in self.scheduler.running if s.location.kv_shard == 1 and not s.finished]


def test_whole_sequences_leave_one_by_one_and_the_rest_decodes() -> None:
    house = Exit([40, 40], [9, 9, 9, 9])
    assert len(house.there) == 2
    house.leave()
    for left in (2, 1):
        move = house.until_moves()
        (moving,) = [s for s in house.all if s.transfer.is_migrating]
        rows = {s: s.num_computed_tokens for s in house.all}
        house.step()
        assert moving.id == move.source
        assert [s for s in house.all if s.num_computed_tokens == rows[s]] == [moving], "all others go on"
        assert len(house.there) == left
        assert not house.scheduler.features[KvMigration].is_drained(house.scheduler.running)
        assert house.scheduler.has_transfers
        house.copy()
        house.step()
        assert not moving.transfer.is_migrating
        assert moving.location == KvLocation(0)
    assert house.scheduler.features[KvMigration].is_drained(house.scheduler.running)
    assert not house.there


def test_they_have_left_once_all_know_where_the_last_one_lies() -> None:
    house = Exit([40, 40], [9, 9])
    house.leave()
    house.until_moves()
    house.copy()
    (step,) = house.scheduler.schedule()
    assert any(isinstance(op, CommitMigration) for op in step.plan.ops)
    assert not house.there
    assert not house.scheduler.features[KvMigration].is_drained(house.scheduler.running), "it would be computed again"
    house.scheduler.on_step_done(step)
    assert house.scheduler.features[KvMigration].is_drained(house.scheduler.running)


@pytest.mark.parametrize("how", ["fails", "ends", "preempted"])
def test_where_a_copy_of_a_whole_sequence_is_not_to_be_it_goes_on_as_it_was(how: str) -> None:
    house = Exit([40, 40], [9, 9])
    house.leave()
    house.until_moves()
    (moving,) = house.there
    if how == "ends":
        moving.finish("abort")
    if how == "preempted":
        assert not house.scheduler.roll_back([], lambda keep: 0)
        assert not moving.transfer.is_migrating
        return
    house.copy("the link ended" if how == "fails" else "")
    house.step()
    assert not any(isinstance(op, CommitMigration) for op in house.ops)
    for _ in range(3):
        house.step()
    assert (moving.num_computed_tokens > 12) == (how == "fails"), "it decodes where it was"
    assert house.scheduler.features[KvMigration].is_drained(house.scheduler.running), (
        "the rest moves as the epoch changes"
    )
    assert sum(isinstance(op, CopyStripes) for op in house.ops) == 1


def test_who_finds_no_room_elsewhere_stays_and_what_is_retained_gives_way() -> None:
    full = Exit([12, 12], [36, 36])
    full.leave()
    for _ in range(3):
        full.step()
    assert not full.ops
    assert full.scheduler.features[KvMigration].is_drained(full.scheduler.running)
    house = Exit([16, 16], [36], page=4)
    (first,) = house.all
    assert first.location.kv_shard == 0
    first.finish("length")
    house.step()
    assert house.scheduler.features[PrefixCache].num_retained == 1
    house.scheduler.cordoned.add(0)
    house.add(36, 20)
    house.step()
    house.scheduler.cordoned.clear()
    house.leave()
    assert len(house.there) == 1
    house.until_moves()
    assert house.scheduler.features[PrefixCache].num_retained == 0


def test_nothing_leaves_before_its_prompt_is_there() -> None:
    house = Exit([40, 40], [9, 9])
    (there,) = house.there
    there.set_transfer(unstored_chunks=1)
    house.leave()
    for _ in range(3):
        house.step()
    assert not house.ops
    assert not house.scheduler.features[KvMigration].is_drained(house.scheduler.running)
    there.set_transfer(unstored_chunks=0)
    assert house.until_moves().source == there.id
