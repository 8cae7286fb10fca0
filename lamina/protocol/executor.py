"""The engine's two interfaces to the outside: the executor, which runs the workers, and the clock. Simulations replace
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .capacity import Capacity
from .control import ComputeReady, RunRound, StepDone
from .offload_messages import LoadReady, PagesExpired, TransferDone
from .step_plan import BlockScoresReport, StripesCopied, SurvivingKv

# What a memory worker reports: the end of a transfer, enough of one, block scores, copied stripes, expired pages.
Report = TransferDone | LoadReady | BlockScoresReport | StripesCopied | PagesExpired
Done = StepDone | Report


class WorkerError(RuntimeError):
    """A worker died, hung or failed; the text names the worker and the reason. All workers have been ended."""


class ReducedCapacityError(WorkerError):
    """A WorkerError after which a smaller run would still fit.

    ``workers_that_fit``: option that sets a number of workers -> the number for which there is space. ``lost_hosts``:
    the hosts to leave out.
    """

    def __init__(self, text: str, left: Mapping[str, int], without: Sequence[str]) -> None:
        super().__init__(text)
        self.workers_that_fit, self.lost_hosts = dict(left), list(without)


class EpochChanged(NamedTuple):
    """Reports that workers were lost, or that memory workers come or go. All workers have quiesced, and no step in
    flight will be done any more.
    """

    done: Sequence[StepDone]  # steps done before the change and not yet returned; each batch's are in order
    surviving: Sequence[Mapping[int, int]]  # memory worker -> sequence -> tokens whose K and V it has in all layers
    # Of the new set of memory workers, to which KV is moved; None: the set is as before.
    capacity: Capacity | None = None
    # KV shard before -> KV shard now, of the workers that stay, where sequences are to stay with them.
    new_shards: Mapping[int, int] = {}
    # Memory worker -> sequence -> tokens after which it has the recurrent state; empty: there are no such states.
    state_versions: Sequence[Mapping[int, Sequence[int]]] = ()


class Executor(Protocol):
    """Both pools, as the engine sees them. ``executor.worker_executor.WorkerExecutor`` is the real one; simulations
    have their own.

    Rounds run in the order of submission, and so do the steps of one batch. Steps of two batches may finish in either
    order.
    """

    @property
    def ready(self) -> ComputeReady:
        """The facts that the workers reported when they were bound."""
        ...

    def submit(self, new: RunRound) -> None:
        """Queue a round. If a worker is lost, ``wait`` reports it."""
        ...

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        """Queue a chunk of a prompt for a prefill worker, as a RunRound of one step. Reports losses as ``submit``."""
        ...

    def wait(self) -> Done | EpochChanged:
        """Wait for the next event and return it. Some work must be in flight.

        Events are: a compute or prefill worker has done a step, or a memory worker reports. It reports the end of a
        transfer, that enough of one has come, block scores, or copied stripes. Raises WorkerError if a worker is lost
        and cannot be replaced.
        """
        ...

    def check_workers(self) -> EpochChanged | PagesExpired | None:
        """Return EpochChanged if a worker has been lost, or which stored pages have expired, without waiting. Raises
        WorkerError as ``wait`` does.
        """
        ...

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        """Replace lost workers after EpochChanged, and connect all again with the KV of ``keep`` alone.

        KV whose location has changed moves first. Returns another EpochChanged if more workers are lost meanwhile.
        Raises WorkerError if workers cannot be replaced.
        """
        ...

    def begin_era(self) -> bytes:
        """Make all offloaded pages unreachable. Returns the new era, a part of later keys; empty without offload."""
        ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the counters of every worker, by its name."""
        ...

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


class Clock(Protocol):
    """A clock: seconds that only grow, from an arbitrary start."""

    def __call__(self) -> float: ...
