"""The rounds that the scheduler takes back when the workers' epoch has changed, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from scheduled import make, with_prefill

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import ContextShift, Free, New, RowRange, SurvivingKv
from lamina.scheduler.batch import requeue
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import NO_TRANSFER, Sequence
from lamina.scheduler.sessions.session_table import SessionName

BLOCKS, BLOCK = 50, 4


def begin(
    num_batches: int = 1, prefill: PrefillDispatcher | None = None, lanes: int = 1
) -> tuple[Scheduler, BlockTables]:
    kept = (
        tuple(KvShards(tuple(i == lane for i in range(lanes))) for lane in range(lanes)) if lanes > 1 else (KvShards(),)
    )
    tables = BlockTables([0] * lanes, [BLOCKS] * lanes, BLOCK, kept)
    scheduler = Scheduler(
        tables,
        max_num_seqs=9,
        prefill_chunk=8,
        num_batches=num_batches,
        features=with_prefill(prefill) if prefill else [],
    )
    return scheduler, tables


def serve(scheduler: Scheduler, steps: Iterable[ScheduledStep]) -> None:
    """All of a round, with a token for each draw."""
    for step in steps:
        for sequence in step.sampled_sequences:
            sequence.append(7)
        scheduler.on_step_done(step)


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def all_of_it(keep: SurvivingKv) -> int:
    return keep.length


class Kept:
    """The KV that memory workers have of each sequence, and which workers were asked."""

    def __init__(self, **lengths: int) -> None:
        self.asked: list[SurvivingKv] = []
        self._lengths = {int(name.removeprefix("of_")): n for name, n in lengths.items()}

    def __call__(self, keep: SurvivingKv) -> int:
        self.asked.append(keep)
        return min(keep.length, self._lengths.get(keep.sequence, keep.length))


def rows(steps: Iterable[ScheduledStep]) -> list[list[RowRange]]:
    return [step.plan.rows for step in steps]


@pytest.mark.parametrize("order", [list, reversed])
def test_all_that_is_in_flight_is_scheduled_again(
    order: Callable[[list[ScheduledStep]], Iterable[ScheduledStep]],
) -> None:
    """In whatever order the steps are named: a decoding sequence, and one in the middle of its prompt."""
    scheduler, tables = begin()
    decoding, reading = make(0, 4, 20), make(1, 20, 20)
    add(scheduler, decoding)
    serve(scheduler, scheduler.schedule())
    add(scheduler, reading)
    serve(scheduler, scheduler.schedule())
    in_flight = [*scheduler.schedule(), *scheduler.schedule()]
    assert [s.num_computed_tokens for s in (decoding, reading)] == [7, 20]
    assert not scheduler.can_schedule_ahead

    kept = Kept()
    keep = scheduler.roll_back(order(in_flight), kept)
    assert keep == kept.asked == [SurvivingKv(0, 5), SurvivingKv(1, 8)]
    assert [(s.id, s.num_computed_tokens, s.num_output_placeholders) for s in (decoding, reading)] == [
        (0, 5, 0),
        (1, 8, 0),
    ]
    assert tables.free_blocks == (BLOCKS - 2 - 2,)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.can_schedule_ahead) == (2, 0, True)
    again = scheduler.schedule()
    assert rows(again) == [[RowRange(0, 5, 1), RowRange(1, 8, 8)]]
    assert [step.plan.step for step in again] == [4], "numbers of rounds never go back"
    assert again[0].plan.ops == []


def test_a_round_taken_back_is_not_waited_for() -> None:
    """LOOKAHEAD rounds may be queued after the first one that is scheduled again."""
    scheduler, _ = begin()
    add(scheduler, make(0, 4, 20))
    in_flight = [*scheduler.schedule(), *scheduler.schedule()]
    scheduler.roll_back(in_flight, all_of_it)
    again = [*scheduler.schedule(), *scheduler.schedule()]
    assert len(again) == 2
    assert scheduler.schedule() == []
    for left, step in zip((1, 0), again, strict=True):
        scheduler.on_step_done(step)
        assert len(scheduler.rounds_in_flight) == left


def test_who_has_nothing_is_computed_anew_under_another_id_oldest_first() -> None:
    scheduler, tables = begin(num_batches=2)
    running = [make(i, 4, 20) for i in range(4)]
    behind = make(9, 4, 20)
    add(scheduler, *running)
    for _ in range(2):
        serve(scheduler, scheduler.schedule())
    assert [len(b.running) for b in scheduler.batches] == [2, 2]
    for sequence in running:
        sequence.num_tokens_in_penalties = 2
    lost = [s for s in running if s.request_id != 1]
    add(scheduler, behind)
    kept = Kept(**{f"of_{s.id}": 0 for s in lost})
    keep = scheduler.roll_back([], kept)
    assert sorted(k.sequence for k in kept.asked) == [0, 1, 2, 3]
    assert keep == [SurvivingKv(1, 5)]
    assert tables.free_blocks == (BLOCKS - 2,)
    assert [b.running for b in scheduler.batches] == [[], [running[1]]]
    assert [(s.id, s.num_computed_tokens, s.num_tokens_in_penalties) for s in running] == [
        (-1, 0, -1),
        (1, 5, 2),
        (-1, 0, -1),
        (-1, 0, -1),
    ]
    assert scheduler.num_waiting == 4
    steps = [step for step in scheduler.schedule() if step.sequences]
    joined = sorted((sequence.id, sequence.request_id) for step in steps for sequence in step.sequences)
    assert joined == [(1, 1), (4, 0), (5, 2), (6, 3), (7, 9)]
    assert sorted(op.sequence for step in steps for op in step.plan.ops if isinstance(op, New)) == [4, 5, 6, 7]
    assert not any(isinstance(op, Free) for step in steps for op in step.plan.ops), "memory workers keep only `keep`"


def test_sequences_come_back_in_the_order_in_which_they_came() -> None:
    scheduler, _ = begin()
    sequences = [make(request, 4, 20) for request in (1, 3, 3, 3)]
    for sequence, index in zip(sequences, (0, 0, 1, 2), strict=True):
        sequence.output.index = index
    add(scheduler, *sequences)
    requeue(scheduler.waiting, scheduler.waiting.pop())  # as if the last one had been preempted
    scheduler.roll_back([], all_of_it)
    scheduler.schedule()
    serve(scheduler, scheduler.schedule())
    scheduler.schedule()
    assert [sequence.id for sequence in sequences] == [0, 1, 2, 3]


def test_what_is_there_in_part_is_kept_in_part() -> None:
    scheduler, tables = begin()
    sequence = make(0, 24, 20)
    add(scheduler, sequence)
    for _ in range(3):
        serve(scheduler, scheduler.schedule())
    assert sequence.num_computed_tokens == 24
    assert scheduler.roll_back([], Kept(of_0=8)) == [SurvivingKv(0, 8)]
    assert (sequence.id, sequence.num_computed_tokens) == (0, 8)
    assert tables.free_blocks == (BLOCKS - 2,)
    assert rows(scheduler.schedule()) == [[RowRange(0, 8, 8)]]


def test_aligned_pieces_end_at_multiples_of_a_chunk_wherever_they_begin() -> None:
    scheduler = Scheduler(BlockTables([0], [BLOCKS], BLOCK), max_num_seqs=9, prefill_chunk=8, aligned=True)
    add(scheduler, make(0, 24, 20))
    for first in (0, 8):
        steps = scheduler.schedule()
        assert rows(steps) == [[RowRange(0, first, 8)]]
        serve(scheduler, steps)
    scheduler.roll_back([], Kept(of_0=5))
    for first, count in ((5, 3), (8, 8), (16, 8)):
        steps = scheduler.schedule()
        assert rows(steps) == [[RowRange(0, first, count)]]
        serve(scheduler, steps)


def test_who_keeps_a_single_token_goes_on() -> None:
    scheduler, _ = begin()
    sequence = make(0, 4, 20)
    add(scheduler, sequence)
    serve(scheduler, scheduler.schedule())
    assert scheduler.roll_back([], Kept(of_0=1)) == [SurvivingKv(0, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_a_sequence_that_has_come_back_under_another_id_is_not_taken_back_by_its_old_step() -> None:
    scheduler, _ = begin()
    sequence = make(0, 4, 20)
    add(scheduler, sequence)
    (old,) = scheduler.schedule()
    scheduler.roll_back([], Kept(of_0=0))
    serve(scheduler, scheduler.schedule())
    assert (sequence.id, sequence.num_computed_tokens) == (1, 4)
    assert scheduler.roll_back([old], all_of_it) == [SurvivingKv(1, 4)]


def test_of_a_step_each_sequence_goes_back_to_its_own_first_row() -> None:
    """One of them has another id by now: those after it in the step are taken back all the same."""
    scheduler, _ = begin()
    sequences = [make(i, 2, 20) for i in range(3)]
    add(scheduler, *sequences)
    serve(scheduler, scheduler.schedule())
    (step,) = scheduler.schedule()
    assert [r.first for r in step.plan.rows] == [2, 2, 2]
    sequences[0].id = 77
    sequences[0].finish("abort")
    kept = Kept()
    assert scheduler.roll_back([step], kept) == [SurvivingKv(1, 2), SurvivingKv(2, 2)]
    assert kept.asked == [SurvivingKv(77, 3), SurvivingKv(1, 2), SurvivingKv(2, 2)]


def test_who_has_finished_is_let_go_and_holds_nothing() -> None:
    scheduler, tables = begin()
    sequences = [make(i, 4, 20) for i in range(2)]
    cancelled = make(5, 4, 20)
    add(scheduler, *sequences)
    serve(scheduler, scheduler.schedule())
    add(scheduler, cancelled)
    sequences[0].finish("abort")
    cancelled.finish("abort")
    assert scheduler.roll_back([], all_of_it) == [SurvivingKv(1, 4)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    assert tables.free_blocks == (BLOCKS - 1,)
    (step,) = scheduler.schedule()
    assert (step.sequences, step.plan.ops) == ([sequences[1]], [])


def test_a_sequence_is_kept_in_its_place() -> None:
    scheduler, tables = begin(lanes=2)
    sequences = [make(i, 4, 20) for i in range(2)]
    add(scheduler, *sequences)
    serve(scheduler, scheduler.schedule())
    assert [s.location for s in sequences] == [KvLocation(0), KvLocation(1)]
    kept = Kept()
    expected = [SurvivingKv(0, 4, KvLocation(0)), SurvivingKv(1, 4, KvLocation(1))]
    assert scheduler.roll_back([], kept) == expected
    assert kept.asked == expected
    assert tables.free_blocks == (BLOCKS - 1, BLOCKS - 1)


def test_each_batch_keeps_its_own() -> None:
    scheduler, tables = begin(num_batches=2)
    add(scheduler, *(make(i, 4, 20) for i in range(4)))
    serve(scheduler, scheduler.schedule())
    keep = scheduler.roll_back([], all_of_it)
    assert sorted((k.sequence, k.length) for k in keep) == [(i, 4) for i in range(4)]
    assert tables.free_blocks == (BLOCKS - 4,)


def test_a_prompt_that_a_prefill_worker_has_in_part_begins_anew() -> None:
    """Its first chunk is stored, and only that worker could continue it."""
    scheduler, tables = begin(prefill=PrefillDispatcher(1, 8, 1))
    sequence = make(0, 20, 5)
    add(scheduler, sequence)
    serve(scheduler, scheduler.schedule())
    first, second = scheduler.take_side_steps()
    scheduler.on_step_done(first)
    kept = Kept()
    assert scheduler.roll_back([second], kept) == []
    assert kept.asked == [SurvivingKv(0, 8)]
    assert (sequence.id, sequence.num_computed_tokens, sequence.transfer.on_side_worker) == (-1, 0, False)
    assert tables.free_blocks == (BLOCKS,)


def test_prompts_at_prefill_workers_begin_anew() -> None:
    """One has K and V of a chunk on their way, one waits there for its turn; both are dealt again."""
    scheduler, tables = begin(prefill=PrefillDispatcher(1, 8, 1))
    sequences = [make(i, 20, 5) for i in range(2)]
    add(scheduler, *sequences)
    steps = scheduler.schedule()
    chunks = scheduler.take_side_steps()
    assert [c.sequences for c in chunks] == [[sequences[0]]] * 2
    assert scheduler.roll_back([*steps, *chunks], all_of_it) == []
    assert tables.free_blocks == (BLOCKS,)
    assert [(s.id, s.transfer, s.num_computed_tokens) for s in sequences] == [(-1, NO_TRANSFER, 0)] * 2
    (step,) = scheduler.schedule()
    again = scheduler.take_side_steps()
    assert [c.sequences for c in again] == [[sequences[0]]] * 2
    assert [op for op in step.plan.ops if isinstance(op, New)] == [New(2), New(3)]
    assert again[0].plan.ops == [New(2)], "a prefill worker that is connected anew holds nobody"
    assert [c.plan.step for c in again] == [2, 3], "numbers of a worker's steps never go back"


def test_compute_workers_are_told_all_tokens_anew() -> None:
    """All tokens of running sequences, in all batches, are sent; those that wait are sent under their next
    id in any case.
    """
    scheduler, _ = begin(num_batches=2)
    sequences = [make(i, 4, 20) for i in range(2)]
    add(scheduler, *sequences)
    serve(scheduler, scheduler.schedule())
    for sequence in sequences:
        sequence.num_tokens_in_penalties = 1
    scheduler.resend_penalties()
    assert [s.num_tokens_in_penalties for s in sequences] == [-1, -1]


def test_all_steps_name_the_view_they_are_of() -> None:
    scheduler, _ = begin(prefill=PrefillDispatcher(1, 8, 1))
    for view in (3, 4):
        scheduler.epoch = view
        add(scheduler, make(view, 8, 20))
        steps = [*scheduler.schedule(), *scheduler.take_side_steps()]
        assert [step.plan.epoch for step in steps] == [view, view]


@pytest.mark.parametrize("done", [False, True])
def test_a_leaf_whose_shift_may_not_have_been_done_is_computed_anew(done: bool) -> None:
    """A plan without rows may count as done before it is applied; a memory worker that has all tokens where they were
    says how many these are, no more.
    """
    tables = BlockTables([0], [BLOCKS], BLOCK)
    prefixes = PrefixCache(tables, BLOCK)
    features = [prefixes, SessionCache(prefixes, tables, None)]
    scheduler = Scheduler(tables, max_num_seqs=9, prefill_chunk=99, features=features)
    before, turn = make(0, 20, 1), make(1, 14, 5)
    before.turn.session = turn.turn.session = prefixes.sessions.get_or_create(SessionName(b"", "mine"))
    add(scheduler, before)
    for _ in range(3):
        serve(scheduler, scheduler.schedule())
    assert prefixes.num_retained == 1
    turn.prompt[:] = turn.tokens[:] = [*before.tokens[:BLOCK], *before.tokens[3 * BLOCK : 5 * BLOCK], 7, 8]
    turn.turn.discarded_ranges = ((BLOCK, 3 * BLOCK),)
    add(scheduler, turn)
    (step,) = scheduler.schedule()
    assert step.plan.ops == [ContextShift(before.id, BLOCK, 2 * BLOCK)]
    if done:
        scheduler.on_step_done(step)
    assert scheduler.roll_back([] if done else [step], lambda keep: min(20, keep.length)) == []
    assert tables.free_blocks == (BLOCKS,)
    assert rows(scheduler.schedule()) == [[RowRange(turn.id, 0, len(turn.tokens))]]
