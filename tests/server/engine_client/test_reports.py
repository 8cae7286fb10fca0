"""An engine reports values of metrics that exist, and none of features that it does not have.

Covers: lamina/engine/scheduler_stats.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_api import READY, simulated_engine

from lamina.config.partition import KvShards
from lamina.engine.scheduler_stats import collect_stats
from lamina.scheduler.kv_manager.migration import KvMigration
from lamina.scheduler.kv_manager.offload_index import OffloadIndex
from lamina.scheduler.kv_manager.prefix_cache import PrefixCache
from lamina.scheduler.kv_manager.spill_placement import SpillAllocator
from lamina.scheduler.slo_admission import SloCounts
from lamina.scheduler.sparsity.pruning import BlockPruner
from lamina.scheduler.sparsity.reference_decode import ErrorState, ReferenceDecoder
from lamina.server.engine_client.reports import state_of
from lamina.server.metrics.metric_table import METRICS

PREFIXES = SimpleNamespace(num_queried_tokens=9, num_hit_tokens=4, evictable=lambda free: [0, 0])
ERRORS = ErrorState(tokens=75, kl=0.25, top1=0.04, budget=2048, rebuilt=3)
PROMISED = SloCounts(prompts=2, predicted_ttft_s=0.5, actual_ttft_s=0.75, prefill_load=0.1, decode_load=0.2)


def reported(features: dict[type, Any], *, whole: bool) -> dict[str, Any]:
    scheduler: Any = SimpleNamespace(
        num_unfinished=1, num_waiting=2, num_preemptions=3, features={PrefixCache: PREFIXES, **features},
        available_blocks=(7, 8), running=[],
    )  # fmt: skip
    engine: Any = SimpleNamespace(
        scheduler_stats=collect_stats(scheduler), free_blocks=[7, 8],
        config=SimpleNamespace(caches_prefixes=whole, migrates_kv=whole),
        sessions=SimpleNamespace(hits={"host": 2}, waits={"host": 1.5}),
        slo_admission=SimpleNamespace(
            counts=lambda: PROMISED if whole else None, num_page_replicas=6 if whole else None
        ),
    )  # fmt: skip
    lent = SimpleNamespace(by_creditor={"b": 10}, lent_blocks={"c": 11}, refusals=12, debt_cycles=1)
    pools: Any = SimpleNamespace(
        is_recovering=False, borrower=lent if whole else None, ready=SimpleNamespace(holders=[[0], [0, 2]]),
        resizer=SimpleNamespace(moved_bytes={"weigh": 13} if whole else {}),
    )  # fmt: skip
    return dict(state_of(engine, pools, {"pool": 3}, steps=4).metrics)


def test_every_feature_has_its_values() -> None:
    metrics = reported({
        OffloadIndex: SimpleNamespace(num_queried_tokens=5, num_hit_tokens=2),
        SpillAllocator: SimpleNamespace(spill=SimpleNamespace(borrowed_blocks=lambda running: [0, 5])),
        KvMigration: SimpleNamespace(num_moved_blocks=14),
        BlockPruner: SimpleNamespace(num_dropped=40),
        ReferenceDecoder: SimpleNamespace(errors=ERRORS),
    }, whole=True)  # fmt: skip
    assert metrics == {
        "num_preemptions": 3, "prefix_cache_queries": 9, "prefix_cache_hits": 4, "external_prefix_cache_queries": 5,
        "external_prefix_cache_hits": 2, "spilled_blocks": {"memory-0": 5, "memory-2": 5},
        "kv_migrated_bytes": {"weigh": 13}, "kv_migrated_blocks": 14, "borrowed_bytes": {"b": 10},
        "borrow_refused": 12, "lent_blocks": {"c": 11}, "debt_cycles": 1, "kv_evicted_by_sparsity_blocks": 40,
        "kv_sparsity_measured_tokens": 75, "kv_sparsity_kl_nats": 0.25, "kv_sparsity_top1_disagreement_ratio": 0.04,
        "kv_sparsity_budget_tokens": 2048, "kv_sparsity_recomputed_requests": 3, "prefill_replicated_pages": 6,
        "prefill_load": 0.1, "decode_load": 0.2, "ttft_samples": 2, "ttft_predicted_seconds": 0.5,
        "ttft_actual_seconds": 0.75, "rejected_after_prefill_tokens": 0, "sessions": {"pool": 3},
        "session_resumed_turns": {"host": 2}, "session_wait_seconds": {"host": 1.5},
    }  # fmt: skip
    assert metrics.keys() <= METRICS.keys()


def test_features_that_are_not_there_have_none() -> None:
    assert reported({}, whole=False) == {
        "num_preemptions": 3, "prefix_cache_queries": 9, "prefix_cache_hits": 4, "external_prefix_cache_queries": 0,
        "external_prefix_cache_hits": 0, "kv_migrated_bytes": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "hybrid", "migrates"),
    [
        ({}, False, False),
        ({"partition": "request"}, False, True),
        ({"partition": "spill"}, False, True),
        ({"kv_sparsity": "evict", "kv_budget": 128}, False, False),
        ({}, True, False),
        ({"partition": "request"}, True, False),
    ],
)
def test_every_table_of_features_that_the_factory_builds_can_be_reported(
    options: dict[str, Any], hybrid: bool, migrates: bool
) -> None:
    ready = msgspec.structs.replace(READY, state_shards=[KvShards()], state_slots=40) if hybrid else READY
    engine = simulated_engine({"max_num_seqs": 4, **options}, ready)
    pools: Any = SimpleNamespace(
        is_recovering=False, borrower=None, ready=ready, resizer=SimpleNamespace(moved_bytes={})
    )
    metrics = state_of(engine, pools, {}, steps=0).metrics
    assert metrics.keys() <= METRICS.keys()
    assert ("kv_migrated_blocks" in metrics) == migrates
