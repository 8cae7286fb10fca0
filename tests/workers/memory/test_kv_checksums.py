"""Checksums of KV blocks: damage is seen wherever tokens are stored, and nowhere else.

Covers: lamina/workers/memory/attention_step.py, lamina/workers/worker_process.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from memory_peer import bind, shape
from msgspec import structs

from lamina.kv.pages import PAGE
from lamina.protocol.step_plan import ContextShift, Fork, Free, New, Rotary, RowRange, SequenceOp, StepPlan, SurvivingKv
from lamina.workers.memory.attention_step import AttentionStep
from lamina.workers.memory.kv_checksums import BlockChecksums, flip_bit
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.worker_process import CorruptedMemoryError

SIZE = 32


class Bench:
    """A store whose blocks are checked, as a session does."""

    def __init__(self) -> None:
        rotary = Rotary(np.linspace(0.1, 1.0, 4).astype("<f8").tobytes())
        shapes = shape(), shape(q_heads=4, kv_heads=2, dim=8, v_dim=24)
        layers = [structs.replace(x, rotary=rotary) for x in shapes]
        self.store = KvStore(bind(layers, (1.0,), 0, "head", max_model_len=1024, block_size=SIZE), torch.device("cpu"))
        self.store.checksums = self.sums = BlockChecksums(
            self.store, 0.5, lambda: 0.9
        )  # which looks at no block that it need not look at
        self._step = 0

    def begin(self, *parts: SequenceOp | RowRange) -> AttentionStep:
        self._step += 1
        rows = [p for p in parts if isinstance(p, RowRange)]
        plan = StepPlan(step=self._step, ops=[p for p in parts if not isinstance(p, RowRange)], rows=rows)
        self.store.apply_plan(plan)
        self.store.apply_block_copies()
        return AttentionStep(self.store, plan)

    def end(self, step: AttentionStep) -> None:
        self.sums.verify_before_step([step])
        for piece in (piece for layer in self.store.layers for piece in layer):
            for row in step.plan.rows:
                for position in range(row.first, row.first + row.count):
                    (block,) = self.store.tables.block_ids(
                        piece.group, row.sequence, position // SIZE, position // SIZE + 1
                    )
                    for part in (piece.kv.k, piece.kv.v):
                        part[block, :, position % SIZE] = 1.0 + position
        self.store.committed.commit(step.plan.rows)
        self.sums.update_after_step([step])

    def fill(self, tokens: int) -> None:
        """Sequence 1."""
        self.do(New(1), RowRange(1, 0, 64))
        for first in range(64, tokens, 64):
            self.do(RowRange(1, first, min(64, tokens - first)))

    def do(self, *parts: Any) -> None:
        self.end(self.begin(*parts))


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("tokens", [1, 10, SIZE - 1])
def test_a_block_that_a_sequence_is_filling_is_looked_at(bench: Bench, tokens: int) -> None:
    bench.do(New(1), RowRange(1, 0, tokens))
    step = bench.begin(RowRange(1, tokens, 1))
    assert flip_bit(bench.store, [step])
    with pytest.raises(CorruptedMemoryError, match="is not what was written there"):
        bench.sums.verify_before_step([step])


WAYS = pytest.mark.parametrize("op", [Fork(2, 1, 10), ContextShift(1, 0, PAGE)], ids=str)


@WAYS
def test_no_damage_is_copied(bench: Bench, op: Fork | ContextShift) -> None:
    """A copy would have a checksum that is right."""
    bench.fill(PAGE + 12)
    block = bench.store.tables.block_table(0, 1)[1][0 if isinstance(op, Fork) else PAGE // SIZE]
    bench.store.layers[-1][0].kv.k[block, 0, 0, 0] += 1.0
    with pytest.raises(CorruptedMemoryError, match="is not what was written there"):
        bench.begin(op)


def test_no_damage_goes_to_another_worker(bench: Bench) -> None:
    """All retained blocks are checked, whatever the share; blocks of no sequence are not."""
    bench.fill(PAGE + 12)
    bench.do(New(2), RowRange(2, 0, 40))
    bench.sums.verify_surviving([SurvivingKv(1, PAGE + 12), SurvivingKv(2, 40), SurvivingKv(3, 5)])
    block = bench.store.tables.block_table(0, 2)[1][0]
    bench.store.layers[-1][0].kv.k[block, 0, 0, 0] += 1.0
    bench.sums.verify_surviving([SurvivingKv(1, PAGE + 12)])
    with pytest.raises(CorruptedMemoryError, match="is not what was written there"):
        bench.sums.verify_surviving([SurvivingKv(1, PAGE + 12), SurvivingKv(2, 40)])


@WAYS
def test_a_copy_is_what_it_is(bench: Bench, op: Fork | ContextShift) -> None:
    bench.fill(PAGE + 12)
    bench.do(op)
    for _ in range(2):
        length = bench.store.tables.length(op.sequence)
        bench.do(RowRange(op.sequence, length, 1))
    assert length == (11 if isinstance(op, Fork) else 13)


def test_a_block_that_was_another_sequences_is_new(bench: Bench) -> None:
    """The KV that lies there is never attended."""
    bench.do(New(1), RowRange(1, 0, SIZE))
    (block,) = bench.store.tables.block_table(0, 1)[1]
    for layer in bench.store.layers:
        layer[0].kv.k.fill_(7.0)
    step = bench.begin(Free(1), New(2), RowRange(2, 0, bench.store.bind_request.max_rows))
    assert block in bench.store.tables.block_table(0, 2)[1]
    assert not flip_bit(bench.store, [step])
    bench.end(step)
    bench.do(RowRange(2, step.plan.rows[0].count, 1))
