"""Room for grants beside a step's rows: what is sure is so by the ledger, too."""

from __future__ import annotations

import random

import pytest

from lamina.engine.blocks.sure import SureRoom
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.plan import Grant, New, Rows, StepPlan

BLOCK = 4


def plan(ops: list[New | Grant], rows: list[Rows]) -> StepPlan:
    return StepPlan(view=1, batch=0, step=1, ops=[*ops], rows=rows, source=[], reply_to=[])


def grants_of(sequence: int, first: int, ahead: int, rng: random.Random) -> list[Grant]:
    """Of a prompt that goes on at ``first``, one behind the other."""
    grants = []
    for step in range(ahead):
        grants.append(Grant(sequence, first, rng.randint(1, 9), 0, step))
        first += grants[-1].count
    return grants


def some_room(rng: random.Random) -> tuple[BlockTables, list[New | Grant], list[Rows], list[Grant]]:
    """Sequences that take most of a pool; ops and rows of the next plan, and grants that are wanted beside them."""
    windows = rng.choice([[0], [0, 6], [8]])
    tables = BlockTables(windows, [rng.randint(12, 20)] * len(windows), BLOCK)
    rows, wanted = list[Rows](), list[Grant]()
    for sequence in range(5):
        length = rng.randint(1, 14)
        first = plan([New(sequence)], [Rows(sequence, 0, length)])
        if not tables.can_apply(first):
            break
        tables.apply(first)
        if rng.random() < 0.5:
            wanted += grants_of(sequence, length, rng.randint(1, 3), rng)
        else:
            rows.append(Rows(sequence, length, 1))
    wanted += grants_of(9, 0, 2, rng)
    ops: list[New | Grant] = [New(9)]
    return tables, ops, rows, wanted


@pytest.mark.parametrize("part", range(4))
def test_a_grant_that_surely_fits_does(part: int) -> None:
    """So do those behind one that was taken though nothing was sure, as the scheduler takes them."""
    sure_ones = behind = 0
    for seed in range(part, 1600, 4):
        tables, ops, rows, wanted = some_room(random.Random(seed))
        if not tables.can_apply(plan(ops, rows)):
            continue
        room, was_unsure = SureRoom(tables, ops, rows), False
        for grant in wanted:
            fits = tables.can_apply(plan([*ops, grant], rows))
            sure = room.takes(grant)
            assert fits or not sure, f"seed {seed}: {grant}"
            sure_ones, behind = sure_ones + sure, behind + (was_unsure and not sure)
            was_unsure = was_unsure or not sure
            if not fits:
                break
            ops.append(grant)
    assert sure_ones > 200
    assert behind > 5


def test_a_second_grant_of_a_prompt_is_as_sure_as_the_first() -> None:
    """Nobody looks at all rows of a step for it."""
    tables = BlockTables([0], [4], BLOCK)
    tables.apply(plan([New(0)], [Rows(0, 0, 3)]))
    room = SureRoom(tables, [], [])
    assert [room.takes(g) for g in (Grant(0, 3, 5, 0, 0), Grant(0, 8, 4, 0, 1), Grant(0, 12, 4, 0, 2))] == [True] * 3
    assert not room.takes(Grant(0, 16, 1, 0, 3))
