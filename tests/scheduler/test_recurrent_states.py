"""Plans and recurrent states: memory workers that follow them always have the version that a row reads."""

from __future__ import annotations

import random

import pytest
from scheduled import make

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import New, RowRange, StateRows, StepPlan, SurvivingKv
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.scheduler_output import ScheduledStep
from lamina.scheduler.surviving_kv import StateReports, SurvivingTokens
from lamina.workers.memory.state_versions import StateVersions

SEQUENCES = 4


def build() -> Scheduler:
    tables = BlockTables([0], [400], 4)
    return Scheduler(tables, max_num_seqs=SEQUENCES, prefill_chunk=6, features=[RecurrentStates()])


def finish(scheduler: Scheduler, step: ScheduledStep) -> None:
    for sequence in step.sampled_sequences:
        if not sequence.finished:
            sequence.append(7)
    scheduler.on_step_done(step)


def test_ops_name_the_oldest_version_and_the_rows_of_the_prompt() -> None:
    scheduler = build()
    scheduler.add(make(1, prompt=8, outputs=9))
    steps = [scheduler.schedule()[0], scheduler.schedule()[0]]
    finish(scheduler, steps[0])
    steps.append(scheduler.schedule()[0])
    told = [[op for op in step.plan.ops if isinstance(op, StateRows)] for step in steps]
    number = steps[0].plan.rows[0].sequence
    assert told == [[StateRows(number, 0, 6)], [StateRows(number, 0, 2)], [StateRows(number, 6, 0)]]


@pytest.mark.parametrize("seed", range(4))
def test_three_versions_of_each_sequence_suffice_through_losses(seed: int) -> None:
    """Two workers follow the plans late and unevenly; at a loss, all that both have is where sequences continue."""
    draw, scheduler = random.Random(seed), build()
    workers = [StateVersions(3 * SEQUENCES, lambda row: True) for _ in range(2)]
    queues: list[list[ScheduledStep]] = [[], []]
    for request in range(12):
        scheduler.add(make(request, prompt=draw.randint(1, 20), outputs=draw.randint(1, 12)))
    pending, losses = list[ScheduledStep](), 0
    for _ in range(4000):
        if not (scheduler.running or scheduler.waiting):
            break
        for step in scheduler.schedule():
            pending.append(step)
            for queue in queues:
                queue.append(step)
        for worker, queue in zip(workers, queues, strict=True):
            if queue and draw.random() < 0.7:
                plan = queue.pop(0).plan
                worker.check(plan)
                worker.begin(plan)
                worker.commit(plan.rows)
        while pending and all(pending[0] not in queue for queue in queues):
            finish(scheduler, pending.pop(0))
        if draw.random() < 0.1:
            losses += 1
            reports = StateReports([KvShards()] * 2, [worker.report() for worker in workers])
            keep = scheduler.roll_back(pending, reports.newest_common)
            pending, queues = [], [[], []]
            for worker in workers:
                worker.reconcile(keep)
    assert losses > 1
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
