"""Room for grants in the steps that also have rows: what is sure is so by the ledger, too."""

from __future__ import annotations

import random

import pytest

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import New, PrefillGrant, RowRange, StepPlan
from lamina.scheduler.prefill_grants import GrantBudget

BLOCK = 4


def plan(ops: list[New | PrefillGrant], rows: list[RowRange]) -> StepPlan:
    return StepPlan(epoch=1, batch=0, step=1, ops=[*ops], rows=rows, send_from=[], reply_to=[])


def grants_of(sequence: int, first: int, ahead: int, rng: random.Random) -> list[PrefillGrant]:
    """Returns the consecutive grants of a prompt that goes on at ``first``."""
    grants = []
    for step in range(ahead):
        grants.append(PrefillGrant(sequence, first, rng.randint(1, 9), 0, step))
        first += grants[-1].count
    return grants


def some_room(rng: random.Random) -> tuple[BlockTables, list[New | PrefillGrant], list[RowRange], list[PrefillGrant]]:
    """Returns sequences that take most of a pool, ops and rows of the next plan, and the grants that are wanted with
    them.
    """
    windows = rng.choice([[0], [0, 6], [8]])
    tables = BlockTables(windows, [rng.randint(12, 20)] * len(windows), BLOCK)
    rows, wanted = list[RowRange](), list[PrefillGrant]()
    for sequence in range(5):
        length = rng.randint(1, 14)
        first = plan([New(sequence)], [RowRange(sequence, 0, length)])
        if not tables.can_apply(first):
            break
        tables.apply(first)
        if rng.random() < 0.5:
            wanted += grants_of(sequence, length, rng.randint(1, 3), rng)
        else:
            rows.append(RowRange(sequence, length, 1))
    wanted += grants_of(9, 0, 2, rng)
    ops: list[New | PrefillGrant] = [New(9)]
    return tables, ops, rows, wanted


@pytest.mark.parametrize("part", range(4))
def test_a_grant_that_surely_fits_does(part: int) -> None:
    """So do those after one that was taken though nothing was sure, as the scheduler takes them."""
    sure_ones = behind = 0
    for seed in range(part, 1600, 4):
        tables, ops, rows, wanted = some_room(random.Random(seed))
        if not tables.can_apply(plan(ops, rows)):
            continue
        room, was_unsure = GrantBudget(tables, ops, rows), False
        for grant in wanted:
            fits = tables.can_apply(plan([*ops, grant], rows))
            sure = room.try_reserve(grant)
            assert fits or not sure, f"seed {seed}: {grant}"
            sure_ones, behind = sure_ones + sure, behind + (was_unsure and not sure)
            was_unsure = was_unsure or not sure
            if not fits:
                break
            ops.append(grant)
    assert sure_ones > 200
    assert behind > 5


def test_a_second_grant_of_a_prompt_is_as_sure_as_the_first() -> None:
    """The check does not look at all rows of a step for it."""
    tables = BlockTables([0], [4], BLOCK)
    tables.apply(plan([New(0)], [RowRange(0, 0, 3)]))
    room = GrantBudget(tables, [], [])
    assert [
        room.try_reserve(g)
        for g in (PrefillGrant(0, 3, 5, 0, 0), PrefillGrant(0, 8, 4, 0, 1), PrefillGrant(0, 12, 4, 0, 2))
    ] == [True] * 3
    assert not room.try_reserve(PrefillGrant(0, 16, 1, 0, 3))
