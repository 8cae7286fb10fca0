"""The order of memory workers after some have left and new ones have come, and the check that their memory suffices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from lamina.config.conflicts import RESIZE, REWEIGH, conflicts_of
from lamina.config.engine_config import EngineConfig
from lamina.config.topology import TopologyOptions
from lamina.protocol.capacity import partition_of
from lamina.protocol.control import Address, TransferPeer
from lamina.protocol.step_plan import BindReply, BindRequest
from lamina.workers.mixer_shares import with_shares

from .worker_registry import RegisteredWorker

MAX_MIGRATION_WORKERS = 16  # most memory workers of a rank that all connect to each other


class ResizeNeedsRestartError(ValueError):
    """A change of workers is possible only if all of them are restarted; the text names the reason."""


def check_resizable(config: EngineConfig, *, same: bool = False) -> None:
    """Raise ResizeNeedsRestartError if memory workers can come or go only with a new start of all. With ``same``: if
    the present ones cannot get other weights.
    """
    for reason in conflicts_of(REWEIGH if same else RESIZE, config):
        raise ResizeNeedsRestartError(reason)


def reorder_workers(
    there: Sequence[RegisteredWorker], gone: Collection[int], coming: Sequence[RegisteredWorker], size: int
) -> list[RegisteredWorker]:
    """Return the memory workers after a change, in order. If as many come as leave, ``coming`` workers take the places
    of ``gone``; else they follow those that stay (``order_after_removal``).
    """
    if len(coming) == len(gone):
        new = iter(coming)
        return [next(new) if i in gone else member for i, member in enumerate(there)]
    return order_after_removal(there, gone, size) + list(coming)


def order_after_removal(there: Sequence[RegisteredWorker], gone: Collection[int], size: int) -> list[RegisteredWorker]:
    """Return the memory workers ``there`` without those numbered ``gone``, in an order by which each of ``size`` ranks
    keeps its own. Raises ValueError if ranks would keep unequal numbers.
    """
    ranks = [[m for i, m in enumerate(there) if i % size == rank and i not in gone] for rank in range(size)]
    if len({len(rank) for rank in ranks}) > 1:
        raise ValueError(
            f"memory workers {', '.join(map(str, sorted(gone)))} cannot go: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and each rank must keep as many"
        )
    return [member for each in zip(*ranks, strict=True) for member in each]


def visible_addresses(own: Address, addresses: Sequence[Address]) -> list[Address]:
    """Return ``addresses`` as the worker at ``own`` may know them: with a key of its own, it gets no other keys."""
    return [structs.replace(each, key=b"") for each in addresses] if own.key else list(addresses)


def transfer_peers(workers: Sequence[Address], own: Address, most: int) -> list[TransferPeer]:
    """Return memory workers, by number, as described to the worker at ``own`` for transfers of KV.

    It connects to workers with keys of their own, and to those before it; the others connect to it. With more than
    ``most`` workers none connect, and no transfer succeeds.
    """
    order = {each: (not each.key, number) for number, each in enumerate(workers)}
    peers, is_small = list[TransferPeer](), len(workers) <= most
    for each in workers:
        meets, first = is_small and each != own and not (each.key and own.key), order[each] < order[own]
        reached = TransferPeer(each.name, connects=True, url=each.url, key=each.key)
        waited_for = TransferPeer(each.name, is_awaited=meets, is_receiver=each == own)
        peers.append(reached if meets and first else waited_for)
    return peers


def binds_of(
    wanted: TopologyOptions, rank: int, first: BindRequest, backend: str, asked: int = 0, had: int = 0
) -> list[BindRequest]:
    """Return the BindRequests of a rank's future memory workers, given its ``first`` one's and the ``backend`` of the
    others.

    ``asked``: bytes of each by --kv-cache-memory-bytes; 0: they share the ``had`` bytes of the present ones.
    """
    weights = wanted.of_rank(wanted.normalized_weights, rank)
    partition = partition_of(wanted.partition, first.layers, weights, first.max_model_len)
    others = structs.replace(first.kv, attention=backend)
    mixers = [with_shares(mixer, wanted.partition, partition, weights) for mixer in first.mixers]
    return [
        structs.replace(
            first,
            worker=worker,
            partition=partition,
            mixers=mixers,
            kv=others if worker else first.kv,
            kv_bytes=asked or int(had * weight / sum(weights)),
        )
        for worker, weight in enumerate(weights)
    ]


def check_capacity(binds: Sequence[BindRequest], more: int = 0) -> list[BindReply]:
    """Return what a rank's memory workers will report. Raises ValueError if they cannot hold one sequence together,
    with ``more`` bytes that they may borrow.
    """
    # These need torch, which a process that only starts workers does not load.
    from lamina.workers.compute.kv_capacity import check_longest_sequence
    from lamina.workers.memory.kv_store import store_shape
    from lamina.workers.memory.state_store import num_slots, state_shards

    forms = [store_shape(bind, bind.kv_bytes) for bind in binds]
    bounds = [
        BindReply(
            windows=f.windows,
            kv_shards=f.kv_shards,
            sparse=f.sparse,
            stripe_blocks=f.stripe_blocks,
            single_shard=bind.partition.single_shard,
            num_blocks=f.num_blocks,
            state_shards=state_shards(bind),
            state_slots=num_slots(bind, bind.kv_bytes),
        )
        for bind, f in zip(binds, forms, strict=True)
    ]
    own = sum(bind.kv_bytes for bind in binds)
    check_longest_sequence(bounds, binds[0].max_model_len, binds[0].kv.block_size, own, more)
    return bounds
