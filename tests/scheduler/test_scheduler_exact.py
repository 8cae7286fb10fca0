"""The scheduler's decisions at their edges: the exact block, token and round at which they change.

Covers: lamina/protocol/sparse_layers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from scheduled import DoneRounds, make, with_prefill

from lamina.config.partition import KvShards
from lamina.config.sparsity import SparsityOptions
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.sparse_layers import max_kept_tokens
from lamina.protocol.step_plan import Free, New, RowRange, StepPlan
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.rotation.pipeline import route
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence


def tables(blocks: int, block_size: int = 4) -> BlockTables:
    return BlockTables([0], [blocks], block_size)


def serve(scheduler: Scheduler, steps: Iterable[ScheduledStep]) -> None:
    """All of a round, with a token for each draw."""
    for step in steps:
        for sequence in step.sampled_sequences:
            sequence.append(7)
        scheduler.on_step_done(step)


def counts(steps: Iterable[ScheduledStep]) -> list[dict[int, int]]:
    """Rows by request, of each batch."""
    return [{s.request_id: r.count for s, r in zip(step.sequences, step.plan.rows, strict=True)} for step in steps]


def test_rounds_are_counted_and_all_but_the_last_step_of_a_round_say_that_more_come() -> None:
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=9, num_batches=3)
    for i in range(3):
        scheduler.add(make(i, 4, 20))
    for number in range(4):
        steps = scheduler.schedule()
        assert [step.plan.step for step in steps] == [number] * 3
        assert [step.plan.has_more for step in steps] == [True, True, False]
        serve(scheduler, steps)


@pytest.mark.parametrize("replicas", [0, 1, 2, 3, 5])
def test_steps_take_the_way_of_the_pipeline_over_the_replicas_that_there_are(replicas: int) -> None:
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=9, num_batches=3, num_layers=4)
    scheduler.begin_epoch(0, replicas)
    for i in range(3):
        scheduler.add(make(i, 4, 20))
    for number in range(3):
        steps = scheduler.schedule()
        ways = [(step.plan.send_from, step.plan.reply_to) for step in steps]
        assert ways == [route(batch, number, 4, 3, replicas) for batch in range(3)]
        serve(scheduler, steps)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_prompt_is_one_chunk_however_short(tokens: int) -> None:
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=9)
    scheduler.add(make(0, tokens, 5))
    assert counts(scheduler.schedule()) == [{0: tokens}]


def test_a_prompt_is_admitted_to_its_very_last_block() -> None:
    for blocks, admitted in ((3, True), (2, False)):
        scheduler = Scheduler(tables(blocks), max_num_seqs=9, prefill_chunk=99)
        scheduler.add(make(0, 12, 1))
        assert len(scheduler.schedule()) == admitted
        assert scheduler.num_waiting == (not admitted)


def test_a_prompt_under_way_keeps_what_it_will_still_take_and_no_more() -> None:
    """10 blocks, of which one prompt takes 6 in three rounds: one of 16 tokens fits as well, one of 17 does not."""
    for more, admitted in ((16, True), (17, False)):
        scheduler = Scheduler(tables(10), max_num_seqs=9, prefill_chunk=8)
        scheduler.add(make(0, 23, 1))
        first = scheduler.schedule()
        assert counts(first) == [{0: 8}]
        scheduler.add(make(1, more, 1))
        for taken in (8, 7):  # the second chunk fills the budget, the third leaves a token of it
            assert scheduler.num_waiting == 1
            serve(scheduler, first)
            first = scheduler.schedule()
            expected = {0: taken, 1: 1} if taken == 7 and admitted else {0: taken}
            assert counts(first) == [expected]


def test_a_prompt_waits_for_blocks_that_running_prompts_will_take() -> None:
    """Two batches: in the round in which one goes on with its prompt, the other's new one must leave room for it."""
    for blocks, admitted in ((10, True), (9, False)):
        scheduler = Scheduler(tables(blocks), max_num_seqs=9, prefill_chunk=8, num_batches=2)
        scheduler.add(make(0, 24, 1))
        serve(scheduler, scheduler.schedule())
        scheduler.add(make(1, 16, 1))
        assert counts(scheduler.schedule()) == ([{0: 8}, {1: 8}] if admitted else [{0: 8}])


class Ledger:
    """Counts of blocks as a test gives them: by sequence's place and rows."""

    def __init__(
        self, free: list[int], held: dict[int, list[int]], lanes: tuple[Any, ...] = (KvShards(), KvShards())
    ) -> None:
        self.kv_shards = lanes
        self.placement = KvPlacement(len(held), 0)
        self.free = free
        self.held = held  # KV shard of a place -> blocks of a sequence there
        self.needed = [0, 0]
        self.windows = (0, 0)
        self.applied: list[StepPlan] = []
        self.rows_of_a_step = set[int]()  # whose tokens it received
        self.refuses = 0  # so many plans in a row

    @property
    def num_kv_shards(self) -> int:
        return len(self.held)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        return tuple(self.free)

    def max_blocks(self, place: KvLocation, length: int, max_rows: int) -> list[int]:
        self.rows_of_a_step.add(max_rows)
        return self.held[place.kv_shard] if length else [0] * len(self.free)

    def blocks_needed(self, rows: Iterable[RowRange]) -> tuple[int, ...]:
        return tuple(self.needed)

    def can_apply(self, plan: StepPlan) -> bool:
        self.refuses -= 1
        return self.refuses < 0

    def apply(self, plan: StepPlan) -> None:
        self.applied.append(plan)


def running(ledger: Ledger, lanes: list[int], num_batches: int = 1) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler whose sequences run, each in its KV shard, one step done."""
    scheduler = Scheduler(ledger, max_num_seqs=9, prefill_chunk=99, num_batches=num_batches)
    sequences = [make(i, 4, 20) for i in range(len(lanes))]
    for sequence, lane in zip(sequences, lanes, strict=True):
        scheduler.add(sequence)
        steps = scheduler.schedule()
        sequence.location = KvLocation(lane)
        serve(scheduler, steps)
    return scheduler, sequences


@pytest.mark.parametrize(
    ("free", "needed", "victim"),
    [
        ([0, 5], [1, 1], 1),  # group 0 is short: the newest that holds blocks of it
        ([1, 0], [1, 1], 2),  # what is needed in group 0 is there to the last block; group 1 is short
        ([0, 0], [1, 1], 2),
        ([1, 0], [1, 1], -2),
    ],
)
def test_whose_blocks_help(free: list[int], needed: list[int], victim: int) -> None:
    """The newest one lies in KV shard 1; with a negative victim the one before it does."""
    ledger = Ledger([99, 99], {0: [1, 0], 1: [0, 1]})
    scheduler, sequences = running(ledger, [0, 0, 1] if victim > 0 else [0, 1, 0])
    victim %= 3
    ledger.free, ledger.needed, ledger.refuses = free, needed, 1
    (step,) = scheduler.schedule()
    assert [s.id < 0 for s in sequences] == [i == victim for i in range(3)]
    assert [op for op in step.plan.ops if isinstance(op, Free)] == [Free(victim)]


def test_where_nobody_of_the_batch_has_such_blocks_its_newest_one_waits() -> None:
    ledger = Ledger([99, 99], {0: [1, 0], 1: [0, 1]})
    scheduler, sequences = running(ledger, [0, 0])
    ledger.free, ledger.needed, ledger.refuses = [5, 0], [1, 1], 1
    scheduler.schedule()
    assert [s.id < 0 for s in sequences] == [False, True]
    assert scheduler.num_preemptions == 1


def test_a_batch_that_is_empty_keeps_nothing_yet() -> None:
    """It is off by 2 * 2 / 0.21 in one place, by 4 * 4 / 0.79 in the other; with a block of each group it is not so."""
    lanes = (SimpleNamespace(portion=0.21), SimpleNamespace(portion=0.79))
    scheduler = Scheduler(Ledger([99, 99], {0: [0, 4], 1: [2, 0]}, lanes), max_num_seqs=9, prefill_chunk=99)
    sequence = make(0, 4, 5)
    scheduler.add(sequence)
    (step,) = scheduler.schedule()
    assert sequence.location == KvLocation(1)
    assert step.plan.ops == [New(0)]


def test_each_preemption_is_counted() -> None:
    ledger = Ledger([99, 99], {0: [1, 0]})
    scheduler, _ = running(ledger, [0, 0, 0])
    ledger.free, ledger.needed, ledger.refuses = [0, 0], [1, 0], 2
    (step,) = scheduler.schedule()
    assert counts([step]) == [{0: 1}]
    assert scheduler.num_preemptions == 2


def test_the_chunk_of_a_prompt_under_way_leaves_the_rest_to_the_next_ones() -> None:
    """The prompt takes its last two of 8 tokens a round; one of 6 fills them, and one token more is too many."""
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=8)
    scheduler.add(make(0, 10, 1))
    serve(scheduler, scheduler.schedule())
    for i, length in enumerate((6, 1)):
        scheduler.add(make(1 + i, length, 1))
    assert counts(scheduler.schedule()) == [{0: 2, 1: 6}]
    assert scheduler.num_waiting == 1


def test_a_prompt_at_a_prefill_worker_keeps_what_it_will_still_take() -> None:
    """20 tokens, of which two chunks of 8 are granted: four blocks are taken, and a fifth will be."""
    for blocks, admitted in ((6, True), (5, False)):
        scheduler = Scheduler(
            tables(blocks), max_num_seqs=9, prefill_chunk=8, features=with_prefill(PrefillDispatcher(1, 8, 1))
        )
        scheduler.add(make(0, 20, 1))
        serve(scheduler, scheduler.schedule())
        assert len(scheduler.take_side_steps()) == 2
        scheduler.add(make(1, 1, 5))
        scheduler.schedule()
        assert scheduler.num_running == 1 + admitted


def test_the_last_token_of_a_sequence_takes_no_block() -> None:
    scheduler = Scheduler(tables(2), max_num_seqs=9, prefill_chunk=8)
    scheduler.add(make(0, 4, 1))
    scheduler.schedule()  # its only token is being drawn
    scheduler.add(make(1, 4, 1))
    assert counts(scheduler.schedule()) == [{1: 4}]


def test_the_last_token_of_a_prompt_keeps_its_block() -> None:
    """The prompt has 17 tokens: 8 are stored, 8 come in this round, and one will take a fifth block."""
    for blocks, admitted in ((6, True), (5, False)):
        scheduler = Scheduler(tables(blocks), max_num_seqs=9, prefill_chunk=8, num_batches=2)
        scheduler.add(make(0, 17, 1))
        serve(scheduler, scheduler.schedule())
        scheduler.add(make(1, 4, 1))
        assert counts(scheduler.schedule()) == ([{0: 8}, {1: 4}] if admitted else [{0: 8}])


def test_a_long_prompt_before_it_does_not_stop_a_sequence_that_decodes() -> None:
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=8)
    scheduler.add(make(5, 4, 50))
    serve(scheduler, scheduler.schedule())
    scheduler.add(make(1, 99, 5))
    serve(scheduler, scheduler.schedule())
    for num_batches in (2, 1):  # dealt anew, the older request comes first
        scheduler.set_num_batches(num_batches)
        serve(scheduler, scheduler.schedule())
    assert counts(scheduler.schedule()) == [{1: 8, 5: 1}]


def test_what_is_known_of_a_round_that_is_done() -> None:
    done = DoneRounds()
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=9, features=[done])
    sequence = make(0, 4, 20)
    scheduler.add(sequence)
    rounds = [scheduler.schedule(), scheduler.schedule()]
    for (step,) in rounds:
        sequence.append(7)
        scheduler.on_step_done(step)
    assert [(r.rows, r.tokens, r.is_decode_only) for r in done.each if r] == [(4, 5, False), (1, 6, True)]
    sequence.finish("abort")
    last = make(1, 4, 20)
    scheduler.add(last)
    (step,) = scheduler.schedule()
    last.finish("abort")
    (empty,) = scheduler.schedule()
    assert (empty.plan.num_rows, empty.plan.ops) == (0, [Free(1)])
    scheduler.on_step_done(step)
    scheduler.on_step_done(empty)
    found = done.each[-1]
    assert found is not None
    assert (found.rows, found.is_decode_only) == (0, False), "nothing was done in it"


def test_a_step_has_a_row_of_each_sequence_and_a_chunk_at_most() -> None:
    ledger = Ledger([99, 99], {0: [1, 0]})
    running(ledger, [0])
    assert ledger.rows_of_a_step == {9 + 99}


def test_without_more_words_plans_are_of_view_0_and_of_one_layer() -> None:
    scheduler = Scheduler(tables(99), max_num_seqs=9, prefill_chunk=9, num_batches=3)
    for i in range(3):
        scheduler.add(make(i, 4, 20))
    plans = [step.plan for step in scheduler.schedule()]
    assert [plan.epoch for plan in plans] == [0] * 3
    assert [(plan.send_from, plan.reply_to) for plan in plans] == [route(batch, 0, 1, 3, 0) for batch in range(3)]
    assert scheduler.epoch == 0
    scheduler.begin_epoch(5, 0)
    assert scheduler.epoch == 5


@pytest.mark.parametrize("stripe", [0, 1])
def test_how_many_sequences_fit_counts_every_lane(stripe: int) -> None:
    """10 tokens are 3 blocks. Each of two lanes has 9: three sequences fit in it, or six that lie in both."""
    lanes = [KvShards((True, False)), KvShards((False, True))]
    ledger = BlockTables([0, 0], [9, 9], 4, lanes, stripe)
    assert Scheduler(ledger, max_num_seqs=8, prefill_chunk=8).max_sequences_of(10) == 6.0
    assert Scheduler(tables(9), max_num_seqs=8, prefill_chunk=8).max_sequences_of(10) == 3.0


@pytest.mark.parametrize(("length", "fits"), [(400, 8.0), (1000, 3.6), (100, 21.92)])
def test_sequences_that_lose_blocks_take_their_budget_and_the_last_one_all(length: int, fits: float) -> None:
    """The prompt of 400 tokens takes 100 blocks in full layers and 64 in sparse ones, where the last to come has 100
    too: 7 * 64 + 100.
    """
    options = SparsityOptions(kv_sparsity="evict", kv_budget=128)  # and 128 until it drops again
    ledger = BlockTables([0, 0], [900, 548], 4, sparse=[False, True])
    allocator = KvAllocator(ledger, 16, max_kept_tokens=max_kept_tokens(options))
    assert Scheduler(ledger, max_num_seqs=8, prefill_chunk=8, allocator=allocator).max_sequences_of(length) == fits
