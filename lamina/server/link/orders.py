"""What an operator orders of an engine that runs: other memory workers, and on which of them sequences begin."""

from __future__ import annotations

from lamina.engine.configured import check_room, cordon, cordoned
from lamina.engine.engine import Engine
from lamina.engine.exodus import Exodus
from lamina.fleet.pools import Pools
from lamina.fleet.seats import NotInPlaceError

from .messages import Cordon, Scale, Scaled


def obey(engine: Engine, pools: Pools, order: Scale | Cordon) -> Scaled | None:
    """What there is to answer now; None: the order is being carried out."""
    if isinstance(order, Scale):
        return _scale(engine, pools, order)
    error = ""
    try:
        cordon(engine.scheduler, engine.info, order.worker, on=order.on)
    except ValueError as e:
        error = str(e)
    return Scaled(error=error, cordoned=cordoned(engine.scheduler, engine.info))


def _scale(engine: Engine, pools: Pools, wanted: Scale) -> Scaled | None:
    there = range(1 + max(max(holders) for holders in engine.info.holders))
    gone = wanted.leaving or there[wanted.memory_workers :]
    try:
        if wanted.leaving and len(there) - len(gone) != wanted.memory_workers:  # it would be replaced
            raise ValueError(f"memory workers 0 to {there[-1]} are there by now: ask again")
        if left := [w for w in cordoned(engine.scheduler, engine.info) if w not in gone]:
            raise ValueError(f"memory worker {left[0]} is cordoned, and sequences would move to it: undo that first")
        change = pools.elastic.plan(wanted.memory_workers)
        check_room(engine.scheduler, engine.info, change.capacity)
        exits = Exodus(engine, gone) if engine.config.moves_sequences and gone else None
        pools.elastic.begin(change, wanted.leaving, exits=exits)
    except (ValueError, OSError) as error:
        return Scaled(error=str(error), in_place=not isinstance(error, NotInPlaceError))
    return None
