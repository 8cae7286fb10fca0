"""The two things through which the engine touches the world: a wire to its workers and a clock. A simulator has its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .capacity import Capacity
from .control import ComputeReady, RunRound, StepDone
from .migration_ops import StripesCopied
from .offload_messages import LoadReady, TransferDone
from .sparse_ops import BlockScoresReport
from .step_plan import SurvivingKv

# Of a memory worker: a transfer, enough of one, scores, a copy.
Report = TransferDone | LoadReady | BlockScoresReport | StripesCopied
Done = StepDone | Report


class WorkerError(RuntimeError):
    """A worker died, hung or failed; the text says which and how. The pools have been ended."""


class ReducedCapacityError(WorkerError):
    """The same; for a run with so many workers as are ``workers_that_fit``, by the option that says how many there are,
    there would be room, on hosts other than those ``lost_hosts``.
    """

    def __init__(self, text: str, left: Mapping[str, int], without: Sequence[str]) -> None:
        super().__init__(text)
        self.workers_that_fit, self.lost_hosts = dict(left), list(without)


class EpochChanged(NamedTuple):
    """Workers were lost, or memory workers come or go, and all are at rest: no step in flight will be done any more."""

    done: Sequence[StepDone]  # that had been done before and were not handed out; of each batch in their order
    surviving: Sequence[Mapping[int, int]]  # memory worker -> sequence -> tokens whose K and V it has in all layers
    capacity: Capacity | None = None  # of other memory workers, to which KV is moved; None: they are as before
    new_shards: Mapping[
        int, int
    ] = {}  # KV shard before -> KV shard now of whoever stays, where sequences are to stay with them


class Executor(Protocol):
    """Both pools, as the engine sees them. ``executor.worker_executor.WorkerExecutor`` is the real one; simulations
    have others.

    Rounds run in the order given. The steps of one batch are done in that order; of two batches either may be first.
    """

    @property
    def ready(self) -> ComputeReady:
        """What the workers said when they were bound."""
        ...

    def submit(self, new: RunRound) -> None:
        """Queue a round. Where a worker is lost, ``wait`` says so."""
        ...

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        """Queue a chunk of a prompt for a prefill worker; a RunRound of one step. Else as ``submit``."""
        ...

    def wait(self) -> Done | EpochChanged:
        """The next step that is done, of compute or prefill workers, or the next transfer that has ended on a memory
        worker or has enough there, or what one tells of scores; some must be in flight. Raises WorkerError when a
        worker is lost and cannot be replaced.
        """
        ...

    def check_workers(self) -> EpochChanged | None:
        """Whether a worker has been lost, without a wait. Raises WorkerError as ``wait``."""
        ...

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        """Replace lost workers after EpochChanged, and connect all again with the KV of ``keep`` alone.

        KV whose location has changed moves first. Returns another EpochChanged if others are lost meanwhile. Raises
        WorkerError if workers cannot be replaced.
        """
        ...

    def begin_era(self) -> bytes:
        """Have no sequence find the present pages beside the pools any more. Returns the era, which is a part of later
        keys; empty without such pages.
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
