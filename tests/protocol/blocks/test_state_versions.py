"""Versions of recurrent states: named by tokens, kept until a step is done, refused if one is missing."""

from __future__ import annotations

import random

import pytest

from lamina.config.partition import KvShards
from lamina.protocol.blocks.extents import NoBlocksError, PlanError
from lamina.protocol.blocks.state_versions import ZEROS, StateVersions, states_that_come
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import (
    Fork,
    Free,
    LoadKv,
    New,
    PrefillGrant,
    RowRange,
    SequenceOp,
    StateRows,
    StepPlan,
    SurvivingKv,
    Truncate,
)


def plan(step: int, *rows: RowRange, ops: tuple[SequenceOp, ...] = ()) -> StepPlan:
    return StepPlan(step=step, ops=[*ops], rows=[*rows])


def apply(versions: StateVersions, each: StepPlan) -> list[tuple[int, int]]:
    """Apply and complete a plan. Returns, by segment, the slots that are read and written."""
    versions.check(each)
    segments = versions.begin(each)
    versions.commit(each.rows)
    return [(segment.read, segment.write) for segment in segments]


def test_a_row_reads_the_version_of_its_position_and_older_ones_stay_until_they_are_not_needed() -> None:
    versions = StateVersions(3, lambda row: True)
    ((read, first),) = apply(versions, plan(0, RowRange(7, 0, 5), ops=(New(7), StateRows(7, 0, 5))))
    assert read == ZEROS
    ((read, second),) = apply(versions, plan(1, RowRange(7, 5, 1), ops=(StateRows(7, 0),)))
    assert read == first
    ((read, third),) = apply(versions, plan(2, RowRange(7, 6, 1), ops=(StateRows(7, 5),)))
    assert read == second
    assert len({first, second, third}) == 3
    assert versions.report() == {7: [5, 6, 7]}
    with pytest.raises(NoBlocksError, match="step 3 needs 4 states, and there are 3"):
        versions.check(plan(3, RowRange(7, 7, 1), ops=(StateRows(7, 5),)))
    ((read, fourth),) = apply(versions, plan(3, RowRange(7, 7, 1), ops=(StateRows(7, 6),)))
    assert (read, fourth) == (third, first)
    apply(versions, plan(4, ops=(Free(7),)))
    assert (versions.num_free, versions.report()) == (3, {})


def test_a_missing_version_is_refused_and_nothing_changes() -> None:
    versions = StateVersions(3, lambda row: True)
    apply(versions, plan(0, RowRange(7, 0, 5), ops=(New(7),)))
    with pytest.raises(PlanError, match=r"sequence 7: rows from position 4 on, and its state is here after \[5\] tok"):
        versions.check(plan(1, RowRange(7, 4, 1)))
    with pytest.raises(PlanError, match="sequence 8: rows from position 1 on, and its state is here after no tokens"):
        versions.check(plan(1, RowRange(8, 1, 1), ops=(New(8),)))
    assert versions.report() == {7: [5]}


def test_a_step_that_comes_again_reads_what_it_read_and_a_half_done_one_is_not_reported() -> None:
    versions = StateVersions(3, lambda row: True)
    ((_, slot),) = apply(versions, plan(0, RowRange(7, 0, 5), ops=(New(7),)))
    again = plan(1, RowRange(7, 5, 2), ops=(StateRows(7, 5),))
    versions.check(again)
    (segment,) = versions.begin(again)
    assert segment.read == slot
    assert versions.report() == {7: [5]}
    versions.check(again, is_replay=True)
    (segment,) = versions.begin(again, is_replay=True)
    assert segment.read == slot != segment.write
    versions.reconcile([SurvivingKv(7, 5)])
    assert (versions.report(), versions.num_free) == ({7: [5]}, 2)


def test_a_fork_shares_a_version_that_either_sequence_may_outlive() -> None:
    versions = StateVersions(3, lambda row: True)
    ((_, slot),) = apply(versions, plan(0, RowRange(7, 0, 5), ops=(New(7),)))
    ((read, _),) = apply(versions, plan(1, RowRange(8, 5, 1), ops=(Fork(8, 7, 5), Free(7))))
    assert read == slot
    assert versions.report() == {8: [5, 6]}
    with pytest.raises(PlanError, match="cannot fork 4 tokens of sequence 8: no such state is here"):
        versions.check(plan(2, ops=(Fork(9, 8, 4),)))


def test_only_sequences_of_own_shards_have_states_here() -> None:
    own = KvShards((True, False))
    versions = StateVersions(3, lambda row: row.location.kv_shard in own)
    rows = RowRange(7, 0, 5, KvLocation(1)), RowRange(8, 0, 2, KvLocation(0))
    assert len(apply(versions, plan(0, *rows, ops=(New(7), New(8))))) == 1
    assert versions.report() == {8: [2]}
    versions.reconcile([SurvivingKv(7, 5, KvLocation(1)), SurvivingKv(8, 2, KvLocation(0))])
    with pytest.raises(PlanError, match="sequence 8: its state after 1 tokens is not here"):
        versions.reconcile([SurvivingKv(8, 1, KvLocation(0))])


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_written_while_a_version_in_it_may_be_read(seed: int) -> None:
    """Random steps, with a record of the content of each slot."""
    draw, versions = random.Random(seed), StateVersions(12, lambda row: True)
    contents: dict[int, tuple[int, int]] = {}  # slot -> sequence, tokens
    lengths: dict[int, int] = {}
    done: dict[int, int] = {}
    for step in range(300):
        ops, rows = list[SequenceOp](), list[RowRange]()
        for sequence in list(lengths):
            if draw.random() < 0.1:
                ops.append(Free(sequence))
                del lengths[sequence], done[sequence]
        if len(lengths) < 4:
            ops.append(New(step))
            lengths[step] = done[step] = 0
        before = dict(lengths)
        for sequence, length in lengths.items():
            if draw.random() < 0.7:
                ops.append(StateRows(sequence, done[sequence]))
                rows.append(RowRange(sequence, length, draw.randint(1, 3)))
        for row, (read, write) in zip(rows, apply(versions, plan(step, *rows, ops=tuple(ops))), strict=True):
            assert read == ZEROS if not row.first else contents[read] == (row.sequence, row.first)
            contents[write] = row.sequence, row.first + row.count
            lengths[row.sequence] += row.count
        done = {sequence: before[sequence] for sequence in lengths}


def test_snapshots_outlive_later_versions_and_are_shared_by_forks() -> None:
    versions = StateVersions(4, lambda row: True)
    apply(versions, plan(0, RowRange(7, 0, 5), ops=(New(7),)))
    apply(versions, plan(1, RowRange(7, 5, 3), ops=(StateRows(7, 5, 3, [5]),)))
    apply(versions, plan(2, RowRange(7, 8, 1), ops=(StateRows(7, 8, 0, [5]),)))
    assert versions.report() == {7: [5, 8, 9]}
    apply(versions, plan(3, ops=(Truncate(7, 9), StateRows(7, 10, 0, [5, 9]))))
    assert versions.report() == {7: [5, 9]}
    apply(versions, plan(4, RowRange(8, 9, 1), ops=(Fork(8, 7, 9), StateRows(8, 9, 1, [5]))))
    assert (versions.report(), versions.num_free) == ({7: [5, 9], 8: [5, 9, 10]}, 1), "shared slots count once"
    apply(versions, plan(5, RowRange(9, 5, 2), ops=(Free(7), Fork(9, 8, 5))))
    assert (versions.report(), versions.num_free) == ({8: [5, 9, 10], 9: [5, 7]}, 0)
    versions.reconcile([SurvivingKv(8, 9, snapshots=[5])])
    assert (versions.report(), versions.num_free) == ({8: [5, 9]}, 2)
    with pytest.raises(PlanError, match="sequence 8: its state after 4 tokens is not here"):
        versions.reconcile([SurvivingKv(8, 9, snapshots=[4])])


def test_versions_that_come_from_other_workers_take_slots_of_their_own() -> None:
    versions = StateVersions(5, lambda row: row.location.kv_shard == 1)
    here = KvLocation(1)
    versions.adopt([SurvivingKv(7, 9, here, snapshots=[4, 9]), SurvivingKv(8, 3), SurvivingKv(9, 6, here)])
    assert versions.report() == {7: [4, 9], 9: [6]}, "sequence 8 lies elsewhere"
    slots = [*versions.slots_of(7, [4, 9]), *versions.slots_of(9, [6])]
    assert (len({*slots}), versions.num_free) == (3, 2)
    with pytest.raises(PlanError, match="sequence 9: its state after 5 tokens is not here"):
        versions.slots_of(9, [5])
    late = SurvivingKv(10, 8, here, snapshots=[2, 5])
    assert not versions.has_room(late)
    with pytest.raises(NoBlocksError, match="the states of sequence 10 have no room: 2 are free"):
        versions.adopt([late])
    assert versions.has_room(SurvivingKv(10, 8, here, snapshots=[2]))
    ((read, _),) = apply(versions, plan(0, RowRange(9, 6, 1, here), ops=(StateRows(9, 6),)))
    assert read == slots[2]


def test_a_loaded_version_takes_a_slot_and_is_whole_once_it_is_there() -> None:
    versions = StateVersions(2, lambda row: row.location.kv_shard == 0)
    load = LoadKv(7, 1, 5, 0, [b"k" * 32])
    apply(versions, plan(0, ops=(New(7), load)))
    assert (versions.num_free, versions.has(7, 5)) == (1, False)
    slot = versions.slot_to_fill(load.rows)
    versions.commit([load.rows])
    assert versions.slot_of(7, 5) == slot
    assert [read for read, _ in apply(versions, plan(1, RowRange(7, 5, 1)))] == [slot]
    with pytest.raises(NoBlocksError):
        versions.check(plan(2, ops=(New(8), LoadKv(8, 2, 5, 0, [b"l" * 32]))))
    elsewhere = LoadKv(9, 3, 5, 0, [b"m" * 32], KvLocation(1))
    apply(versions, plan(2, ops=(New(9), elsewhere)))
    assert versions.slot_to_fill(elsewhere.rows) is None


def test_a_sequence_that_is_computed_from_its_beginning_loses_what_was_loaded() -> None:
    versions = StateVersions(2, lambda row: True)
    for end in (3, 8):
        apply(versions, plan(0, ops=(New(7), LoadKv(7, 1, 5, 0, [b"k" * 32]))))
        ((read, _),) = apply(versions, plan(1, RowRange(7, 0, end)))
        assert read == ZEROS
        assert versions.report() == {7: [end]}
        assert versions.num_free == 1
        apply(versions, plan(2, ops=(Free(7),)))


def test_a_version_that_a_plan_loads_twice_is_refused_and_takes_no_slot() -> None:
    versions, twice = StateVersions(4, lambda row: True), [LoadKv(7, n, 5, 0, [b"k" * 32]) for n in range(2)]
    with pytest.raises(PlanError, match="sequence 7: its state after 5 tokens comes twice"):
        versions.check(plan(0, ops=(New(7), *twice)))
    apply(versions, plan(0, ops=(New(7), twice[0], LoadKv(7, 2, 9, 0, [b"l" * 32]))))
    apply(versions, plan(1, ops=(Free(7),)))
    assert versions.num_free == 4


def test_a_granted_version_takes_a_slot_and_is_whole_once_it_has_come() -> None:
    versions, here = StateVersions(3, lambda row: row.location.kv_shard == 0), KvLocation(0)
    first, last = PrefillGrant(7, 0, 8, 0, 0, here), PrefillGrant(7, 8, 4, 0, 1, here, has_states=True)
    granted = plan(0, ops=(New(7), first, last, PrefillGrant(8, 0, 4, 0, 2, KvLocation(1), has_states=True)))
    assert states_that_come(granted) == [last.rows, RowRange(8, 0, 4, KvLocation(1))]
    apply(versions, granted)
    assert (versions.num_free, versions.has(7, 12)) == (2, False)
    slot = versions.slot_to_fill(last.rows)
    versions.check(plan(0, ops=granted.ops), is_replay=True)
    versions.commit([last.rows])
    assert versions.report() == {7: [12]}
    assert [read for read, _ in apply(versions, plan(1, RowRange(7, 12, 1, here)))] == [slot]
    with pytest.raises(PlanError, match="sequence 9: rows from position 4 on, and its state is here after no tokens"):
        versions.check(plan(2, RowRange(9, 4, 1, here), ops=(New(9), PrefillGrant(9, 0, 4, 0, 3, here))))
