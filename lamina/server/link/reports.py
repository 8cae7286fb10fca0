"""Reports of an engine process to its server: what there is, and how it stands."""

from __future__ import annotations

from lamina.engine.engine import Engine
from lamina.fleet.pools import Pools

from .messages import Ready, State


def state_of(engine: Engine, pools: Pools, sessions: dict[str, int], steps: int) -> State:
    """What an engine says of itself. ``sessions``: how many, by tier; ``steps``: that it has done."""
    scheduler, borrower = engine.scheduler, pools.borrower
    return State(
        running=scheduler.num_unfinished,
        waiting=scheduler.num_waiting,
        free_blocks=list(engine.free_blocks),
        evictable_blocks=scheduler.prefixes.evictable(engine.free_blocks),
        preemptions=scheduler.num_preemptions,
        dropped_blocks=scheduler.evictions.num_dropped if scheduler.evictions else 0,
        errors=scheduler.shadows.errors if scheduler.shadows else None,
        borrowed=scheduler.borrowed,
        leased=borrower.by_creditor if borrower else None,
        moved=dict(pools.elastic.moved),
        lent=borrower.lent if borrower else None,
        loan_refusals=borrower.refusals if borrower else 0,
        debt_cycles=borrower.debt_cycles if borrower else None,
        moved_blocks=scheduler.moves.num_moved if engine.config.moves_some else None,
        prefix_queries=scheduler.prefixes.num_queried,
        prefix_hits=scheduler.prefixes.num_hit,
        external_queries=scheduler.tier.num_queried if scheduler.tier else 0,
        external_hits=scheduler.tier.num_hit if scheduler.tier else 0,
        sessions=sessions,
        session_hits=dict(scheduler.sessions.hits),
        session_waits=dict(scheduler.sessions.waits),
        steps=steps,
        recovering=pools.recovering,
        promised=engine.promises.counts(),
        kv_replicas=engine.promises.replicas,
    )


def ready_of(engine: Engine, pools: Pools) -> Ready:
    """What a server is to know of an engine whose workers have met."""
    info = pools.ready
    names = {"q": "q_bytes", "kv": "kv_bytes", "o": "o_bytes"}
    return Ready(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_seqs=engine.config.batching.max_num_seqs,
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=list(info.num_blocks),
        holders=info.holders,
        sparse=info.sparse,
        hops_per_step=len(info.summary.get("q_bytes", [])),
        keeps_kv=engine.config.keeps_prefixes,
        truncates=engine.config.overflow.truncates,
        fits=engine.scheduler.most_sequences(info.max_model_len),
        row_bytes={k: sum(info.summary.get(v, [])) for k, v in names.items()},
        workers=sorted(pools.pids),
        hosts=pools.hosts,
    )
