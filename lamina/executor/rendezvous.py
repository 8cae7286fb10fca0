"""The peers to which loaded workers connect in an epoch. Their replies must be of one model, whose facts are merged.

Policy: no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lamina.config.topology import TopologyOptions
from lamina.protocol.capacity import Capacity, capacity_of_all_ranks
from lamina.protocol.control import Address, ComputeReady, Connect, Loaded
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import BindReply, ProtocolError

log = logging.getLogger(__name__)

# Facts that are equal for every rank, replica and prefill worker; memory workers compare the layers that each one
# sends.
OF_THE_MODEL = ("vocab_size", "num_layers", "max_model_len", "dtype", "eos_token_ids")


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
    topology: TopologyOptions,
    names: Sequence[str],
    loaded: Sequence[Loaded],
    memory: Sequence[Address] = (),
    *,
    fetches: bool,
) -> Iterator[tuple[int, ConnectPrefillPeers]]:
    """Yield each prefill worker's place and its peers. These are workers of its stage in all groups, if they fetch
    prefixes from each other, and the stages before and after it in its own group. It fetches stored KV from the
    ``memory`` workers.
    """
    stages = topology.prefill_pipeline
    for place in range(len(names) if stages > 1 or fetches or memory else 0):
        group, stage = divmod(place, stages)
        peers = [Address(loaded[i].prefix_url, names[i]) for i in range(stage, len(names), stages)] if fetches else []
        last = stage + 1 == stages
        following = None if last else Address(loaded[place + 1].pipeline_url, names[place + 1])
        yield (
            place,
            ConnectPrefillPeers(
                peers=peers,
                own_index=group,
                previous_stage=names[place - 1] if stage else "",
                next_stage=following,
                memory=list(memory),
            ),
        )


def num_weight_copies(roles: Sequence[str], topology: TopologyOptions) -> int:
    """Return how many copies of the weights the compute and prefill workers with these ``roles`` have together."""
    parts = {"compute": topology.tensor_parallel_size, "prefill": topology.prefill_pipeline}
    return sum(-(-roles.count(role) // workers) for role, workers in parts.items())


def check_same_model(readies: Mapping[str, ComputeReady]) -> None:
    """Raise ValueError if two workers differ, naming both and the difference. ``readies``: by the workers' labels."""
    (first, wanted), *others = readies.items()
    for label, ready in others:
        backend, known = (r.summary.get("attention") for r in (ready, wanted))
        if backend != known:
            raise ValueError(
                f"memory workers of {label} attend with {backend}, those of {first} with {known}: by "
                "--attention-backend name "
                f"one that all hosts have, or build the native modules on each"
            )
        for name in OF_THE_MODEL:
            if (fact := getattr(ready, name)) != (known := getattr(wanted, name)):
                raise ValueError(
                    f"{label} has another model than {first}: {name} is {fact} there, not {known}: every host needs "
                    f"the same files of the model"
                )


def merged_ready(readies: Sequence[ComputeReady], topology: TopologyOptions) -> ComputeReady:
    """Return the facts of all ranks of a replica, with the stores of prefill workers. In ``readies`` the ranks come
    first, prefill workers last. Raises ProtocolError if a prefill worker does not have exactly one store.
    """
    ranks = readies[: topology.tensor_parallel_size]
    for rank, ready in enumerate(ranks if len(ranks) > 1 else []):
        (q_heads, kv_heads), size = ready.summary["heads"][0], ready.summary["weight_bytes"]
        own = [f"{rank * n}..{(rank + 1) * n - 1}" for n in (q_heads, kv_heads)]
        holders = ", ".join(str(w) for w in sorted({w for of in ready.holders for w in of}))
        log.info(
            "rank %d: query heads %s, KV heads %s of layer 0 on memory worker %s, %.1f MB of weights",
            rank, *own, holders, size / 1e6,
        )  # fmt: skip
    if len(ranks) > 1:
        log.info("--collective %s: %s", topology.collective, ranks[0].summary["collective"])
    capacities = [Capacity(*(getattr(ready, field) for field in Capacity._fields)) for ready in ranks]
    prefill = readies[len(readies) - topology.prefill_workers :]
    if (numbers := [len(ready.prefill_stores) for ready in prefill]) != [1] * len(prefill):
        raise ProtocolError(f"prefill workers have {numbers} stores of prompts, and not one each")
    stores, stages = [ready.prefill_stores[0] for ready in prefill], topology.prefill_pipeline
    groups = [_as_one_store(stores[at : at + stages]) for at in range(0, len(stores), stages)]
    return msgspec.structs.replace(ranks[0], **capacity_of_all_ranks(capacities)._asdict(), prefill_stores=groups)


def _as_one_store(stages: Sequence[BindReply]) -> BindReply:
    """Return a group's stores as one with all layer groups: its workers hold different layers of the same prompts."""
    return msgspec.structs.replace(
        stages[0],
        windows=[window for bound in stages for window in bound.windows],
        kv_shards=[lanes for bound in stages for lanes in bound.kv_shards],
        num_blocks=[count for bound in stages for count in bound.num_blocks],
        kv_bytes=sum(bound.kv_bytes for bound in stages),
    )
