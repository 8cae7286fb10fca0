"""Who sits where among memory workers once some have gone and others have come, and whether their memory suffices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lamina.protocol.plan import Bind, Bound

from .members import Member


def seated(there: Sequence[Member], gone: Collection[int], coming: Sequence[Member], size: int) -> list[Member]:
    """Of memory workers ``there`` and those that come, who there is to be, in order: as many as go take their places,
    else see ``staying``.
    """
    if len(coming) == len(gone):
        new = iter(coming)
        return [next(new) if i in gone else member for i, member in enumerate(there)]
    return staying(there, gone, size) + list(coming)


def staying(there: Sequence[Member], gone: Collection[int], size: int) -> list[Member]:
    """Of memory workers ``there``, who stays where those with the numbers ``gone`` go, in the order in which each of
    ``size`` ranks keeps its own. Raises ValueError where ranks would keep unequal numbers.
    """
    ranks = [[m for i, m in enumerate(there) if i % size == rank and i not in gone] for rank in range(size)]
    if len({len(rank) for rank in ranks}) > 1:
        raise ValueError(
            f"memory workers {', '.join(map(str, sorted(gone)))} cannot go: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and each rank must keep as many"
        )
    return [member for each in zip(*ranks, strict=True) for member in each]


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
