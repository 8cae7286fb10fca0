"""The two things through which the engine touches the world: a wire to its workers and a clock. A simulator has its
own.
"""

from __future__ import annotations

from typing import Protocol

from lamina.protocol.control import ComputeReady, RunRound, StepDone


class WorkerError(RuntimeError):
    """A worker died, hung or failed; the text says which and how. The pools have been ended."""


class Wire(Protocol):
    """Both pools as the engine sees them. ``pools.Pools`` is the real one.

    Rounds run in the order given. The steps of one batch are done in that order; of two batches either may be first.
    """

    @property
    def ready(self) -> ComputeReady:
        """What the workers said when they were bound."""
        ...

    def submit(self, new: RunRound) -> None:
        """Queue a round. Raises WorkerError when a worker is lost."""
        ...

    def prefill(self, worker: int, new: RunRound) -> None:
        """Queue a chunk of a prompt for a prefill worker; a RunRound of one step. Raises WorkerError."""
        ...

    def wait(self) -> StepDone:
        """The next step that is done, of compute or prefill workers; some must be in flight. Raises WorkerError when a
        worker is lost.
        """
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
