"""A damaged version of a recurrent state is noticed before a step continues it, or another worker gets it."""

from __future__ import annotations

import pytest
import torch
from memory_peer import bind, shape
from recurrent import SPECS

from lamina.config.partition import PARTITIONS
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.mixers import MixerShape
from lamina.protocol.step_plan import Fork, New, RowRange, SequenceOp, StateRows, StepPlan, SurvivingKv
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.state_checksums import StateChecksums
from lamina.workers.mixer_shares import with_shares
from lamina.workers.worker_process import CorruptedMemoryError

PLACE, ROWS = KvLocation(), 8


class Bench:
    """The states of a memory worker, and steps that write random numbers to the versions after their rows."""

    def __init__(self) -> None:
        spec, layers = SPECS["bamba"], [shape()]
        partition, operands = PARTITIONS["head"]([layers[0].kv_heads], [1.0], 1), ["float32"] * len(spec.static_shapes)
        whole = MixerShape(spec.encode(), ["float32"] * len(spec.input_columns), operands)
        mixer = with_shares(whole, "head", partition, [1.0])
        slots = {"state_slots": 8, "state_versions": 3, "num_sequences": 2}
        store = KvStore(bind(layers, [1.0], 0, "head", mixers=[mixer, mixer], **slots), torch.device("cpu"))
        assert store.states is not None
        self.states, self.step = store.states, 0
        self.sums = StateChecksums(self.states)
        for number in range(2):
            self.states.states_of(number)

    def do(self, *parts: SequenceOp | RowRange) -> None:
        rows = [part for part in parts if isinstance(part, RowRange)]
        plan = StepPlan(step=self.step, ops=[p for p in parts if not isinstance(p, RowRange)], rows=rows)
        self.step += 1
        self.states.begin(plan, is_replay=False)
        self.sums.before_writes(plan)
        self.sums.verify([plan])
        for slot in self.states.slots_written(plan):
            for state in self.states.of_slot(slot):
                state.normal_()
        self.states.versions.commit(rows)
        self.sums.update([plan])

    def run(self, sequence: int, first: int) -> None:
        """Compute the next tokens of a sequence, and keep the version before them."""
        begins = [] if first else [New(sequence)]
        self.do(*begins, StateRows(sequence, first), RowRange(sequence, first, ROWS, PLACE))

    def damage(self, sequence: int, tokens: int) -> None:
        """Change one number of the second layer."""
        slot = self.states.versions.slot_of(sequence, tokens)
        assert slot is not None
        self.states.of_slot(slot)[1][-1] += 1.0


def test_versions_without_damage_are_continued() -> None:
    bench = Bench()
    for first in range(0, 6 * ROWS, ROWS):  # slots are used again
        bench.run(1, first)
    bench.do(Fork(2, 1, 6 * ROWS), RowRange(2, 6 * ROWS, ROWS, PLACE))


def test_a_damaged_version_is_not_continued() -> None:
    bench = Bench()
    bench.run(1, 0)
    bench.damage(1, ROWS)
    with pytest.raises(CorruptedMemoryError, match="recurrent state"):
        bench.run(1, ROWS)


def test_a_damaged_version_does_not_stop_other_sequences() -> None:
    bench = Bench()
    bench.run(1, 0)
    bench.run(2, 0)
    bench.damage(1, ROWS)
    bench.run(2, ROWS)


def test_a_damaged_version_goes_to_no_other_worker() -> None:
    bench = Bench()
    bench.run(1, 0)
    bench.run(1, ROWS)
    keep = [SurvivingKv(1, 2 * ROWS, PLACE, snapshots=[ROWS])]
    bench.sums.verify_surviving(keep)
    bench.damage(1, ROWS)
    with pytest.raises(CorruptedMemoryError, match="recurrent state"):
        bench.sums.verify_surviving(keep)
