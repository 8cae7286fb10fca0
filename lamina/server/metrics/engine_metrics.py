"""Metrics of the engine and its workers, from the engine process's latest reports; read when Prometheus scrapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.messages import EngineState

from .metric_table import family_of

Value = tuple[str, tuple[str, ...], Any]  # a metric of METRICS, its own labels, the value
MEMORY_WORKER_COUNTERS = {  # a memory worker's counter -> the metric
    "kv_failed_transfers": "kv_offload_failed_transfers",
    "kv_fetched_pages": "kv_prefetched_pages",
    "kv_loaded_bytes": "kv_offload_load_bytes",
    "kv_saved_bytes": "kv_offload_store_bytes",
    "refused": "rejected_step_plans",
    "remote_bytes": "attention_spilled_kv_read_bytes",
    "stored_bytes": "attention_kv_read_bytes",
}


class EngineMetrics(Collector):
    """Collects from the client's latest EngineState and WorkerCounters. Metrics without a value yet are absent."""

    def __init__(self, client: EngineClient, labels: Mapping[str, str]) -> None:
        self._client = client
        self._names = list(labels)
        self._values = list(labels.values())

    def describe(self) -> list[Metric]:
        """Return nothing: names depend on what has been reported."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = dict[str, Any]()
        for name, labels, value in self._all():
            if name not in families:
                families[name] = family_of(name, self._names)
            families[name].add_metric([*self._values, *labels], *(value if isinstance(value, tuple) else [value]))
        yield from families.values()

    def _all(self) -> Iterator[Value]:
        if (state := self._client.state) is not None:
            yield from self._queue(state)
            yield from self._blocks(state)
            for name, value in state.metrics.items():
                yield from _by_label(name, value) if isinstance(value, dict) else [(name, (), value)]
        if self._client.counters:
            yield from self._workers()

    def _queue(self, state: EngineState) -> Iterator[Value]:
        yield "num_requests_running", (), state.running
        yield "num_requests_waiting", (), state.waiting
        yield "num_requests_waiting_by_reason", ("capacity",), state.waiting  # there is no other reason
        yield "num_requests_waiting_by_reason", ("deferred",), 0
        yield "kv_cache_usage_perc", (), self.kv_usage
        yield "engine_steps", (), state.steps

    def _blocks(self, state: EngineState) -> Iterator[Value]:
        """Yield metrics of KV blocks, by memory worker and layer group."""
        ready = self._client.ready
        config = {
            "block_size": ready.block_size,
            "num_gpu_blocks": sum(map(min, ready.num_blocks)),
            "cache_dtype": ready.dtype,
            "kv_cache_max_concurrency": f"{ready.max_tokens_that_fit:.2f}",
            "kv_cache_size_tokens": int(ready.max_tokens_that_fit * ready.max_model_len),
        }
        yield "cache_config", (), {name: str(value) for name, value in config.items()}
        for group, (totals, free) in enumerate(zip(ready.num_blocks, state.free_blocks, strict=True)):
            used = min(totals) - free
            for worker, total in zip(ready.holders[group], totals, strict=True):
                yield "kv_blocks", (f"memory-{worker}", str(group), "used"), used
                yield "kv_blocks", (f"memory-{worker}", str(group), "free"), total - used
        for group, count in enumerate(state.evictable_blocks):
            for worker in ready.holders[group]:
                yield "kv_evictable_blocks", (f"memory-{worker}", str(group)), count
        if any(ready.sparse):
            held = {"full": 0, "sparse": 0}
            for sparse, totals, free in zip(ready.sparse, ready.num_blocks, state.free_blocks, strict=True):
                held["sparse" if sparse else "full"] += min(totals) - free
            yield from _by_label("kv_sparse_blocks_in_use", held)

    def _workers(self) -> Iterator[Value]:
        rows = defaultdict[str, float](float)  # rows that workers of each role have computed
        for worker, values in sorted(self._client.counters.items()):
            rows[worker.partition("-")[0]] += values.get("rows", 0.0)
            for name, value in values.items():
                if name.endswith("_s"):
                    yield "worker_seconds", (worker, name.removesuffix("_s")), value
                elif name.startswith("bytes_"):
                    yield "memory_worker_message_bytes", (worker, name.removeprefix("bytes_")), value
                elif name in MEMORY_WORKER_COUNTERS:
                    yield MEMORY_WORKER_COUNTERS[name], (worker,), value
        for kind, size in self._client.ready.row_bytes.items():
            yield "attention_message_bytes", (kind,), size * (rows["compute"] + rows["prefill"] * (kind == "kv"))
        calls, wait_s = self.attention_calls
        yield "attention_wait_seconds", (), (int(calls), wait_s)

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks in use, 0 to 1, in the fullest layer group."""
        state, ready = self._client.state, self._client.ready
        most = [min(totals) for totals in ready.num_blocks]
        free = state.free_blocks if state else most
        return max((1.0 - f / n for f, n in zip(free, most, strict=True) if n), default=0.0)

    @property
    def attention_calls(self) -> tuple[float, float]:
        """Layers computed with the memory workers since the start, and the seconds waited for them."""
        computes = [values for worker, values in self._client.counters.items() if worker.startswith("compute")]
        steps = sum(values.get("steps", 0.0) for values in computes)
        return steps * self._client.ready.attention_calls_per_step, sum(v.get("wait_s", 0.0) for v in computes)


def _by_label(name: str, values: Mapping[str, float]) -> Iterator[Value]:
    """Yield a value of the metric for each label."""
    for label, value in sorted(values.items()):
        yield name, (label,), value
