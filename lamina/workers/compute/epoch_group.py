"""The group of ranks to which slices are bound once, for all epochs. Each epoch has new channels to the ranks."""

from __future__ import annotations

from torch import Tensor

from lamina.ops.collective import Collective


class EpochGroup:
    """A Collective that forwards to the group of the rank's present epoch."""

    def __init__(self, group: Collective) -> None:
        self._group = group
        self.rank, self.size, self.recordable = group.rank, group.size, group.recordable
        self._past_s = 0.0

    def begin_epoch(self, group: Collective) -> None:
        """Forward to ``group``, whose ranks have connected again. Raises ValueError if graphs of slices were recorded
        for another kind of group.
        """
        if group.recordable != self.recordable:
            raise ValueError("--collective auto: ranks that reconnect would use another way: name one of the ways")
        self._past_s, self._group = self.wait_s, group

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for other ranks, in all epochs."""
        return self._past_s + self._group.wait_s

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks."""
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return the ``x`` of all ``size`` ranks, concatenated in the order of ranks."""
        return self._group.all_gather(x, size)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``."""
        return self._group.broadcast(x)

    def on_graph_launched(self) -> None:
        """Watch a graph with calls of this group that was launched, and must end in time. Raises ChannelError."""
        self._group.on_graph_launched()

    def close(self) -> None:
        self._group.close()
