"""The check that all workers have the same model, and their merged facts: the driver uses those of the first worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from lamina.config.topology import TopologyOptions
from lamina.protocol.capacity import Capacity, capacity_of_all_ranks
from lamina.protocol.control import ComputeReady
from lamina.protocol.step_plan import BindReply, ProtocolError

log = logging.getLogger(__name__)

# Facts that are equal for every rank, replica and prefill worker; memory workers compare the layers that each one
# sends.
OF_THE_MODEL = ("vocab_size", "num_layers", "max_model_len", "dtype", "eos_token_ids")


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
    capacities = [
        Capacity(r.windows, r.kv_shards, r.stripe, r.single_shard, r.sparse, r.num_blocks, r.holders) for r in ranks
    ]
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
