"""When sequences lose blocks: what is due, and of whom."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from scheduled import make

from lamina.config.sparsity import SCORE_TOKENS, SparsityOptions
from lamina.protocol.step_plan import BlockScoresReport, DropBlocks, ScoreBlocks, SurvivingKv
from lamina.scheduler.feature import Loss
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sparsity.pruning import BlockPruner

OPTIONS = SparsityOptions(kv_sparsity="evict", kv_budget=128, kv_sink=4, kv_recent=16, kv_observation_window=16)
PROMPT, SIZE = 300, 16


def told(evictions: BlockPruner, sequence: Sequence, scores: list[int]) -> None:
    for _ in range(2):
        evictions.on_report(BlockScoresReport(epoch=0, step=0, sequence=sequence.id, scores=scores))


def rows(evictions: BlockPruner, sequence: Sequence, most: int) -> tuple[int, list[ScoreBlocks], list[DropBlocks]]:
    """Returns how many rows its next step has, and what else the plan says."""
    prunes = evictions.batch_ops([sequence])
    count = min(most, sequence.num_schedulable_tokens({}))
    ops = evictions.score_ops({sequence: count})
    sequence.num_computed_tokens += count
    return count, ops, prunes


def test_as_many_rows_are_scored_as_the_window_has() -> None:
    """Also where the last chunk has fewer, and a prompt at all."""
    for window, chunk, scored in ((4, 999, [4]), (40, 270, [10, 30]), (999, 999, [PROMPT])):
        evictions, sequence = BlockPruner(replace(OPTIONS, kv_observation_window=window), SIZE, 2), make(1, PROMPT, 5)
        sequence.id, sequence.kept.drops_blocks = 7, True
        ops = [op for _ in range(2) if not sequence.transfer.is_scored for op in rows(evictions, sequence, chunk)[1]]
        assert [op.rows for op in ops] == scored


@pytest.mark.parametrize("way", ["stays", "begins anew", "ends"])
def test_what_is_due_of_a_sequence_that_went_is_forgotten(way: str) -> None:
    """And kept for one that runs in another batch."""
    evictions, sequence = BlockPruner(OPTIONS, SIZE, 2), make(1, PROMPT, 5)
    sequence.id, sequence.kept.drops_blocks = 7, True
    assert rows(evictions, sequence, 999) == (PROMPT, [ScoreBlocks(7, 16)], [])
    assert sequence.transfer.is_scored
    told(evictions, sequence, [100 - n for n in range(19)])
    assert not sequence.transfer.is_scored
    if way == "begins anew":
        sequence.id = 8
    elif way == "ends":
        sequence.finish("abort")
    assert evictions.batch_ops([]) == []
    sequence.id = 7
    due = evictions.batch_ops([sequence])
    if way == "stays":
        (prune,) = due
        assert prune == DropBlocks(7, list(range(6, 17))), "the best and the last ones stay"
        assert evictions.num_dropped == 11
    else:
        assert due == []
    assert evictions.batch_ops([sequence]) == []


def test_one_that_begins_anew_loses_the_same_blocks_at_the_same_tokens() -> None:
    """And is scored from there on alone, by what it was scored by before."""
    evictions, sequence = BlockPruner(OPTIONS, SIZE, 2), make(1, PROMPT, 400)
    sequence.id, sequence.kept.drops_blocks = 7, True
    assert rows(evictions, sequence, 999) == (PROMPT, [ScoreBlocks(7, 16)], [])
    told(evictions, sequence, [100 - n for n in range(19)])
    sequence.tokens += range(SCORE_TOKENS)
    count, ops, first = rows(evictions, sequence, 120)
    assert (count, ops, len(first)) == (120, [], 1)
    assert rows(evictions, sequence, 999) == (8, [ScoreBlocks(7, 8)], [])
    told(evictions, sequence, [n % 3 for n in range(27)])
    assert sequence.kept.scores is not None
    dropped, before = list(sequence.kept.scores.dropped_blocks), list(sequence.kept.scores.earlier_scores)
    sequence.tokens += range(7)
    _, ops, second = rows(evictions, sequence, 999)
    assert (ops, len(second)) == ([], 1)

    sequence.reset_computed()
    evictions.on_arrival(sequence, is_new=False)
    sequence.id = 9
    again = [rows(evictions, sequence, 256) for _ in range(4)]
    assert [(count, ops) for count, ops, _ in again] == [(256, []), (PROMPT - 256, []), (SCORE_TOKENS, []), (7, [])]
    assert [p.blocks for *_, prunes in again for p in prunes] == [p.blocks for p in (*first, *second)]
    assert [p.sequence for *_, prunes in again for p in prunes] == [9, 9]
    assert (sequence.kept.scores.dropped_blocks, sequence.kept.scores.earlier_scores) == (dropped, before)
    sequence.tokens += range(SCORE_TOKENS)
    assert rows(evictions, sequence, SCORE_TOKENS - 8)[:2] == (SCORE_TOKENS - 8, [ScoreBlocks(9, 7)])


def test_one_that_begins_with_the_kv_of_others_behind_what_it_lost_is_scored_anew() -> None:
    evictions, sequence = BlockPruner(OPTIONS, SIZE, 2), make(1, PROMPT, 400)
    sequence.id, sequence.kept.drops_blocks = 7, True
    rows(evictions, sequence, 999)
    told(evictions, sequence, [100 - n for n in range(19)])
    sequence.tokens += range(20)
    sequence.reset_computed()
    evictions.on_arrival(sequence, is_new=False)
    sequence.id, sequence.num_computed_tokens = 8, PROMPT
    assert rows(evictions, sequence, 999) == (20, [ScoreBlocks(8, 16)], [])


def test_after_a_loss_all_is_computed_again_of_one_that_drops_blocks() -> None:
    sparse, other = make(1, PROMPT, 400), make(2, PROMPT, 400)
    sparse.id, sparse.kept.drops_blocks, other.id = 7, True, 8
    loss = Loss([sparse, other], lambda keep: keep.length)
    BlockPruner(OPTIONS, SIZE, 2).roll_back(loss)
    assert [loss.count(SurvivingKv(s.id, PROMPT)) for s in (sparse, other)] == [0, PROMPT]
