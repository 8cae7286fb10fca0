"""Checksums of recurrent states, by which a state that is damaged in memory is noticed before a step continues it.

A version gets a checksum at the end of the step that wrote it. If storage or another worker filled it, that is the step
that read it first. Every version is checked before it is read: the next one would be wrong, too, and its checksum
right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lamina.netstack.checksum import checksum
from lamina.protocol.blocks.state_versions import states_that_come
from lamina.protocol.step_plan import StepPlan, SurvivingKv
from lamina.workers.worker_process import CorruptedMemoryError

from .state_store import StateStore


class StateChecksums:
    """The checksums of one store's states, by slot. One thread uses it."""

    def __init__(self, states: StateStore) -> None:
        self._states = states
        self.sums: dict[int, bytes] = {}

    def before_writes(self, plan: StepPlan, *, is_replay: bool = False) -> None:
        """Discard the checksums of slots that an applied plan is about to fill."""
        coming = [] if is_replay else states_that_come(plan)
        filled = [self._states.versions.slot_to_fill(rows) for rows in coming]
        for slot in (*filled, *self._states.slots_written(plan)):
            if slot is not None:
                self.sums.pop(slot, None)

    def verify_surviving(self, keep: Iterable[SurvivingKv]) -> None:
        """Check all versions that are about to go to other workers, where damaged ones would get right checksums.
        Raises CorruptedMemoryError.
        """
        versions = self._states.versions
        for each in keep:
            for tokens in (each.length, *each.snapshots):
                if (slot := versions.slot_of(each.sequence, tokens)) is not None:
                    self._check(slot)

    def verify(self, plans: Iterable[StepPlan]) -> None:
        """Check the versions that the rows of ``plans`` continue. Raises CorruptedMemoryError."""
        for plan in plans:
            for slot in self._states.slots_read(plan):
                self._check(slot)

    def update(self, plans: Iterable[StepPlan]) -> None:
        """Add checksums of the versions that ``plans`` have read and written, in all layers."""
        for plan in plans:
            for slot in (*self._states.slots_read(plan), *self._states.slots_written(plan)):
                if slot not in self.sums:
                    self.sums[slot] = self._sum(slot)

    def _check(self, slot: int) -> None:
        known = self.sums.get(slot)
        if known is not None and self._sum(slot) != known:
            raise CorruptedMemoryError(f"the recurrent state in slot {slot} is not what was written there")

    def _sum(self, slot: int) -> bytes:
        return b"".join(checksum(state_bytes(state).numpy().data) for state in self._states.of_slot(slot))


def state_bytes(state: Tensor) -> Tensor:
    """Return the bytes of a layer's state [state_size], in place."""
    return state.view(torch.uint8)
