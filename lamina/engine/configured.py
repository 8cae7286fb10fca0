"""The scheduler of an engine, by its options and what its workers have said."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

from msgspec import structs

from lamina.observe.trace import Recorder
from lamina.protocol.beginnings import prompt_room
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.control import ComputeReady
from lamina.protocol.groups import Capacity, usable_blocks
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.options.sparsity import parse_error_budget
from lamina.protocol.plan import Bound
from lamina.protocol.stages import grants_ahead

from .blocks.evictions import Evictions
from .blocks.prefixes import Prefixes
from .blocks.prompt_store import PromptKeys, PromptStore
from .blocks.swaps import Swaps
from .blocks.tier import Tier
from .conductor.estimate import StagedPrefill, TransferFit, TransferTime
from .conductor.reasons import Reasons
from .prefill import Prefill
from .promises import Promises
from .scheduler import Scheduler
from .shadows import Shadows

NONCE_BYTES = 16
FIRST_BYTES_PER_S = 1e9  # from one prefill worker to another, until some were sent


def blocks_of(info: ComputeReady) -> BlockTables:
    """The memory workers' blocks, all free."""
    return BlockTables(
        info.windows, usable_blocks(info.num_blocks), info.block_size, info.lanes, info.stripe, info.stays, info.sparse
    )


def check_room(scheduler: Scheduler, info: ComputeReady, capacity: Capacity) -> None:
    """Raises ValueError where memory workers of ``capacity`` have no room for the KV of all that runs."""
    if lacking := scheduler.lacks_room(blocks_of(structs.replace(info, **capacity._asdict()))):
        raise ValueError(
            f"the KV of {lacking} running sequences would have no room: take more --memory-workers, or wait until some "
            f"have ended"
        )


def cordoned(scheduler: Scheduler, info: ComputeReady) -> list[int]:
    """Memory workers on which no new sequence begins."""
    return sorted({worker for group in scheduler.closed for worker in info.holders[group]})


def cordon(scheduler: Scheduler, info: ComputeReady, worker: int, *, on: bool) -> None:
    """Have no new sequence begin on a memory worker, or have them begin there again. Under tensor parallelism the same
    holds for those of the other ranks that have the same sequences. Raises ValueError where that cannot be.
    """
    there = sorted({w for holders in info.holders for w in holders})
    if worker not in there:
        raise ValueError(f"memory worker {worker}: there are memory workers 0 to {there[-1]}")
    if info.stripe or all(lanes.all for lanes in info.lanes):
        raise ValueError(
            "each memory worker has a part of every sequence, so none can go without new ones: that is for several "
            "workers with --partition request; have it drained instead"
        )
    lanes = next(own for own, holders in zip(info.lanes, info.holders, strict=True) if worker in holders)
    groups = {group for group, own in enumerate(info.lanes) if own == lanes}
    closed = scheduler.closed | groups if on else scheduler.closed - groups
    if len(closed) == len(info.lanes):
        raise ValueError(f"memory worker {worker} is the last one on which sequences begin: let them begin on another")
    scheduler.closed.clear()
    scheduler.closed.update(closed)


def scheduler_of(
    config: EngineConfig,
    info: ComputeReady,
    ledger: BlockTables,
    num_batches: int,
    promises: Promises,
    clock: Callable[[], float],
    scheduler_class: type[Scheduler] = Scheduler,
) -> Scheduler:
    """``num_batches``: that take turns at first. ``promises``: to those that come. ``clock``: seconds."""
    batching, topology = config.batching, config.topology
    tier, prefixes = _tier(config, ledger, info), _prefixes(config, ledger, clock)
    stores = _stores(config, info, promises, prefixes.page)
    budget = parse_error_budget(config.kv.kv_error_budget)
    scheduler = scheduler_class(
        ledger,
        max_num_seqs=batching.max_num_seqs,
        prefill_chunk=batching.prefill_chunk,
        aligned=config.model.deterministic,
        num_batches=num_batches,
        num_layers=info.num_layers,
        num_replicas=topology.replicas,
        prefill=Prefill(
            topology.prefill_groups,
            batching.prefill_chunk,
            topology.most_batches,
            promises,
            stores,
            grants_ahead(topology.prefill_pipeline, info.windows),
        ),
        prefixes=prefixes,
        tier=tier,
        swaps=_swaps(config, tier),
        evictions=_evictions(config, info),
        shadows=Shadows(config.kv, budget) if budget else None,
        homes=topology.memory_workers if topology.on_loan else 0,
        moving_ranks=topology.tensor_parallel_size if config.moves_some else 0,
        view=info.view,
    )
    promises.pooled, promises.shared = prefixes.length_of, prefixes.shared
    _explain(promises, info)
    return scheduler


def _explain(promises: Promises, info: ComputeReady) -> None:
    if promises.reasons:
        promises.reasons.info = info


def _stores(config: EngineConfig, info: ComputeReady, promises: Promises, page: int) -> list[PromptStore]:
    """Of prefill workers; none where they have no room for more than a prompt each, or nothing is to be kept of
    prompts. ``promises`` knows the keys then.
    """
    stores, keys = list[PromptStore](), PromptKeys(page)
    for worker, bound in enumerate(info.stores if page else []):
        room = prompt_room(bound.windows, bound.num_blocks, info.block_size, info.max_model_len, config.batching)
        if room is None:
            stores.clear()
            break
        blocks = BlockTables(bound.windows, bound.num_blocks, info.block_size)
        stores.append(PromptStore(worker, promises.conductor.directory, keys, blocks, room))
    promises.keys = keys if stores else None
    learned = promises.conductor.transfers
    promises.conductor.transfers = (learned or _transfers(info)) if stores else None
    return stores


def _transfers(info: ComputeReady) -> TransferFit | None:
    """From one prefill worker to another, until some are seen. None where a window leaves no whole prompt, or nobody
    says what a token takes.
    """
    if any(window for bound in info.stores for window in bound.windows):
        return None
    stored = [sum(bound.num_blocks) * info.block_size for bound in info.stores]
    per_token = max(bound.kv_bytes / tokens for bound, tokens in zip(info.stores, stored, strict=True))
    return TransferFit(TransferTime.at_rate(FIRST_BYTES_PER_S / per_token)) if per_token else None


def renew_stores(scheduler: Scheduler, config: EngineConfig, info: ComputeReady, stores: list[Bound]) -> ComputeReady:
    """``info`` with the stores that prefill workers have now. A worker that has taken a lost one's place may have
    another size of it; behind the loss all are empty.
    """
    _explain(scheduler.prefill.promises, info)
    if stores == info.stores:
        return info
    info = structs.replace(info, stores=stores)
    scheduler.prefill.renew(_stores(config, info, scheduler.prefill.promises, scheduler.prefixes.page))
    return info


def promises_of(config: EngineConfig, clock: Callable[[], float], trace: Recorder) -> Promises:
    """Nothing is promised at first. ``clock``: seconds, for what prompts take. ``trace``: of its reasons."""
    staged = StagedPrefill(config.topology.prefill_pipeline, config.batching.prefill_chunk)
    promises = Promises(config.topology.prefill_groups, config.batching.max_num_seqs, clock, staged)
    stages = staged.stages if config.topology.prefill_workers else 0
    promises.reasons = Reasons(trace.note, stages) if trace.notes is not None else None
    return promises


def _prefixes(config: EngineConfig, ledger: BlockTables, clock: Callable[[], float]) -> Prefixes:
    """Where bits count, a prefix ends where a fresh prompt would have been cut."""
    batching, fixed = config.batching, config.model.deterministic
    page = math.lcm(ledger.block_size, batching.prefill_chunk if fixed else 1)
    kept = page if config.keeps_prefixes else 0
    return Prefixes(ledger, kept, prompts_only=fixed, exact=not fixed, clock=clock)


def _evictions(config: EngineConfig, info: ComputeReady) -> Evictions | None:
    if not config.kv.evicts:
        return None
    return Evictions(config.kv, info.block_size, len({w for group in info.holders for w in group}))


def _tier(config: EngineConfig, ledger: BlockTables, info: ComputeReady) -> Tier | None:
    """None: nothing is kept beside the pools. Where bits count, a prompt is loaded as it is forked."""
    if info.tier is None:
        return None
    if info.tier.complete and any(info.windows):
        raise ValueError("--decode-only loads whole prompts, and layers of this model have a window: leave it out")
    fixed = config.model.deterministic
    whole = math.lcm(info.tier.page, config.batching.prefill_chunk if fixed else 1)
    return Tier(info.tier, ledger, info.holders, whole=whole, prompts_only=fixed)


def _swaps(config: EngineConfig, tier: Tier | None) -> Swaps | None:
    if tier is None or tier.complete:
        return None
    mode, fixed = config.batching.preemption_mode, config.model.deterministic
    return Swaps(tier, mode, secrets.token_bytes(NONCE_BYTES), fixed=fixed)
