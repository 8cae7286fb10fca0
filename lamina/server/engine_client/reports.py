"""Builds the reports of an engine process to its server: facts and state."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.engine.engine import Engine
from lamina.engine.scheduler_stats import SchedulerStats
from lamina.executor.worker_executor import WorkerExecutor

from .messages import EngineReady, EngineState

Metrics = dict[str, float | Mapping[str, float] | None]  # by the names of metric_table.py; None: there is no value


def state_of(engine: Engine, pools: WorkerExecutor, sessions: dict[str, int], steps: int) -> EngineState:
    """Return the engine's state. ``sessions``: tier -> their number; ``steps``: steps done so far."""
    stats = engine.scheduler_stats
    values = {**_kv_metrics(stats, pools), "prefill_replicated_pages": engine.slo_admission.num_page_replicas}
    if engine.config.caches_prefixes:
        values["sessions"] = sessions
        values["session_resumed_turns"] = engine.sessions.hits
        values["session_wait_seconds"] = engine.sessions.waits
    if (errors := stats.sparsity_errors) is not None:
        values["kv_sparsity_measured_tokens"] = errors.tokens
        values["kv_sparsity_kl_nats"] = errors.kl
        values["kv_sparsity_top1_disagreement_ratio"] = errors.top1
        values["kv_sparsity_budget_tokens"] = errors.budget
        values["kv_sparsity_recomputed_requests"] = errors.rebuilt
    if (counts := engine.slo_admission.counts()) is not None:
        values["prefill_load"] = counts.prefill_load
        values["decode_load"] = counts.decode_load
        values["ttft_samples"] = counts.prompts
        values["ttft_predicted_seconds"] = counts.predicted_ttft_s
        values["ttft_actual_seconds"] = counts.actual_ttft_s
        values["rejected_after_prefill_tokens"] = counts.rejected_after_prefill_tokens
    return EngineState(
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=list(engine.free_blocks),
        evictable_blocks=stats.evictable_blocks,
        steps=steps,
        recovering=pools.is_recovering,
        metrics={n: dict(v) if isinstance(v, Mapping) else v for n, v in values.items() if v is not None},
    )


def _kv_metrics(stats: SchedulerStats, pools: WorkerExecutor) -> Metrics:
    """Return metrics of preemptions, of the prefix cache, and of KV that was dropped, or lies or goes elsewhere."""
    borrower = pools.borrower
    return {
        "num_preemptions": stats.preemptions,
        "prefix_cache_queries": stats.queried_tokens,
        "prefix_cache_hits": stats.hit_tokens,
        "external_prefix_cache_queries": stats.stored_queried_tokens,
        "external_prefix_cache_hits": stats.stored_hit_tokens,
        "kv_evicted_by_sparsity_blocks": stats.pruned_blocks,
        "spilled_blocks": _by_memory_worker(pools.ready.holders, stats.borrowed_blocks),
        "kv_migrated_bytes": pools.resizer.moved_bytes,
        "kv_migrated_blocks": stats.migrated_blocks,
        "borrowed_bytes": borrower.by_creditor if borrower else None,
        "borrow_refused": borrower.refusals if borrower else None,
        "lent_blocks": borrower.lent_blocks if borrower else None,
        "debt_cycles": borrower.debt_cycles if borrower else None,
    }


def _by_memory_worker(holders: list[list[int]], blocks: list[int] | None) -> dict[str, float] | None:
    """Return the blocks of each memory worker. ``blocks``: those on each holder of a layer group, by group."""
    if blocks is None:
        return None
    workers = {f"memory-{worker}": 0.0 for worker in sorted({worker for group in holders for worker in group})}
    for group, count in zip(holders, blocks, strict=True):
        for worker in group:
            workers[f"memory-{worker}"] += count
    return workers


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
        end_token_ids=info.eos_token_ids,
        truncates=engine.config.overflow.truncates_context,
        max_tokens_that_fit=engine.scheduler.max_sequences_of(info.max_model_len),
        row_bytes={k: sum(info.summary.get(v, [])) for k, v in names.items()},
        workers=sorted(pools.pids),
        hosts=pools.hosts,
    )
