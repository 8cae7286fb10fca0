"""Builds the scheduler of an engine, and all features, from its options and the facts of its workers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from functools import partial
from typing import NamedTuple

from msgspec import structs

from lamina.config.conflicts import WINDOWED_LAYERS, conflict_text
from lamina.config.engine_config import EngineConfig
from lamina.config.sparsity import parse_error_budget
from lamina.kv.page_keys import ChainRoot
from lamina.observe.trace import Recorder
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.capacity import Capacity, num_usable_blocks
from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import Clock
from lamina.protocol.mixers import versions_of_sequence
from lamina.protocol.prefill_stages import max_grants_in_flight
from lamina.protocol.prefix_fetch import prompt_cache_tokens
from lamina.protocol.sparse_layers import max_kept_tokens
from lamina.protocol.step_plan import BindReply
from lamina.scheduler.affinity import Affinity
from lamina.scheduler.conductor import StoredLatency
from lamina.scheduler.conductor.decision_log import DecisionLog
from lamina.scheduler.conductor.latency_model import PrefillPipelineShape, TransferLatency, TransferLatencyEstimator
from lamina.scheduler.feature import Feature, NewMemory
from lamina.scheduler.kv_manager.allocator import KvAllocator
from lamina.scheduler.kv_manager.hybrid_prefix_cache import HybridPrefixCache
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.prompt_store import PromptCache
from lamina.scheduler.kv_manager.session_cache import SessionCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.kv_manager.stored_states import StoredStates
from lamina.scheduler.kv_manager.swap import SwapPolicy
from lamina.scheduler.prefill_dispatch import PrefillDispatcher
from lamina.scheduler.prefill_placement import PrefillPlacement
from lamina.scheduler.prefix_index import PageKeys, PrefixIndex
from lamina.scheduler.recurrent_states import RecurrentStates
from lamina.scheduler.scheduler import Scheduler
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.session_table import Sessions
from lamina.scheduler.slo_admission import KnownKv, KvTransferLatency, SloAdmission
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder
from lamina.scheduler.sparsity.selection import BlockSelection
from lamina.scheduler.state_ledger import StateLedger
from lamina.scheduler.step_timing import StepTimer

from .feature import EngineFeature
from .hybrid_model import max_num_seqs
from .slo import SloGate
from .tuning.tuner import Tuner

NONCE_BYTES = 16
INITIAL_TRANSFER_BYTES_PER_S = 1e9  # between prefill workers, until a transfer is measured


def new_block_tables(info: ComputeReady) -> BlockTables:
    """The memory workers' blocks, all free."""
    return BlockTables(
        info.windows,
        num_usable_blocks(info.num_blocks),
        info.block_size,
        info.kv_shards,
        info.stripe_blocks,
        info.single_shard,
        info.sparse,
    )


def new_memory(config: EngineConfig, info: ComputeReady, new_shards: Mapping[int, int]) -> NewMemory:
    """Other memory workers, as the scheduler counts them. ``new_shards``: see EpochChanged."""
    blocks, most = new_block_tables(info), max_num_seqs(config, info)
    return NewMemory(blocks, most, new_shards, info.state_shards, info.state_slots)


def check_kv_capacity(scheduler: Scheduler, info: ComputeReady, capacity: Capacity) -> None:
    """Raises ValueError if memory workers of ``capacity`` have no room for KV or states of all running sequences."""
    versions = info.bind.state_versions if info.bind else 0
    if capacity.state_shards and capacity.state_slots < scheduler.num_unfinished * versions:
        raise ValueError(
            f"memory workers would have room for {capacity.state_slots} recurrent states, and "
            f"{scheduler.num_unfinished} running sequences may have {versions} each: wait until some have ended"
        )
    if lacking := scheduler.sequences_without_room(new_block_tables(structs.replace(info, **capacity._asdict()))):
        raise ValueError(
            f"the KV of {lacking} running sequences would have no room: take more --memory-workers, or wait until some "
            f"have ended"
        )


def cordoned_workers(scheduler: Scheduler, info: ComputeReady) -> list[int]:
    """Memory workers on which no new sequence begins."""
    return sorted({worker for group in scheduler.cordoned for worker in info.holders[group]})


def cordon(scheduler: Scheduler, info: ComputeReady, worker: int, *, on: bool) -> None:
    """Cordon or uncordon a memory worker: no new sequence begins on a cordoned one.

    With tensor parallelism, memory workers of other ranks with the same sequences follow. Raises ValueError if the
    worker is unknown, is the last open one, or has a part of every sequence.
    """
    there = sorted({w for holders in info.holders for w in holders})
    if worker not in there:
        raise ValueError(f"memory worker {worker}: there are memory workers 0 to {there[-1]}")
    if info.stripe_blocks or all(lanes.has_all for lanes in info.kv_shards):
        raise ValueError(
            "each memory worker has a part of every sequence, so none can go without new ones: that is for several "
            "workers with --partition request; have it drained instead"
        )
    lanes = next(own for own, holders in zip(info.kv_shards, info.holders, strict=True) if worker in holders)
    groups = {group for group, own in enumerate(info.kv_shards) if own == lanes}
    closed = scheduler.cordoned | groups if on else scheduler.cordoned - groups
    if len(closed) == len(info.kv_shards):
        raise ValueError(f"memory worker {worker} is the last one on which sequences begin: let them begin on another")
    scheduler.uncordon(groups)
    scheduler.cordon(closed)


class EngineParts(NamedTuple):
    """The parts that an engine's options, and the facts of its workers, make. ``features``: of the engine."""

    accounting: BlockTables
    scheduler: Scheduler
    slo_admission: SloAdmission
    sessions: Sessions
    features: Several[EngineFeature]


PartsBuilder = Callable[[EngineConfig, ComputeReady, Clock, Recorder], EngineParts]


def build_parts(
    config: EngineConfig,
    info: ComputeReady,
    clock: Clock,
    trace: Recorder,
    *,
    keeps_slo: bool = True,
    scheduler_class: type[Scheduler] = Scheduler,
) -> EngineParts:
    """Builds the scheduler of an engine with all features. ``keeps_slo``: its SLO admission may get limits."""
    batching, topology = config.batching, config.topology
    tables = new_block_tables(info)
    prefixes = _prefix_cache(config, info, tables, clock)
    stored = _offload_index(config, info, tables, prefixes)
    slo_admission = _slo_admission(config, info, prefixes, stored, clock, trace)
    conducts = keeps_slo or topology.prefill_workers > 0 or slo_admission.decision_log is not None
    kind = SpillAllocator if topology.partition == "spill" else KvAllocator
    allocator = kind(
        tables,
        batching.max_num_seqs + batching.prefill_chunk,
        topology.memory_workers if topology.may_borrow else 0,
        max_kept_tokens(config.kv) if config.kv.drops_blocks else 0,
    )
    features = _features(config, info, tables, allocator, slo_admission, prefixes, stored, conducts=conducts)
    scheduler: Scheduler
    if topology.measures_pipeline:
        features.append(Tuner(topology.max_batches, lambda number: scheduler.set_num_batches(number)))  # noqa: PLW0108
    scheduler = scheduler_class(
        tables,
        max_num_seqs=batching.max_num_seqs,
        prefill_chunk=batching.prefill_chunk,
        aligned=config.model.deterministic,
        num_batches=1 if topology.measures_pipeline else topology.max_batches,
        num_layers=info.num_layers,
        allocator=allocator,
        features=features,
    )
    scheduler.begin_epoch(info.epoch, topology.replicas)
    gates = [SloGate(slo_admission, scheduler)] if conducts else []
    return EngineParts(tables, scheduler, slo_admission, prefixes.sessions, gates)


def _features(
    config: EngineConfig,
    info: ComputeReady,
    tables: BlockTables,
    allocator: KvAllocator,
    slo_admission: SloAdmission,
    prefixes: PrefixCache,
    offload_index: OffloadIndex | None,
    *,
    conducts: bool,
) -> list[Feature]:
    """The configured features, in the order in which the scheduler calls them. A feature uses only earlier ones.

    ``conducts``: prompts need reservations of the Conductor.
    """
    budget, ranks = parse_error_budget(config.kv.kv_error_budget), config.topology.tensor_parallel_size
    prefill = _prefill(config, info, slo_admission, prefixes) if conducts else None
    swap = _swaps(config, info, offload_index)
    table: list[Feature | None] = [
        Affinity(),
        prefill,
        swap,
        ReferenceDecoder(config.kv, budget) if budget else None,
        prefixes,
        SessionCache(prefixes, tables, offload_index),
        offload_index,  # saves pages before evictions drop their blocks
        BlockSelection() if config.kv.is_sparse else None,
        RecurrentStates(prefixes) if isinstance(prefixes, HybridPrefixCache) else None,
        _evictions(config, info),
        PrefillPlacement(prefill, prefixes) if prefill else None,
        allocator if isinstance(allocator, SpillAllocator) else None,
        KvMigration(tables, allocator, prefixes, ranks) if config.migrates_kv and not info.state_shards else None,
        StepTimer(slo_admission, swap) if conducts or swap else None,
    ]
    return [feature for feature in table if feature is not None]


def _prefill(
    config: EngineConfig,
    info: ComputeReady,
    slo_admission: SloAdmission,
    prefixes: PrefixCache,
) -> PrefillDispatcher:
    caches_of = partial(_prompt_caches, config, info, prefixes)
    return PrefillDispatcher(
        config.topology.prefill_groups,
        config.batching.prefill_chunk,
        config.topology.max_batches,
        slo_admission,
        caches_of(info.prefill_stores),
        max_grants_in_flight(config.topology.prefill_pipeline, info.windows),
        info.block_size if slo_admission.conductor.stored_latency else 0,
        bound_stores=info.prefill_stores,
        caches_of=caches_of,
        recomputes=bool(info.state_shards),
    )


def _prompt_caches(
    config: EngineConfig, info: ComputeReady, prefixes: PrefixCache, stores: Several[BindReply]
) -> list[PromptCache]:
    """The prompt caches of prefill workers; none if there is no room beyond one prompt, no prefix caching, or recurrent
    states.
    """
    caches = list[PromptCache]()
    keeps = prefixes.keys.page_size and not info.state_shards
    for worker, bound in enumerate(stores if keeps else []):
        room = prompt_cache_tokens(
            bound.windows, bound.num_blocks, info.block_size, info.max_model_len, config.batching
        )
        if room is None:
            return []
        blocks = BlockTables(bound.windows, bound.num_blocks, info.block_size)
        caches.append(PromptCache(worker, prefixes.prefix_index, prefixes.keys, blocks, room))
    return caches


def _transfer_latency(info: ComputeReady) -> TransferLatencyEstimator | None:
    """The initial model of transfers between prefill workers.

    None if sliding windows leave no whole prompt there, or the bytes of a token are unknown.
    """
    if not info.prefill_stores or any(window for bound in info.prefill_stores for window in bound.windows):
        return None
    stored = [sum(bound.num_blocks) * info.block_size for bound in info.prefill_stores]
    per_token = max(bound.kv_bytes / tokens for bound, tokens in zip(info.prefill_stores, stored, strict=True))
    return (
        TransferLatencyEstimator(TransferLatency.at_rate(INITIAL_TRANSFER_BYTES_PER_S / per_token))
        if per_token
        else None
    )


def _stored_latency(config: EngineConfig, info: ComputeReady) -> StoredLatency | None:
    """The initial model of the time to get stored KV from memory workers.

    None if prefill workers get none, such as of layers with windows, or without the states that belong to it.
    """
    if not config.fetches_stored_kv or info.state_shards or (first := _transfer_latency(info)) is None:
        return None
    return StoredLatency(TransferLatencyEstimator(first.model), first)


def _slo_admission(
    config: EngineConfig,
    info: ComputeReady,
    prefix_cache: PrefixCache,
    offload_index: OffloadIndex | None,
    clock: Callable[[], float],
    trace: Recorder,
) -> SloAdmission:
    """Returns the SLO admission of an engine, without limits at first.

    ``prefix_cache``, ``offload_index``: know cached and stored tokens. ``clock``: returns seconds. ``trace``: gets
    decisions.
    """

    def stored_tokens_of(sequence: Sequence) -> tuple[int, int]:
        pool = prefix_cache.num_cached_tokens(sequence)
        index = None if sequence.turn.discarded_ranges else offload_index
        load = index.find_loadable(sequence, pool) if index else None
        return (load.length, load.length) if load else (pool, 0)

    staged = PrefillPipelineShape(config.topology.prefill_pipeline, config.batching.prefill_chunk)
    stages = staged.stages if config.topology.prefill_workers else 0
    known = KnownKv(
        prefix_cache.prefix_index,
        prefix_cache.keys,
        prefix_cache.num_cached_or_pending,
        prefix_cache.num_shared_tokens,
        stored_tokens_of,
    )
    return SloAdmission(
        config.topology.prefill_groups,
        config.batching.max_num_seqs,
        clock,
        staged,
        known=known,
        transfers=KvTransferLatency(_transfer_latency(info), _stored_latency(config, info)),
        decision_log=DecisionLog(trace.note, stages, info) if trace.notes is not None else None,
    )


def _prefix_cache(
    config: EngineConfig, info: ComputeReady, tables: BlockTables, clock: Callable[[], float]
) -> PrefixCache:
    """Returns the prefix cache. With ``--deterministic``, prefixes end where chunks of a fresh prompt end."""
    batching, fixed = config.batching, config.model.deterministic
    page = math.lcm(tables.block_size, batching.prefill_chunk if fixed else 1)
    kept = page if config.caches_prefixes else 0
    prompts_only = fixed or info.clamps_prompts
    form: Callable[..., PrefixCache] = PrefixCache
    if info.state_shards:
        versions = versions_of_sequence(config.topology.max_batches)
        form = partial(HybridPrefixCache, StateLedger(info.state_shards, info.state_slots, versions))
    stored = info.storage
    index = PrefixIndex(ChainRoot(stored.secret, stored.identity, stored.era) if stored else None)
    return form(tables, kept, prompts_only=prompts_only, exact=not fixed, clock=clock, prefix_index=index)


def _evictions(config: EngineConfig, info: ComputeReady) -> BlockPruner | None:
    if not config.kv.drops_blocks:
        return None
    return BlockPruner(config.kv, info.block_size, len({w for group in info.holders for w in group}))


def _offload_index(
    config: EngineConfig, info: ComputeReady, tables: BlockTables, prefixes: PrefixCache
) -> OffloadIndex | None:
    """Returns the index of KV in storage; None without storage.

    With ``--deterministic``, loaded prefixes end where those of the prefix cache do.
    """
    if info.storage is None:
        return None
    if info.storage.is_complete and any(info.windows):
        raise ValueError(conflict_text("--decode-only", WINDOWED_LAYERS))
    fixed = config.model.deterministic
    whole = math.lcm(info.storage.page_size, config.batching.prefill_chunk if fixed else 1)
    states: Callable[[PageKeys, PrefixIndex, int], StoredStates] = StoredStates
    if isinstance(prefixes, HybridPrefixCache):
        states = partial(StoredStates, shards=info.state_shards, snapshots_of=prefixes.snapshots_of)
    return OffloadIndex(
        info.storage,
        tables,
        info.holders,
        prefixes.prefix_index,
        whole=whole,
        prompts_only=fixed or info.clamps_prompts,
        exact=not fixed,
        num_parity=config.topology.num_parity,
        cached_tokens_of=prefixes.num_cached_tokens,
        states=states,
        recomputes=config.offload.kv_load_failure_policy == "recompute",
    )


def _swaps(config: EngineConfig, info: ComputeReady, offload_index: OffloadIndex | None) -> SwapPolicy | None:
    if offload_index is None or offload_index.is_complete or info.state_shards:
        return None
    mode, fixed = config.batching.preemption_mode, config.model.deterministic
    return SwapPolicy(offload_index, mode, secrets.token_bytes(NONCE_BYTES), fixed=fixed)
