"""The versions of recurrent states on all memory workers, as the scheduler counts them. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

from lamina.config.partition import KvShards
from lamina.protocol.blocks.extents import NoBlocksError
from lamina.protocol.blocks.state_versions import StateVersions
from lamina.protocol.step_plan import RowRange, StepPlan, SurvivingKv


class StateLedger:
    """The versions of each set of KV shards: workers with states of the same sequences have equal ones."""

    def __init__(self, shards: Iterable[KvShards | None], num_slots: int, versions: int = 1) -> None:
        """``shards``: for each worker the KV shards whose sequences have states there. ``num_slots``: on each one.
        ``versions``: of a running sequence, at most.
        """
        self._versions = versions
        self.replace(shards, num_slots)

    def replace(self, shards: Iterable[KvShards | None], num_slots: int) -> None:
        """Count anew, for other memory workers, as if they had no states."""
        self.max_running = num_slots // self._versions  # sequences that have room wherever they lie
        self._parts = [
            StateVersions(num_slots, lambda row, own=own: row.location.kv_shard in own)  # type: ignore[misc]
            for own in dict.fromkeys(shards)
            if own is not None
        ]

    def has(self, sequence: int, tokens: int) -> bool:
        """Return whether plans so far write this version."""
        return any(part.has(sequence, tokens) for part in self._parts)

    def can_apply(self, plan: StepPlan) -> bool:
        """Return whether there is room for a plan's versions. Raises PlanError if one would read another version."""
        try:
            for part in self._parts:
                part.check(plan)
        except NoBlocksError:
            return False
        return True

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan that can be applied. Versions that come from elsewhere count once ``on_loaded`` is called."""
        for part in self._parts:
            part.begin(plan)
            part.commit(plan.rows)

    def on_loaded(self, sequence: int, tokens: int) -> None:
        """Count a version that has come from storage or from a prefill worker."""
        for part in self._parts:
            part.commit([RowRange(sequence, tokens, 0)])

    def adopt(self, kept: Iterable[SurvivingKv]) -> list[SurvivingKv]:
        """Count the versions that come to new workers. Returns the sequences, in order, that have room for theirs."""
        fitting = list[SurvivingKv]()
        for each in kept:
            if all(part.has_room(each) for part in self._parts):
                fitting.append(each)
                for part in self._parts:
                    part.adopt([each])
        return fitting

    def reconcile(self, keep: Several[SurvivingKv]) -> None:
        """Keep the versions that memory workers keep after a loss."""
        for part in self._parts:
            part.reconcile(keep)
