"""Plans and recurrent states: memory workers that follow them always have the version that a row reads.

Covers: lamina/scheduler/state_ledger.py, lamina/scheduler/kv_manager/hybrid_prefix_cache.py.
"""

from __future__ import annotations

import random

import pytest

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.blocks.state_versions import ZEROS, StateVersions
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Fork, New, PrefillGrant, RowRange, StateRows, StepPlan, SurvivingKv
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.feature import Feature, NewMemory
from lamina.scheduler.kv_manager.hybrid_prefix_cache import HybridPrefixCache
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.prefill_placement import PrefillPlacement
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.state_ledger import StateLedger
from lamina.scheduler.surviving_kv import StateReports, SurvivingTokens

SEQUENCES, PAGE, DRAWN = 4, 4, 7
SYSTEM = [*range(100, 110)]


def build(
    slots: int = 5 * SEQUENCES,
    *,
    page: int = PAGE,
    num_batches: int = 1,
    exact: bool = True,
    prefill: PrefillDispatcher | None = None,
) -> Scheduler:
    tables = BlockTables([0], [400], PAGE)
    ledger = StateLedger([KvShards(), KvShards(), None], slots)
    prefixes = HybridPrefixCache(ledger, tables, page, exact=exact, prompts_only=not exact)
    features: list[Feature] = [prefixes, RecurrentStates(prefixes)]
    if prefill:
        features = [prefill, *features, PrefillPlacement(prefill, prefixes)]
    return Scheduler(
        tables, max_num_seqs=SEQUENCES, prefill_chunk=8, num_batches=num_batches, features=features, aligned=not exact
    )


def ask(scheduler: Scheduler, request: int, prompt: list[int], outputs: int = 3) -> Sequence:
    params, limit = SamplingParams(max_tokens=outputs), len(prompt) + outputs
    sequence = Sequence(request, params, 0, prompt, CompletionOutput(0), limit, frozenset())
    scheduler.add(sequence)
    return sequence


def finish(scheduler: Scheduler, step: ScheduledStep) -> None:
    for sequence in step.sampled_sequences:
        if not sequence.finished:
            sequence.append(DRAWN)
    scheduler.on_step_done(step)


def serve(scheduler: Scheduler) -> list[ScheduledStep]:
    """Run all steps at once. Returns them."""
    steps = list[ScheduledStep]()
    while scheduler.running or scheduler.waiting:
        new = scheduler.schedule()
        for step in new:
            finish(scheduler, step)
        steps += new
    return steps


class Worker:
    """Versions of states whose contents are the tokens that they have taken in."""

    def __init__(self, slots: int) -> None:
        self.versions = StateVersions(slots, lambda row: True)
        self.contents: dict[int, list[int]] = {}

    def run(self, steps: list[ScheduledStep]) -> None:
        """Run a round."""
        begun = [(step, self._begin(step.plan)) for step in steps]
        for step, segments in begun:
            tokens = [DRAWN if token < 0 else token for token in step.tokens]
            for row, sequence, (first, rows, prompt, read, write) in zip(
                step.plan.rows, step.sequences, segments, strict=True
            ):
                had = [] if read == ZEROS else self.contents[read]
                assert had == sequence.tokens[: row.first], "a row continues the state of its own tokens"
                assert prompt == min(max(len(sequence.prompt) - row.first, 0), rows)
                self.contents[write] = had + tokens[first : first + rows]
        for step in steps:
            self.versions.commit(step.plan.rows)

    def _begin(self, plan: StepPlan) -> list[tuple[int, ...]]:
        self.versions.check(plan)
        return list(self.versions.begin(plan))


def test_ops_name_the_oldest_version_and_the_rows_of_the_prompt() -> None:
    scheduler = build(page=0)
    ask(scheduler, 1, [*range(10)], 9)
    steps = [scheduler.schedule()[0], scheduler.schedule()[0]]
    finish(scheduler, steps[0])
    steps.append(scheduler.schedule()[0])
    named = [[op for op in step.plan.ops if isinstance(op, StateRows)] for step in steps]
    number = steps[0].plan.rows[0].sequence
    assert named == [[StateRows(number, 0, 8)], [StateRows(number, 0, 2)], [StateRows(number, 8, 0)]]


def hits(scheduler: Scheduler, *prompts: list[int]) -> list[int]:
    """Serve prompts one after another. Returns the cached tokens of each."""
    cached = list[int]()
    for number, prompt in enumerate(prompts):
        sequence = ask(scheduler, number, prompt)
        serve(scheduler)
        cached.append(sequence.num_cached_tokens)
    return cached


def test_a_third_prompt_begins_where_the_second_one_left_the_first() -> None:
    prompts = [[*SYSTEM, n, n + 1, n + 2] for n in (1, 11, 21)]
    assert hits(build(), *prompts) == [0, 0, len(SYSTEM)]
    assert hits(build(exact=False), *([*SYSTEM, n, *range(9)] for n in (1, 11, 21))) == [0, 0, 8]
    assert hits(build(page=0), *prompts) == [0, 0, 0]


def test_prompts_that_come_together_share_what_the_first_one_computes() -> None:
    scheduler = build()
    each = [ask(scheduler, n, [*SYSTEM, n, n, n]) for n in range(3)]
    rows = [(r.first, r.count) for step in serve(scheduler) for r in step.plan.rows if r.first < len(SYSTEM)]
    assert [s.num_cached_tokens for s in each] == [0, len(SYSTEM), len(SYSTEM)]
    assert rows == [(0, 8), (8, 2)], "the shared tokens are computed once, and a step ends after them"


def test_equal_prompts_share_all_but_the_last_token() -> None:
    assert hits(build(), SYSTEM, SYSTEM, SYSTEM, SYSTEM) == [0, 0, 9, 9]


def test_a_turn_begins_after_all_of_the_one_before_it() -> None:
    answer = [DRAWN] * 3
    turns = [SYSTEM, [*SYSTEM, *answer, 5], [*SYSTEM, *answer, 5, *answer, 6], [*SYSTEM, 8, 8]]
    assert hits(build(), *turns) == [0, 12, 16, 10], "the last one edits the first answer: it begins after its prompt"


@pytest.mark.parametrize("exact", [True, False])
def test_a_preempted_prompt_whose_answer_is_part_of_another_prompt_goes_on(exact: bool) -> None:
    scheduler = build(exact=exact)
    first = ask(scheduler, 0, SYSTEM, 30)
    while first.num_output_tokens < 10:
        for step in scheduler.schedule():
            finish(scheduler, step)
    ask(scheduler, 1, [*first.tokens, 1, 2, 3, 4, 5])
    while scheduler.num_unfinished + scheduler.num_waiting > 1:
        for step in scheduler.schedule():
            finish(scheduler, step)
    scheduler.preempt(scheduler.batches[0], first)
    scheduler.waiting.append(first)
    serve(scheduler)
    assert first.num_cached_tokens <= len(first.prompt)
    assert first.tokens == [*SYSTEM, *[DRAWN] * 30]


def test_where_answers_differ_from_prompts_a_preempted_one_shares_nothing_after_its_own_prompt() -> None:
    scheduler = build(exact=False)
    first = ask(scheduler, 0, SYSTEM, 30)
    while first.num_output_tokens < 10:
        finish(scheduler, scheduler.schedule()[0])
    other = ask(scheduler, 1, first.tokens[: 4 * PAGE])
    while not other.finished:
        finish(scheduler, scheduler.schedule()[0])
    scheduler.preempt(scheduler.batches[0], first)
    scheduler.waiting.append(first)
    serve(scheduler)
    assert first.num_cached_tokens == 2 * PAGE


def chunks_of(steps: list[ScheduledStep]) -> list[tuple[int, int, list[int]]]:
    """Return the first token and the number of tokens of each chunk, and the states that its worker sends."""
    ops = [next(op for op in step.plan.ops if isinstance(op, StateRows)) for step in steps]
    return [
        (step.plan.rows[0].first, step.plan.rows[0].count, op.snapshots) for step, op in zip(steps, ops, strict=True)
    ]


def serve_chunks(scheduler: Scheduler) -> tuple[list[ScheduledStep], list[PrefillGrant]]:
    """Run all steps, those of prefill workers too. Returns the latter, and their grants."""
    chunks, grants = list[ScheduledStep](), list[PrefillGrant]()
    while scheduler.running or scheduler.waiting:
        steps = scheduler.schedule()
        grants += [op for step in steps for op in step.plan.ops if isinstance(op, PrefillGrant)]
        for step in (*scheduler.take_side_steps(), *steps):
            chunks += [step] * (step.side_worker is not None)
            finish(scheduler, step)
    return chunks, grants


def test_chunks_of_prefill_workers_bring_states_where_a_prompt_ends_and_where_another_leaves_it() -> None:
    scheduler = build(prefill=PrefillDispatcher(1, 8, 1))
    each = [ask(scheduler, n, [*SYSTEM, n, n, n]) for n in range(2)]
    chunks, grants = serve_chunks(scheduler)
    assert chunks_of(chunks) == [(0, 8, []), (8, 2, [10]), (10, 3, [13])]
    assert [(g.first, g.has_states) for g in grants] == [(0, False), (8, True), (10, True)]
    assert [op.prompt for step in chunks for op in step.plan.ops if isinstance(op, StateRows)] == [8, 2, 3]
    assert [s.num_cached_tokens for s in each] == [0, 10], "compute workers have the rest of the second one"


def test_without_prefix_caching_a_state_comes_where_a_prompt_ends() -> None:
    scheduler = build(page=0, prefill=PrefillDispatcher(1, 8, 1))
    ask(scheduler, 1, [*SYSTEM, 1])
    assert chunks_of(serve_chunks(scheduler)[0]) == [(0, 8, []), (8, 3, [11])]


def test_a_state_counts_once_it_has_come() -> None:
    scheduler = build(prefill=PrefillDispatcher(1, 8, 1))
    first = ask(scheduler, 0, SYSTEM)
    (step,), chunks = scheduler.schedule(), scheduler.take_side_steps()
    second = ask(scheduler, 1, [*SYSTEM, 1, 2, 3])
    ledger = scheduler.features[HybridPrefixCache].states
    finish(scheduler, step)
    scheduler.schedule()
    assert not ledger.has(first.id, len(SYSTEM))
    assert second in scheduler.waiting, "the first one has planned to share its state"
    for chunk in (*chunks, *scheduler.take_side_steps()):
        finish(scheduler, chunk)
    assert ledger.has(first.id, len(SYSTEM))


def test_a_hit_needs_a_snapshot_and_not_pages_alone() -> None:
    """Pages of the first prompt are there, but no state ends where they do."""
    scheduler = build()
    assert hits(scheduler, [*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5, 6]) == [0, 0]
    assert scheduler.features[HybridPrefixCache].num_retained == 2


def test_without_room_retained_sequences_go_first_and_then_snapshots_of_running_ones() -> None:
    scheduler = build(slots=3 * SEQUENCES)
    assert hits(scheduler, *([n, *range(8)] for n in range(20, 30))) == [0] * 10
    prefixes = scheduler.features[HybridPrefixCache]
    assert 0 < prefixes.num_retained < 7, "with two snapshots each, no more have room"
    for request in range(SEQUENCES):
        ask(scheduler, request, [*SYSTEM, request, request, request], outputs=20)
    kept, worker = list[list[int]](), Worker(3 * SEQUENCES)
    worker.versions.reconcile([])
    scheduler.roll_back([], lambda keep: 0)  # the worker begins without any state
    while scheduler.running or scheduler.waiting:
        for step in scheduler.schedule():
            worker.run([step])
            finish(scheduler, step)
            kept += [op.snapshots for op in step.plan.ops if isinstance(op, StateRows)]
    assert [10, 13] in kept, "where the prompts part, and where one ends"
    assert kept.count([]) > SEQUENCES, "two versions of each and their snapshots are one too many"


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_continues_the_state_of_its_tokens_through_forks_evictions_and_losses(
    seed: int, num_batches: int
) -> None:
    """Two workers follow the plans late and unevenly; at a loss, all that both have is where sequences continue."""
    slots = (3 if num_batches == 1 else 4) * SEQUENCES
    draw, scheduler = random.Random(seed), build(slots, num_batches=num_batches)
    workers, queues = [Worker(slots) for _ in range(2)], list[list[list[ScheduledStep]]]([[], []])
    known = [[draw.randint(0, 2) for _ in range(draw.randint(4, 14))] for _ in range(3)]
    pending, losses, forks = list[list[ScheduledStep]](), 0, 0
    for request in range(30):
        extra = [draw.randint(0, 2) for _ in range(draw.randint(1, 6))]
        ask(scheduler, request, [*draw.choice(known), *extra], draw.randint(1, 12))
    for _ in range(6000):
        if not (scheduler.running or scheduler.waiting):
            break
        if steps := scheduler.schedule():
            forks += sum(isinstance(op, Fork) for step in steps for op in step.plan.ops)
            pending.append(steps)
            for queue in queues:
                queue.append(steps)
        for worker, queue in zip(workers, queues, strict=True):
            if queue and draw.random() < 0.7:
                worker.run(queue.pop(0))
        while pending and all(pending[0] not in queue for queue in queues):
            for step in pending.pop(0):
                finish(scheduler, step)
        if draw.random() < 0.05:
            losses += 1
            reports = StateReports([KvShards()] * 2, [worker.versions.report() for worker in workers])
            keep = scheduler.roll_back([step for steps in pending for step in steps], reports.newest_common)
            pending, queues = [], [[], []]
            for worker in workers:
                worker.versions.reconcile(keep)
    assert losses > 1
    assert forks > 2
    assert not scheduler.running
    assert not scheduler.waiting


def test_a_sequence_continues_at_the_newest_version_of_all_its_workers() -> None:
    tables, shards = (
        BlockTables([0], [9], 4, [KvShards((True, True))]),
        (KvShards((True, False)), KvShards((False, True))),
    )
    tables.apply(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 9)]))
    written = [{1: 9}, {1: 9}]
    both = StateReports([KvShards(), KvShards()], [{1: [5, 7, 9]}, {1: [5, 7]}])
    assert SurvivingTokens(tables, [[0, 1]], written, both).count(SurvivingKv(1, 9)) == 7
    assert SurvivingTokens(tables, [[0, 1]], written, both).count(SurvivingKv(1, 6)) == 5
    lost = StateReports([KvShards(), KvShards()], [{1: [5, 7, 9]}, {}])
    assert SurvivingTokens(tables, [[0, 1]], written, lost).count(SurvivingKv(1, 9)) == 0
    apart = StateReports(shards, [{1: [9]}, {}])
    assert apart.newest_common(SurvivingKv(1, 9, KvLocation(0))) == 9
    assert apart.newest_common(SurvivingKv(1, 9, KvLocation(1))) == 0


def test_what_has_no_room_on_new_workers_is_left_behind_in_the_order_of_eviction() -> None:
    halves = [KvShards((True, False)), KvShards((False, True))]
    ledger = StateLedger([KvShards()], 8)
    ledger.adopt([SurvivingKv(1, 9, snapshots=[4, 9])])
    assert (ledger.has(1, 4), ledger.has(1, 9), ledger.has(1, 5)) == (True, True, False)
    ledger.replace(halves, 3)
    assert not ledger.has(1, 9)
    kept = [SurvivingKv(n, 9, KvLocation(n % 2), snapshots=[4, 9]) for n in range(4)] + [SurvivingKv(4, 2)]
    assert [each.sequence for each in ledger.adopt(kept)] == [0, 1, 4], "each half has room for three versions"


def test_as_many_sequences_run_on_new_workers_as_have_room_for_all_their_versions() -> None:
    scheduler = build(slots=3 * SEQUENCES)
    prefixes = scheduler.features[HybridPrefixCache]
    hits(scheduler, [*range(20, 32)])
    for request in range(3):
        ask(scheduler, request, [request, *SYSTEM], 9)
    finish(scheduler, scheduler.schedule()[0])
    keep = [*prefixes.retained(), *(SurvivingKv(s.id, s.num_computed_tokens) for s in scheduler.running)]
    for versions, running in ((2, 3), (3, 2), (7, 1)):
        prefixes.states = StateLedger([KvShards()], 7, versions)
        kept = [*keep]
        memory = NewMemory(BlockTables([0], [1], 1), SEQUENCES, state_shards=[KvShards()], state_slots=7)
        prefixes.relocate(kept, memory)
        assert [each.sequence for each in kept if not each.snapshots] == [s.id for s in scheduler.running][:running]
