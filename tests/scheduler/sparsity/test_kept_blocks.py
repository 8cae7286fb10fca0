"""The blocks that a sequence keeps, and the tokens of its prompt that prefill workers compute.

Covers: lamina/scheduler/sparsity/kept_kv.py.
"""

from __future__ import annotations

from lamina.kv.sparsity import BlockScores, PastDrop
from lamina.scheduler.sparsity.kept_kv import KeptKv


def test_a_prefill_worker_computes_whole_units_before_the_rows_that_are_scored() -> None:
    kept = KeptKv(drops_blocks=True, num_scored_rows=16, prefill_unit=64)
    assert [kept.num_prefill_tokens(known) for known in (10, 79, 80, 300)] == [0, 0, 64, 256]
    kept.scores = BlockScores(150, 16)
    assert [kept.num_prefill_tokens(known) for known in (80, 300)] == [64, 128], "and none after blocks are dropped"


def test_blocks_are_lacking_once_they_are_dropped_and_not_before_they_are_again() -> None:
    kept = KeptKv(drops_blocks=True)
    assert not kept.lacks_blocks
    kept.scores = BlockScores(150, 16, past_drops=[PastDrop(90, [1])])
    assert kept.lacks_blocks
    kept.scores.reset()
    assert not kept.lacks_blocks
    kept.scores.drops_to_repeat.clear()
    assert kept.lacks_blocks
