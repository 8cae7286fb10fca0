"""Who sits where among memory workers once some have gone and others have come, and whether their memory suffices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from lamina.netstack import made_at_start
from lamina.protocol.control import Address
from lamina.protocol.groups import partition_of
from lamina.protocol.move_ops import Neighbour
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.options.topology import TopologyOptions
from lamina.protocol.plan import Bind, Bound

from .members import Member

MOST_MOVERS = 16  # memory workers of which each may have a channel to each other one


class NotInPlaceError(ValueError):
    """Workers can come or go so only where all of them are started anew, and why."""


def check_in_place(config: EngineConfig, *, same: bool = False) -> None:
    """Raises NotInPlaceError where memory workers can come or go only with a new start of all; with ``same``, where the
    present ones cannot get other parts of the work.
    """
    if made_at_start(config.launching.scheme):
        raise NotInPlaceError(f"--transport {config.launching.transport} makes all channels at the start")
    if config.overflow.truncates:
        raise NotInPlaceError("--context-overflow cuts sessions at stripes")
    if config.kv.evicts or config.kv.selects:
        raise NotInPlaceError(f"--kv-sparsity {config.kv.kv_sparsity} has sequences that cannot be moved")
    if config.devices.memory_device != "cpu":
        raise NotInPlaceError(f"KV is on --memory-device {config.devices.memory_device}")
    if not same and (config.launching.memory_addresses or config.topology.weighs):
        raise NotInPlaceError("each memory worker has an address, or a part of the work, of its own")
    if config.topology.kv_parity:
        raise NotInPlaceError("one more keeps the parity of as many memory workers as there are (--kv-parity)")
    if not same and config.topology.plans:
        raise NotInPlaceError(f"--plan {config.topology.plan} has measured the memory workers that there are")


def seated(there: Sequence[Member], gone: Collection[int], coming: Sequence[Member], size: int) -> list[Member]:
    """The memory workers behind a change, in order. As many ``coming`` workers as go take the places of ``gone``; else
    they follow those that stay (``staying``).
    """
    if len(coming) == len(gone):
        new = iter(coming)
        return [next(new) if i in gone else member for i, member in enumerate(there)]
    return staying(there, gone, size) + list(coming)


def staying(there: Sequence[Member], gone: Collection[int], size: int) -> list[Member]:
    """The memory workers ``there`` without those numbered ``gone``, in an order by which each of ``size`` ranks keeps
    its own. Raises ValueError where ranks would keep unequal numbers.
    """
    ranks = [[m for i, m in enumerate(there) if i % size == rank and i not in gone] for rank in range(size)]
    if len({len(rank) for rank in ranks}) > 1:
        raise ValueError(
            f"memory workers {', '.join(map(str, sorted(gone)))} cannot go: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and each rank must keep as many"
        )
    return [member for each in zip(*ranks, strict=True) for member in each]


def known_to(own: Address, addresses: Sequence[Address]) -> list[Address]:
    """``addresses``, as the one at ``own`` may know them: who has a key of its own hears of no other's."""
    return [structs.replace(each, key=b"") for each in addresses] if own.key else list(addresses)


def movers_of(workers: Sequence[Address], own: Address) -> list[Neighbour]:
    """The memory workers of a rank, by number, as the worker at ``own`` is told of them, for stripes that move between
    them. It connects to workers with a key of their own, and to those before it; the others come to it. More than
    MOST_MOVERS workers do not meet: no copy between them succeeds.
    """
    order = {each: (not each.key, number) for number, each in enumerate(workers)}
    told, few = list[Neighbour](), len(workers) <= MOST_MOVERS
    for each in workers:
        meets, first = few and each != own and not (each.key and own.key), order[each] < order[own]
        reached = Neighbour(each.name, reached=True, url=each.url, key=each.key)
        told.append(reached if meets and first else Neighbour(each.name, awaited=meets))
    return told


def binds_of(wanted: TopologyOptions, rank: int, first: Bind, backend: str, asked: int = 0, had: int = 0) -> list[Bind]:
    """Of the memory workers that a rank is to have, by that of its ``first`` one and the ``backend`` of the others.
    ``asked``: bytes of each by --kv-memory; without it they share the bytes that there were.
    """
    weights = wanted.of_rank(wanted.weights, rank)
    partition = partition_of(wanted.partition, first.layers, weights, first.max_model_len)
    others = structs.replace(first.kv, attention=backend)
    return [
        structs.replace(
            first,
            worker=worker,
            partition=partition,
            kv=others if worker else first.kv,
            kv_bytes=asked or int(had * weight / sum(weights)),
        )
        for worker, weight in enumerate(weights)
    ]


def bounds_of(binds: Sequence[Bind], more: int = 0) -> list[Bound]:
    """What memory workers of a rank will say. Raises ValueError where they cannot hold a sequence together, with
    ``more`` bytes that they may borrow.
    """
    # They need torch, which whoever only starts workers does without.
    from lamina.compute.capacity import check_longest
    from lamina.memory.store import form_of

    forms = [form_of(bind, bind.kv_bytes) for bind in binds]
    bounds = [
        Bound(
            windows=f.windows,
            lanes=f.lanes,
            sparse=f.sparse,
            stripe=f.stripe,
            stays=bind.partition.stays,
            num_blocks=f.num_blocks,
        )
        for bind, f in zip(binds, forms, strict=True)
    ]
    own = sum(bind.kv_bytes for bind in binds)
    check_longest(bounds, binds[0].max_model_len, binds[0].kv.block_size, own, more)
    return bounds
