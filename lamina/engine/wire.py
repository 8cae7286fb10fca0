"""The two things through which the engine touches the world: a wire to its workers and a clock. A simulator has its
own.
"""

from __future__ import annotations

from typing import Protocol

from lamina.workers.control import ComputeReady, RunStep, StepDone


class Wire(Protocol):
    """Both pools as the engine sees them. ``pools.Pools`` is the real one.

    Steps run in the order given. ``run`` may keep some in flight: it queues ``step`` and returns the result of the
    oldest one, or None while it can wait; ``run(None)`` waits for the oldest one. Results come in the order of the
    steps.
    """

    @property
    def ready(self) -> ComputeReady:
        """What the workers said when they were bound."""
        ...

    def run(self, step: RunStep | None) -> StepDone | None:
        """See above. Raises WorkerError when a worker is lost."""
        ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of every worker, by its name."""
        ...

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


class Clock(Protocol):
    """Seconds that only grow, from an arbitrary start."""

    def __call__(self) -> float: ...
