"""Reference decodes in the scheduler: they have rows in the steps of the sequences that they follow, and
end with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import make, with_prefill

from lamina.config.sparsity import ErrorBudget, SparsityOptions
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import SampledToken
from lamina.protocol.step_plan import SelectBlocks
from lamina.scheduler.conductor import ConductorConfig
from lamina.scheduler.conductor.overload import SloLimits
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sparsity.error_budget import CompletionErrors
from lamina.scheduler.sparsity.reference_decode import NUM_BUDGETS, ReferenceDecoder, ReferenceSequence
from lamina.scheduler.sparsity.selection import BlockSelection

SELECT = SparsityOptions(kv_sparsity="select", kv_budget=256)


def scheduler_of(blocks: int, shadows: ReferenceDecoder, *, batches: int = 1, chunk: int = 8) -> Scheduler:
    ledger = BlockTables([0], [blocks], 4)
    features = [*with_prefill(PrefillDispatcher(0, chunk, batches)), shadows, BlockSelection()]
    return Scheduler(ledger, max_num_seqs=12, prefill_chunk=chunk, num_batches=batches, features=features)


class Run:
    """A scheduler with one round in flight, as an engine has it; tokens count up. What shadows had to see."""

    def __init__(self, scheduler: Scheduler, sequences: Iterable[Sequence], apart: tuple[bool, float]) -> None:
        self.scheduler, self.apart = scheduler, apart
        self.before: dict[int, set[int]] = {}  # batch -> ids whose tokens its last step draws
        self.compared, self.said = 0, list[str]()
        self.witnesses = dict[int, CompletionErrors]()  # by request
        self.plans: list[ScheduledStep] = []
        for sequence in sequences:
            scheduler.add(sequence)

    def to_the_end(self) -> None:
        flying: list[list[ScheduledStep]] = []
        for _ in range(3000):
            if steps := self.scheduler.schedule():
                for step in steps:
                    self.check(step)
                flying.append(steps)
            if not flying:
                break
            if len(flying) > 1 or not steps:
                self.serve(flying.pop(0))
        assert not self.scheduler.waiting
        assert not self.scheduler.num_running

    def check(self, step: ScheduledStep) -> None:
        """No row has a token that its worker cannot know."""
        self.plans.append(step)
        before, at = self.before.get(step.plan.batch, set()), 0
        for sequence, rows in zip(step.sequences, step.plan.rows, strict=True):
            tokens = step.tokens[at : at + rows.count]
            at += rows.count
            drawer = sequence.target if isinstance(sequence, ReferenceSequence) else sequence
            assert -1 not in tokens[:-1]
            if tokens[-1] == -1:
                assert drawer.id in before
                assert sequence in step.sampled_sequences
            if isinstance(sequence, ReferenceSequence) and sequence in step.sampled_sequences:
                assert sequence.target in step.sampled_sequences
                ends = {r.sequence: r.first + r.count for r in step.plan.rows}
                assert ends[sequence.id] == ends[sequence.target.id]
        self.before[step.plan.batch] = {s.id for s in step.sampled_sequences}

    def serve(self, steps: list[ScheduledStep]) -> None:
        for step in steps:
            for sequence in step.sampled_sequences:
                drawn = SampledToken(sequence.id, 0)
                if isinstance(sequence, ReferenceSequence):
                    sequence.num_output_placeholders -= 1
                    self.compared += not sequence.finished
                    self.witnesses[sequence.target.request_id] = sequence.errors
                    drawn = SampledToken(sequence.id, 0, divergence=self.apart)
                elif sequence.finished:
                    sequence.num_output_placeholders -= 1
                else:
                    sequence.append(len(sequence.tokens))
                step.drawn = [*step.drawn, drawn]
            self.scheduler.on_step_done(step)
            self.said += step.warnings


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
    blocks=st.integers(25, 120),
    batches=st.integers(1, 3),
    chunk=st.sampled_from([4, 8, 33]),
)
@settings(max_examples=150, deadline=None)
def test_a_shadow_has_the_same_tokens_in_the_same_steps(
    lengths: list[tuple[int, int]], blocks: int, batches: int, chunk: int
) -> None:
    shadows = ReferenceDecoder(SELECT, ErrorBudget(shadow=1.0))
    scheduler = scheduler_of(blocks, shadows, batches=batches, chunk=chunk)
    sequences = [make(i, *each) for i, each in enumerate(lengths)]
    run = Run(scheduler, sequences, (False, 0.0))
    run.to_the_end()
    assert all(s.finished and s.output.finish_reason == "length" for s in sequences)
    assert scheduler.available_blocks == (blocks,)
    assert not any(s.output.kv_rebuilt for s in sequences)
    assert all(by.tokens == by.max_tokens for by in run.witnesses.values()), "each has come to its end"
    if blocks > 3 * sum(a + b for a, b in lengths):  # room for all
        assert run.compared >= sum(b for _, b in lengths) - 3 * len(lengths)


def test_over_budget_new_ones_climb_and_those_that_run_begin_anew_with_all() -> None:
    shadows = ReferenceDecoder(SELECT, ErrorBudget(top1=0.05, shadow=1.0))
    seen = []
    for rung in range(NUM_BUDGETS + 1):
        scheduler = scheduler_of(400, shadows)
        sequences = [make(i, 12, 60) for i in range(2)]
        run = Run(scheduler, sequences, (True, 0.5))
        run.to_the_end()
        seen.append(shadows.budget_tokens)
        assert [s.output.kv_rebuilt for s in sequences] == [rung < NUM_BUDGETS] * 2
        said = (
            r"--kv-sparsity evict:max-top1=: 100.0% of \d\d tokens would be others, 5.0% may be: running completions "
            r"begin anew with all KV, new ones"
        )
        assert any(re.match(said, line) for line in run.said) == (rung < NUM_BUDGETS)
        assert [s.num_preemptions for s in sequences] == [rung < NUM_BUDGETS] * 2
        assert all(s.tokens[12:] == list(range(12, 72)) for s in sequences), "behind the tokens that they had"
        assert all(s.kept.full_attention for s in sequences)
        beside = [any(isinstance(s, ReferenceSequence) for s in step.sequences) for step in run.plans]
        assert any(beside[:40]) == (rung < NUM_BUDGETS)
        assert not any(beside[40:]), "who has all needs no shadow"
        attended = [op.tokens for step in run.plans for op in step.plan.ops if isinstance(op, SelectBlocks)]
        assert attended[-1] == 0
        assert (256 << rung if rung < NUM_BUDGETS else 0) in attended
    assert seen == [512, 1024, 0, 0]
    assert shadows.num_rebuilt == 2 * NUM_BUDGETS


def test_a_share_of_sequences_has_a_shadow() -> None:
    shadows = ReferenceDecoder(SELECT, ErrorBudget(shadow=0.25))
    count = sum(shadows.on_arrival(make(i, 5, 5)) is not None for i in range(40))
    assert count == 10
    dense = make(0, 5, 5)
    dense.kept.full_attention = True
    assert all(shadows.on_arrival(dense) is None for _ in range(40)), "nothing is to be measured there"


def test_an_answer_that_ends_early_counts_by_the_tokens_that_it_has() -> None:
    scheduler = scheduler_of(100, ReferenceDecoder(SELECT, ErrorBudget(shadow=1.0)))
    sequence = make(0, 10, 200)
    sequence.stop_tokens = frozenset([29])
    run = Run(scheduler, [sequence], (True, 0.0))
    run.to_the_end()
    (by,) = run.witnesses.values()
    assert sequence.output.finish_reason == "stop"
    assert 15 <= by.tokens == by.max_tokens <= 20


def test_where_blocks_run_out_a_shadow_goes_before_a_newer_request() -> None:
    shadows = ReferenceDecoder(SELECT, ErrorBudget(shadow=0.5))  # the first one has a shadow, the second one none
    scheduler = scheduler_of(30, shadows)  # both need 26, all three 39
    promises = scheduler.features[PrefillDispatcher].slo_admission
    promises.set_config(ConductorConfig(limits=SloLimits(ttft_s=1e6)))
    sequences = [make(i, 10, 40) for i in range(2)]
    run = Run(scheduler, sequences, (False, 0.0))
    run.to_the_end()
    assert run.compared > 5, "it was there at first"
    assert [(by.tokens, by.max_tokens) for by in run.witnesses.values()] == [(0, 0)], "and counts for nothing"
    assert [s.num_preemptions for s in sequences] == [0, 0]
    counts = promises.counts()
    assert counts is not None
    assert counts.prompts == 2, "nobody expects a shadow that has given way"


def test_a_shadow_without_room_holds_up_nobody() -> None:
    shadows = ReferenceDecoder(SELECT, ErrorBudget(shadow=0.5))
    scheduler = scheduler_of(26, shadows, chunk=128)  # after 60 tokens there is no room for as many again
    sequences = [make(0, 60, 8), make(1, 20, 8)]
    run = Run(scheduler, sequences, (False, 0.0))
    assert (scheduler.num_waiting, len(scheduler.waiting)) == (2, 3), "shadows are no requests"
    first = scheduler.schedule()
    assert sequences[1] in [s for step in first for s in step.sequences]
    run.serve(first)
    run.to_the_end()
    assert all(s.finished for s in sequences)


@pytest.mark.parametrize(
    "change", [lambda one: one.set_num_batches(1), lambda one: one.roll_back([], lambda keep: keep.length)]
)
def test_shadows_end_where_batches_are_dealt_anew_or_workers_are_lost(change: Callable[[Scheduler], Any]) -> None:
    scheduler = scheduler_of(400, ReferenceDecoder(SELECT, ErrorBudget(shadow=1.0)), batches=2)
    run = Run(scheduler, [make(i, 12, 60) for i in range(2)], (False, 0.0))
    for _ in range(8):
        run.serve(scheduler.schedule())
    shadows = [s for s in scheduler.running if isinstance(s, ReferenceSequence)]
    assert [s.finished for s in shadows] == [False, False]
    change(scheduler)
    steps = scheduler.schedule()
    assert [(s.finished, s.errors.tokens) for s in shadows] == [(True, 0)] * 2, "they count for nothing"
    assert sorted(s.request_id for step in steps for s in step.sequences) == [0, 1]
