"""The group of ranks to which slices are bound once, for all epochs. Each epoch brings new channels to the ranks."""

from __future__ import annotations

from torch import Tensor

from lamina.ops.collective import Collective


class EpochGroup:
    """A Collective: the group of the epoch that this rank is in."""

    def __init__(self, group: Collective) -> None:
        self._group = group
        self.rank, self.size, self.recordable = group.rank, group.size, group.recordable
        self._past_s = 0.0

    def set_group(self, group: Collective) -> None:
        """Meet ``group`` from here on. Raises ValueError where graphs of slices were recorded for another kind."""
        if group.recordable != self.recordable:
            raise ValueError("--collective auto: ranks that meet again would meet in another way: name one of the ways")
        self._past_s, self._group = self.wait_s, group

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks, under all epochs."""
        return self._past_s + self._group.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks."""
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """The ``x`` of all ``size`` ranks side by side, in the order of ranks."""
        return self._group.all_gather(x, size)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``."""
        return self._group.broadcast(x)

    def on_graph_launched(self) -> None:
        """A graph with calls of this group was given to the device, and has to end in time. Raises ChannelError."""
        self._group.on_graph_launched()

    def close(self) -> None:
        """Let go of the group."""
        self._group.close()
