"""Whom workers that have the model are told to meet under a view. Policy: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lamina.protocol.beginnings import MeetPrefill
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


def prefill_meetings(
    topology: TopologyOptions, names: Sequence[str], loaded: Sequence[Loaded], *, fetches: bool
) -> Iterator[tuple[int, MeetPrefill]]:
    """The place of each prefill worker that meets others, and the workers that it meets: workers of its stage in all
    groups, where they fetch from each other, and the stages before and behind it in its own group.
    """
    stages = topology.prefill_pipeline
    for place in range(len(names) if stages > 1 or fetches else 0):
        group, stage = divmod(place, stages)
        peers = [Address(loaded[i].prompts_url, names[i]) for i in range(stage, len(names), stages)] if fetches else []
        last = stage + 1 == stages
        behind = None if last else Address(loaded[place + 1].ring_url, names[place + 1])
        yield place, MeetPrefill(peers=peers, me=group, before=names[place - 1] if stage else "", behind=behind)


def copies_of(roles: Sequence[str], topology: TopologyOptions) -> int:
    """Of the weights, that compute and prefill workers of such roles have together."""
    parts = {"compute": topology.tensor_parallel_size, "prefill": topology.prefill_pipeline}
    return sum(-(-roles.count(role) // workers) for role, workers in parts.items())
