"""Builds the reports of an engine process to its server: facts and state."""

from __future__ import annotations

from lamina.engine.engine import Engine
from lamina.executor.worker_executor import WorkerExecutor
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ReferenceDecoder

from .messages import EngineReady, EngineState


def state_of(engine: Engine, pools: WorkerExecutor, sessions: dict[str, int], steps: int) -> EngineState:
    """Return the engine's state. ``sessions``: tier -> their number; ``steps``: steps done so far."""
    scheduler, borrower, features = engine.scheduler, pools.borrower, engine.scheduler.features
    prefixes, tier = features[PrefixCache], features.get(OffloadIndex)
    pruner, reference_decoder = features.get(BlockPruner), features.get(ReferenceDecoder)
    return EngineState(
        running=scheduler.num_unfinished,
        waiting=scheduler.num_waiting,
        free_blocks=list(engine.free_blocks),
        evictable_blocks=prefixes.evictable(engine.free_blocks),
        preemptions=scheduler.num_preemptions,
        dropped_blocks=pruner.num_dropped if pruner else 0,
        errors=reference_decoder.errors if reference_decoder else None,
        borrowed_blocks=scheduler.borrowed_blocks,
        leased_blocks=borrower.by_creditor if borrower else None,
        moved_bytes=dict(pools.resizer.moved_bytes),
        lent_blocks=borrower.lent_blocks if borrower else None,
        loan_refusals=borrower.refusals if borrower else 0,
        debt_cycles=borrower.debt_cycles if borrower else None,
        moved_blocks=features[KvMigration].num_moved_blocks if engine.config.migrates_kv else None,
        prefix_queries=prefixes.num_queried_tokens,
        prefix_hits=prefixes.num_hit_tokens,
        external_queries=tier.num_queried_tokens if tier else 0,
        external_hits=tier.num_hit_tokens if tier else 0,
        sessions=sessions,
        session_hits=dict(engine.sessions.hits),
        session_waits=dict(engine.sessions.waits),
        steps=steps,
        recovering=pools.is_recovering,
        slo=engine.slo_admission.counts(),
        kv_replicas=engine.slo_admission.num_page_replicas,
    )


def ready_of(engine: Engine, pools: WorkerExecutor) -> EngineReady:
    """Return what a server must know of an engine whose workers have connected."""
    info = pools.ready
    names = {"q": "q_bytes", "kv": "kv_bytes", "o": "o_bytes"}
    return EngineReady(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=engine.config.batching.max_num_seqs,
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=list(info.num_blocks),
        holders=info.holders,
        sparse=info.sparse,
        attention_calls_per_step=len(info.summary.get("q_bytes", [])),
        caches_prefixes=engine.config.caches_prefixes,
        truncates=engine.config.overflow.truncates_context,
        max_tokens_that_fit=engine.scheduler.max_sequences_of(info.max_model_len),
        row_bytes={k: sum(info.summary.get(v, [])) for k, v in names.items()},
        workers=sorted(pools.pids),
        hosts=pools.hosts,
    )
