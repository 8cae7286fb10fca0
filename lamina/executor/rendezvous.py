"""The peers to which loaded workers connect in an epoch. Policy: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lamina.config.topology import TopologyOptions
from lamina.protocol.control import Address, Connect, Loaded
from lamina.protocol.prefix_fetch import ConnectPrefillPeers


class RendezvousState(NamedTuple):
    """The compute workers of this epoch: the ranks of one replica after the other. ``names``: that they prove."""

    topology: TopologyOptions
    names: Sequence[str]
    loaded: Sequence[Loaded]

    @property
    def replicas(self) -> int:
        """The number of present replicas, which may be smaller than configured."""
        return len(self.names) // self.topology.tensor_parallel_size

    def connect_message(self, epoch: int, place: int, memory: list[Address], kv_bytes: list[int]) -> Connect:
        """Return the Connect for the compute worker at ``place``: its replica's ranks, and the replicas before and
        after it. ``memory``: the memory workers of its rank.
        """
        size, workers = self.topology.tensor_parallel_size, len(self.names)
        first = place - place % size
        ranks = [self._at(i, self.loaded[i].rank_url) for i in range(first, first + size)] if size > 1 else []
        following, previous, ring = (place + size) % workers, (place - size) % workers, self.replicas > 1
        return Connect(
            epoch=epoch,
            replica=place // size,
            replicas=self.replicas,
            memory_addresses=memory,
            topology=self.topology,
            rank_addresses=ranks,
            next_replica=self._at(following, self.loaded[following].pipeline_url) if ring else None,
            previous_replica=self.names[previous] if ring else "",
            kv_bytes=kv_bytes,
        )

    def _at(self, place: int, url: str) -> Address:
        return Address(url, self.names[place])


def prefill_connections(
    topology: TopologyOptions, names: Sequence[str], loaded: Sequence[Loaded], *, fetches: bool
) -> Iterator[tuple[int, ConnectPrefillPeers]]:
    """Yield each prefill worker's place and its peers. These are workers of its stage in all groups, if they fetch
    prefixes from each other, and the stages before and after it in its own group.
    """
    stages = topology.prefill_pipeline
    for place in range(len(names) if stages > 1 or fetches else 0):
        group, stage = divmod(place, stages)
        peers = [Address(loaded[i].prefix_url, names[i]) for i in range(stage, len(names), stages)] if fetches else []
        last = stage + 1 == stages
        following = None if last else Address(loaded[place + 1].pipeline_url, names[place + 1])
        yield (
            place,
            ConnectPrefillPeers(
                peers=peers, own_index=group, previous_stage=names[place - 1] if stage else "", next_stage=following
            ),
        )


def num_weight_copies(roles: Sequence[str], topology: TopologyOptions) -> int:
    """Return how many copies of the weights the compute and prefill workers with these ``roles`` have together."""
    parts = {"compute": topology.tensor_parallel_size, "prefill": topology.prefill_pipeline}
    return sum(-(-roles.count(role) // workers) for role, workers in parts.items())
