"""Whom a compute worker is told to meet under a view. Policy: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamina.protocol.control import Address, Connect, Loaded
from lamina.protocol.options.topology import TopologyOptions


class Present(NamedTuple):
    """Compute workers that are there: of one replica behind the other its ranks. ``names``: which they prove."""

    topology: TopologyOptions
    names: Sequence[str]
    loaded: Sequence[Loaded]

    @property
    def replicas(self) -> int:
        """As many as are there, which may be fewer than there are to be."""
        return len(self.names) // self.topology.tensor_parallel_size

    def meeting(self, view: int, place: int, memory: list[Address], kv_bytes: list[int]) -> Connect:
        """Of the compute worker in a place: its replica's ranks, and the replicas before and behind it. ``memory``: the
        memory workers of its rank.
        """
        size, workers = self.topology.tensor_parallel_size, len(self.names)
        first = place - place % size
        ranks = [self._at(i, self.loaded[i].rank_url) for i in range(first, first + size)] if size > 1 else []
        behind, before, ring = (place + size) % workers, (place - size) % workers, self.replicas > 1
        return Connect(
            view=view,
            number=place // size,
            replicas=self.replicas,
            memory=memory,
            topology=self.topology,
            ranks=ranks,
            behind=self._at(behind, self.loaded[behind].ring_url) if ring else None,
            before=self.names[before] if ring else "",
            kv_bytes=kv_bytes,
        )

    def _at(self, place: int, url: str) -> Address:
        return Address(url, self.names[place])
