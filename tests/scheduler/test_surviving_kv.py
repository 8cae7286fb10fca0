"""The KV that survives a loss: as memory workers report it, and as the engine uses it.

Covers: lamina/workers/memory/committed_tokens.py.
"""

from __future__ import annotations

import pytest

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Free, New, PrefillGrant, RowRange, StepPlan, SurvivingKv, Truncate
from lamina.scheduler.surviving_kv import SurvivingTokens
from lamina.workers.memory.committed_tokens import CommittedTokens


def plan(*parts: New | Free | Truncate | PrefillGrant | RowRange) -> StepPlan:
    rows = [p for p in parts if isinstance(p, RowRange)]
    return StepPlan(step=0, ops=[p for p in parts if not isinstance(p, RowRange)], rows=rows)


def test_only_what_was_written_in_all_layers_counts() -> None:
    w = CommittedTokens()
    first = plan(New(1), New(2), RowRange(1, 0, 5))
    w.begin(first)
    assert w.report() == {1: 0, 2: 0}
    w.commit(first.rows)
    w.begin(plan(RowRange(1, 5, 1)))
    assert w.report() == {1: 5, 2: 0}, "a step on its way is none that was done"
    w.commit([RowRange(1, 5, 1)])
    w.begin(plan(RowRange(1, 4, 1)))
    assert w.report()[1] == 4, "what is written over counts no more"
    w.commit([RowRange(2, 3, 1)])
    assert w.report()[2] == 0, "behind a hole there is nothing"
    w.commit([RowRange(1, 4, 2)])
    w.begin(plan(Truncate(1, 2), Free(2), PrefillGrant(1, 2, 3, 0, 0)))
    assert w.report() == {1: 2}, "a grant writes nothing yet"
    w.commit([RowRange(2, 0, 1)])
    assert w.report() == {1: 2}, "who was freed stays so"
    w.reconcile([SurvivingKv(9, 4)])
    assert w.report() == {9: 4}


@pytest.mark.parametrize(
    ("reports", "tokens"),
    [
        ([{1: 9}, {1: 9}, {}], 9),
        ([{1: 9}, {1: 7}, {}], 7),
        ([{1: 12}, {1: 9}, {}], 9),
        ([{}, {1: 9}, {1: 9}], 0),
        ([{1: 9}, {}, {1: 9}], 0),
    ],
)
def test_all_who_hold_a_part_count_and_nobody_else(reports: list[dict[int, int]], tokens: int) -> None:
    """Two workers share the heads of KV shard 0; the third has KV shard 1."""
    ledger = BlockTables([0, 0], [10, 10], 4, [KvShards((True, False)), KvShards((False, True))])
    ledger.apply(plan(New(1), RowRange(1, 0, 12, KvLocation(0))))
    assert SurvivingTokens(ledger, [[0, 1], [2]], reports).count(SurvivingKv(1, 9, KvLocation(0))) == tokens


def test_nothing_stays_of_a_sequence_whose_window_is_gone() -> None:
    ledger = BlockTables([6], [30], 4)
    ledger.apply(plan(New(1), RowRange(1, 0, 40)))
    for position in range(40, 43):
        ledger.apply(StepPlan(step=position, ops=[], rows=[RowRange(1, position, 1)]))
    found = [SurvivingTokens(ledger, [[0]], [{1: n}]).count(SurvivingKv(1, 42)) for n in (42, 41, 20)]
    assert found == [42, 41, 0]
