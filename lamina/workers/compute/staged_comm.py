"""A compute worker's communication with replicas and ranks, for tensors on a device with its own memory.

Each class wraps one that takes host tensors alone, and copies tensors to the host and back.
"""

from __future__ import annotations

from torch import Tensor

from lamina.ops.collective import Collective
from lamina.protocol.step_plan import StepPlan
from lamina.workers.staging import Staging

from .compute_worker import PipelineComm


def with_staging(inner: PipelineComm, staging: Staging) -> PipelineComm:
    """Wrap a pipeline whose tensors leave this process; returns ``inner`` itself if no copy is needed."""
    return StagedPipeline(inner, staging) if staging.is_separate else inner


def collective_with_staging(inner: Collective, staging: Staging) -> Collective:
    """Wrap a collective for slices and for sampling; returns ``inner`` itself if no copy is needed."""
    return StagedCollective(inner, staging) if staging.is_separate and not inner.recordable else inner


class StagedPipeline:
    """A PipelineComm of a device whose tensors go through the host. The token ids of a step are on the host anyway."""

    def __init__(self, inner: PipelineComm, staging: Staging) -> None:
        self._inner, self._staging = inner, staging

    @property
    def wait_s(self) -> float:
        """The seconds spent in ``receive``."""
        return self._inner.wait_s

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Copy the results to the host and send them."""
        ids, *rest = carry
        self._inner.send(plan, index, (ids, *self._staging.to_host(*rest)))

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Receive the results and copy them to the device."""
        ids, *rest = self._inner.receive(plan, index)
        return ids, *map(self._staging.to_device, rest)


class StagedCollective:
    """A Collective of host tensors; results are on the device of the argument."""

    recordable = False

    def __init__(self, inner: Collective, staging: Staging) -> None:
        self._inner, self._staging = inner, staging
        self.rank, self.size = inner.rank, inner.size

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for other ranks."""
        return self._inner.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks."""
        return self._staging.to_device(self._inner.all_reduce(*self._staging.to_host(x)))

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return the ``x`` of all ``size`` ranks, concatenated in the order of ranks."""
        (here,) = self._staging.to_host(x)
        return self._staging.to_device(self._inner.all_gather(here, size))

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``: small tensors that are made and read on the host."""
        return self._inner.broadcast(x)

    def on_graph_launched(self) -> None:
        """Do nothing: the host makes the calls, so no graph waits for ranks."""

    def close(self) -> None:
        self._inner.close()
