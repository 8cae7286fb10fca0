"""What a compute worker deals with, for tensors on a device of its own memory: the ring, other ranks.

Each stands in for one that knows host tensors alone, and brings tensors there and back.
"""

from __future__ import annotations

from torch import Tensor

from lamina.collective import Collective
from lamina.protocol.plan import StepPlan
from lamina.workers.staging import Staging

from .ring import Ring


def stage_ring(inner: Ring, staging: Staging) -> Ring:
    """For a ring whose tensors leave this process; ``inner`` itself where nothing need be copied."""
    return StagedRing(inner, staging) if staging.apart else inner


def stage_collective(inner: Collective, staging: Staging) -> Collective:
    """For the slices, and for draws."""
    return StagedCollective(inner, staging) if staging.apart and not inner.recordable else inner


class StagedRing:
    """See Ring. A step's ids, in front, are on the host anyway."""

    def __init__(self, inner: Ring, staging: Staging) -> None:
        self._inner, self._staging = inner, staging

    @property
    def wait_s(self) -> float:
        """See Ring."""
        return self._inner.wait_s

    def give(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """See Ring."""
        ids, *rest = carry
        self._inner.give(plan, index, (ids, *self._staging.down(*rest)))

    def take(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """See Ring."""
        ids, *rest = self._inner.take(plan, index)
        return ids, *map(self._staging.up, rest)


class StagedCollective:
    """See Collective. Results are where the argument was."""

    recordable = False

    def __init__(self, inner: Collective, staging: Staging) -> None:
        self._inner, self._staging = inner, staging
        self.rank, self.size = inner.rank, inner.size

    @property
    def wait_s(self) -> float:
        """See Collective."""
        return self._inner.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collective."""
        return self._staging.up(self._inner.all_reduce(*self._staging.down(x)))

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """See Collective."""
        (here,) = self._staging.down(x)
        return self._staging.up(self._inner.all_gather(here, size))

    def broadcast(self, x: Tensor) -> Tensor:
        """See Collective. What is broadcast is small, made on the host, and read there."""
        return self._inner.broadcast(x)

    def launched(self) -> None:
        """See Collective. There are no such graphs."""

    def close(self) -> None:
        """See Collective."""
        self._inner.close()
