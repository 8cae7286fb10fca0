"""An operator's commands for a running engine: change the memory workers, and cordon them."""

from __future__ import annotations

from lamina.engine.engine import Engine
from lamina.engine.evacuation import evacuation_of
from lamina.engine.scheduler_factory import check_kv_capacity, cordon, cordoned_workers
from lamina.executor.memory_worker_slots import ResizeNeedsRestartError
from lamina.executor.worker_executor import WorkerExecutor

from .messages import CordonWorker, ScaleMemory, ScaleReply


def run_command(engine: Engine, pools: WorkerExecutor, order: ScaleMemory | CordonWorker) -> ScaleReply | None:
    """Run a command. Returns the reply; None if the command is still being carried out."""
    if isinstance(order, ScaleMemory):
        return _scale(engine, pools, order)
    error = ""
    try:
        cordon(engine.scheduler, engine.worker_info, order.worker, on=order.on)
    except ValueError as e:
        error = str(e)
    return ScaleReply(error=error, cordoned=cordoned_workers(engine.scheduler, engine.worker_info))


def _scale(engine: Engine, pools: WorkerExecutor, wanted: ScaleMemory) -> ScaleReply | None:
    there = range(1 + max(max(holders) for holders in engine.worker_info.holders))
    gone = wanted.leaving_workers or there[wanted.memory_workers :]
    try:
        if wanted.leaving_workers and len(there) - len(gone) != wanted.memory_workers:  # it would be replaced
            raise ValueError(f"memory workers 0 to {there[-1]} exist now: request it again")
        if left := [w for w in cordoned_workers(engine.scheduler, engine.worker_info) if w not in gone]:
            raise ValueError(f"memory worker {left[0]} is cordoned, and sequences would move to it: undo that first")
        change = pools.resizer.plan(wanted.memory_workers)
        check_kv_capacity(engine.scheduler, engine.worker_info, change.capacity)
        pools.resizer.begin(change, wanted.leaving_workers, leaves_by_itself=evacuation_of(engine, gone))
    except (ValueError, OSError) as error:
        return ScaleReply(error=str(error), in_place=not isinstance(error, ResizeNeedsRestartError))
    return None
