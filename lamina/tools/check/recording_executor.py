"""An executor that records what passes through it."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.protocol.control import ComputeReady, RunRound
from lamina.protocol.executor import Done, EpochChanged, Executor
from lamina.protocol.offload_messages import PagesExpired
from lamina.protocol.step_plan import SurvivingKv

from .verdict import Plans


class RecordingExecutor:
    """Records the plans of passing steps."""

    def __init__(self, executor: Executor) -> None:
        self._wire = executor
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.plans: Plans = []
        self.lent: dict[int, int] = {}  # sequence -> most stripes on loan at once
        self._arrived: dict[int, int] = {}  # sequence -> how many came before it

    @property
    def ready(self) -> ComputeReady:
        return self._wire.ready

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

    def wait(self) -> Done | EpochChanged:
        return self._wire.wait()

    def check_workers(self) -> EpochChanged | PagesExpired | None:
        return self._wire.check_workers()

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        return self._wire.resume(keep)

    def begin_era(self) -> bytes:
        return self._wire.begin_era()

    def stats(self) -> dict[str, dict[str, float]]:
        return self._wire.stats()

    def close(self) -> None:
        self._wire.close()
