"""An executor that records what passes through it."""

from __future__ import annotations

from typing import Any

from lamina.protocol.control import RunRound
from lamina.protocol.executor import Executor

from .verdict import Plans


class RecordingExecutor:
    """Records the plans of steps that pass to an Executor; everything else is that executor's."""

    def __init__(self, executor: Executor) -> None:
        self._wire = executor
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.plans: Plans = []
        self.lent: dict[int, int] = {}  # sequence -> most stripes on loan at once
        self._arrived: dict[int, int] = {}  # sequence -> how many came before it

    def __getattr__(self, name: str) -> Any:  # all that is not recorded
        return getattr(self._wire, name)

    def submit(self, new: RunRound) -> None:
        self._note(new)
        self._wire.submit(new)

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        self._note(new)
        self._wire.submit_prefill(worker, new)

    def _note(self, new: RunRound) -> None:
        for plan in (step.plan for step in new.steps):
            for row in plan.rows:
                stripes = sum(run.stop - run.start for run in row.location.moved_runs)
                self.lent[row.sequence] = max(self.lent.get(row.sequence, 0), stripes)
            if plan.rows:
                number = {r.sequence: self._arrived.setdefault(r.sequence, len(self._arrived)) for r in plan.rows}
                self.plans.append((plan.batch, tuple((number[r.sequence], r.first, r.count) for r in plan.rows)))
