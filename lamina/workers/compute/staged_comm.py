"""What a compute worker deals with, for tensors on a device of its own memory: the ring, other ranks.

Each stands in for one that knows host tensors alone, and brings tensors there and back.
"""

from __future__ import annotations

from torch import Tensor

from lamina.ops.collective import Collective
from lamina.protocol.step_plan import StepPlan
from lamina.workers.staging import Staging

from .pipeline_comm import PipelineComm


def with_staging(inner: PipelineComm, staging: Staging) -> PipelineComm:
    """For a ring whose tensors leave this process; ``inner`` itself where nothing need be copied."""
    return StagedPipeline(inner, staging) if staging.is_separate else inner


def collective_with_staging(inner: Collective, staging: Staging) -> Collective:
    """For the slices, and for draws."""
    return StagedCollective(inner, staging) if staging.is_separate and not inner.recordable else inner


class StagedPipeline:
    """A Ring of a device whose tensors go over the host. The token ids of a step are on the host anyway."""

    def __init__(self, inner: PipelineComm, staging: Staging) -> None:
        self._inner, self._staging = inner, staging

    @property
    def wait_s(self) -> float:
        """Seconds spent in ``receive``."""
        return self._inner.wait_s

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Bring the results to the host, and give them on."""
        ids, *rest = carry
        self._inner.send(plan, index, (ids, *self._staging.to_host(*rest)))

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Take the results, and bring them to the device."""
        ids, *rest = self._inner.receive(plan, index)
        return ids, *map(self._staging.to_device, rest)


class StagedCollective:
    """A Collective over the host; results are on the device of the argument."""

    recordable = False

    def __init__(self, inner: Collective, staging: Staging) -> None:
        self._inner, self._staging = inner, staging
        self.rank, self.size = inner.rank, inner.size

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks."""
        return self._inner.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks."""
        return self._staging.to_device(self._inner.all_reduce(*self._staging.to_host(x)))

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """The ``x`` of all ``size`` ranks side by side, in the order of ranks."""
        (here,) = self._staging.to_host(x)
        return self._staging.to_device(self._inner.all_gather(here, size))

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, which is small, made on the host, and read there."""
        return self._inner.broadcast(x)

    def on_graph_launched(self) -> None:
        """Nothing to do: the host makes the calls, so no graph waits for ranks."""

    def close(self) -> None:
        """Let go of the group."""
        self._inner.close()
