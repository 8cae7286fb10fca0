"""Metrics of the engine and its workers, from the engine process's latest reports; read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lamina.scheduler.slo_admission import SloCounts
from lamina.scheduler.sparsity.reference_decode import ErrorState
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.messages import EngineState

from .http_metrics import PREFIX

MEMORY_WORKER_COUNTERS = {  # a memory worker's counter -> the family's name, and its help text
    "kv_failed_transfers": ("kv_failed_transfers", "loads and saves of which a memory worker could not do all"),
    "kv_fetched_pages": (
        "kv_fetched_pages",
        "pages that a memory worker has fetched from its disk before a turn needed them",
    ),
    "kv_loaded_bytes": ("kv_offload_load_bytes", "K and V that a memory worker has loaded from storage"),
    "kv_saved_bytes": ("kv_offload_store_bytes", "K and V that a memory worker has saved to storage"),
}


class EngineMetrics(Collector):
    """Collects from the client's latest EngineState and WorkerCounters. Families without a value yet are absent."""

    def __init__(self, client: EngineClient, labels: Mapping[str, str]) -> None:
        self._client = client
        self._names = list(labels)
        self._values = list(labels.values())

    def describe(self) -> list[Metric]:
        """Return nothing: names depend on what has been reported."""
        return []

    def collect(self) -> Iterator[Metric]:
        if (state := self._client.state) is not None:
            yield from self._queue(state)
            yield from self._kv(state)
        yield from self._workers()

    def _queue(self, state: EngineState) -> Iterator[Metric]:
        """Yield metrics of completions and steps."""
        yield self._gauge("num_requests_running", "completions that decode or whose prompt is computed", state.running)
        yield self._gauge("num_requests_waiting", "completions that wait for room", state.waiting)
        reasons = self._gauge_of("num_requests_waiting_by_reason", "waiting completions by reason", "reason")
        reasons.add_metric([*self._values, "capacity"], state.waiting)  # there is no other reason
        reasons.add_metric([*self._values, "deferred"], 0)
        yield reasons
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1, of the fullest layer group", self.kv_usage)
        preempted = self._counter("num_preemptions", "completions whose KV was freed for others")
        preempted.add_metric(self._values, state.preemptions)
        yield preempted
        for name, text, value in (
            ("prefix_cache_queries", "tokens of completions that were admitted", state.prefix_queries),
            ("prefix_cache_hits", "of these, those whose KV was in the pools", state.prefix_hits),
            ("external_prefix_cache_queries", "of these, those whose KV was not in the pools", state.external_queries),
            ("external_prefix_cache_hits", "of the latter, those whose KV was loaded", state.external_hits),
        ):
            family = self._counter(name, text)
            family.add_metric(self._values, value)
            yield family
        if self._client.ready.caches_prefixes:
            yield from self._sessions(state)
        if state.slo is not None:
            yield from self._slo(state.slo)
        if state.kv_replicas is not None:
            text = "copies of prompt pages on prefill workers, in addition to the first copy of each"
            yield self._gauge("kv_replicas", text, state.kv_replicas)
        steps = self._counter("engine_steps", "steps that were finished")
        steps.add_metric(self._values, state.steps)
        yield steps
        if state.errors is not None:
            yield from self._errors(state.errors)

    def _kv(self, state: EngineState) -> Iterator[Metric]:
        """Yield metrics of KV blocks, by memory worker and layer group, and of where they are kept."""
        ready = self._client.ready
        config = InfoMetricFamily(PREFIX + "cache_config", "of the KV cache", labels=self._names)
        config.add_metric(
            self._values, {"block_size": str(ready.block_size), "num_gpu_blocks": str(sum(map(min, ready.num_blocks))),
                           "cache_dtype": ready.dtype, "kv_cache_max_concurrency": f"{ready.max_tokens_that_fit:.2f}",
                           "kv_cache_size_tokens": str(int(ready.max_tokens_that_fit * ready.max_model_len))}
        )  # fmt: skip
        yield config
        blocks = self._gauge_of("kv_blocks", "KV blocks of a memory worker by layer group", "worker", "group", "state")
        for group, (totals, free) in enumerate(zip(ready.num_blocks, state.free_blocks, strict=True)):
            used = min(totals) - free
            for worker, total in zip(ready.holders[group], totals, strict=True):
                blocks.add_metric([*self._values, f"memory-{worker}", str(group), "used"], used)
                blocks.add_metric([*self._values, f"memory-{worker}", str(group), "free"], total - used)
        yield blocks
        evictable = self._gauge_of(
            "kv_evictable_blocks", "free KV blocks that hold KV of earlier requests", "worker", "group"
        )
        for group, count in enumerate(state.evictable_blocks):
            for worker in ready.holders[group]:
                evictable.add_metric([*self._values, f"memory-{worker}", str(group)], count)
        yield evictable
        if any(ready.sparse):
            yield from self._tiers(state)
        yield from self._loans(state)

    def _loans(self, state: EngineState) -> Iterator[Metric]:
        """Yield metrics of loans within the deployment and between deployments, and of what moves because of them."""
        ready = self._client.ready
        if state.borrowed_blocks is not None:
            borrowed = self._gauge_of("borrowed_blocks", "KV blocks of sequences with another home", "creditor")
            creditors = dict.fromkeys(sorted(w for holders in ready.holders for w in holders), 0)
            for holders, count in zip(ready.holders, state.borrowed_blocks, strict=True):
                creditors |= {worker: creditors[worker] + count for worker in holders}
            yield self._by_label(borrowed, {f"memory-{worker}": count for worker, count in creditors.items()})
        if state.leased_blocks is not None:
            text = "memory that other deployments lend this one"
            leased = self._by_label(self._gauge_of("leased_bytes", text, "creditor"), state.leased_blocks)
            refusals = self._counter("loan_refusals", "requests for a loan that a creditor could not grant")
            refusals.add_metric(self._values, state.loan_refusals)
            yield from (leased, refusals)
        if state.debt_cycles is not None:
            text = "circles of debts between deployments, as the ledger sees them"
            yield self._gauge("debt_cycles", text, state.debt_cycles)
        if state.moved_bytes:
            text = "KV that went from one memory worker to another, by reason"
            yield self._by_label(self._counter("moved_bytes", text, "reason"), state.moved_bytes)
        if state.moved_blocks is not None:
            moved = self._counter(
                "moved_blocks", "KV blocks that returned home or left with their sequence during decoding"
            )
            moved.add_metric(self._values, state.moved_blocks)
            yield moved
        if state.lent_blocks is not None:
            text = "blocks of 1 MiB that this deployment has lent, to others or itself"
            yield self._by_label(self._gauge_of("lent_blocks", text, "debtor"), state.lent_blocks)

    def _tiers(self, state: EngineState) -> Iterator[Metric]:
        """Yield metrics of running sequences' blocks, in layers with full and with sparse KV."""
        ready, held = self._client.ready, {"full": 0, "sparse": 0}
        for sparse, totals, free in zip(ready.sparse, ready.num_blocks, state.free_blocks, strict=True):
            held["sparse" if sparse else "full"] += min(totals) - free
        text = "KV blocks of running completions and of their reference decodes, by tier of layers"
        kept = self._by_label(self._gauge_of("kv_kept_blocks", text, "tier"), held)
        dropped = self._counter("kv_dropped_blocks", "KV blocks that completions have lost in each sparse layer")
        dropped.add_metric(self._values, state.dropped_blocks)
        yield from (kept, dropped)

    def _errors(self, errors: ErrorState) -> Iterator[Metric]:
        for name, text, value in (
            ("kv_shadow_tokens", "tokens by which sparse KV was compared with all KV", errors.tokens),
            ("kv_shadow_kl", "nats from the distribution with all KV, in the mean", errors.kl),
            ("kv_shadow_top1_disagreement", "share of tokens that all KV would have changed", errors.top1),
            ("kv_budget_in_use", "tokens that new completions keep or attend in sparse layers; 0: all", errors.budget),
        ):
            yield self._gauge(name, text, value)
        rebuilt = self._counter("kv_restarts_in_full", "completions that were computed again with all KV")
        rebuilt.add_metric(self._values, errors.rebuilt)
        yield rebuilt

    def _slo(self, counts: SloCounts) -> Iterator[Metric]:
        for name, text, load in (
            ("prefill_load", "the last admitted prompt's wait, divided by --slo ttft=", counts.prefill_load),
            ("decode_load", "the time of a decoding step, divided by --slo tbt=", counts.decode_load),
        ):
            yield self._gauge(name, text, load)
        for name, text, value in (
            ("first_tokens", "prompts that were computed", counts.prompts),
            (
                "first_token_expected_seconds",
                "from arrivals to first tokens, as predicted",
                counts.predicted_ttft_s,
            ),
            ("first_token_real_seconds", "from arrivals to first tokens, as measured", counts.actual_ttft_s),
            (
                "prefill_wasted_tokens",
                "tokens of prompts that were computed and not decoded",
                counts.rejected_after_prefill_tokens,
            ),
        ):
            family = self._counter(name, text)
            family.add_metric(self._values, value)
            yield family

    def _sessions(self, state: EngineState) -> Iterator[Metric]:
        tiers = self._gauge_of("sessions", "sessions by the place of their KV", "tier")
        hits = self._counter("session_hits", "turns after the first one of a session, by where its KV was", "tier")
        waits = self._counter("session_wait_seconds", "time for which these turns waited for their first row", "tier")
        for family, counts in ((tiers, state.sessions), (hits, state.session_hits), (waits, state.session_waits)):
            yield self._by_label(family, dict(sorted(counts.items())))

    def _workers(self) -> Iterator[Metric]:
        counters, ready = self._client.counters, self._client.ready
        if not counters:
            return
        seconds = self._counter(
            "worker_seconds", "time of a worker by activity; wait = for the other pool", "worker", "activity"
        )
        wire = self._counter("worker_bytes", "payload of a memory worker's messages", "worker", "direction")
        read = self._counter("attention_bytes", "stored K and V that a memory worker's attention has read", "worker")
        text = "of them, those of sequences whose home is another memory worker"
        remote = self._counter("remote_attention_bytes", text, "worker")
        refused = self._counter("refused_plans", "plans that a memory worker refused", "worker")
        kept = {name: self._counter(*words, "worker") for name, words in MEMORY_WORKER_COUNTERS.items()}
        for worker, values in sorted(counters.items()):
            for name, value in values.items():
                if name.endswith("_s"):
                    seconds.add_metric([*self._values, worker, name.removesuffix("_s")], value)
                elif name.startswith("bytes_"):
                    wire.add_metric([*self._values, worker, name.removeprefix("bytes_")], value)
                elif name == "stored_bytes":
                    read.add_metric([*self._values, worker], value)
                elif name == "remote_bytes":
                    remote.add_metric([*self._values, worker], value)
                elif name in MEMORY_WORKER_COUNTERS:
                    kept[name].add_metric([*self._values, worker], value)
                elif name == "refused":
                    refused.add_metric([*self._values, worker], value)
        yield from (seconds, wire, read, remote, refused, *kept.values())
        rows, hops, wait_s = self._hops()
        kinds = self._counter("layer_bytes", "tensor bytes between the pools by kind of message", "kind")
        prefilled = sum(v.get("rows", 0.0) for k, v in self._client.counters.items() if k.startswith("prefill"))
        for kind, size in ready.row_bytes.items():
            kinds.add_metric([*self._values, kind], size * (rows + prefilled * (kind == "kv")))
        yield kinds
        hop = SummaryMetricFamily(
            PREFIX + "hop_latency_seconds", "a compute worker's wait for a layer's attention", labels=self._names
        )
        hop.add_metric(self._values, count_value=int(hops), sum_value=wait_s)
        yield hop

    def _hops(self) -> tuple[float, float, float]:
        computes = [v for k, v in self._client.counters.items() if k.startswith("compute")]
        rows = sum(v.get("rows", 0.0) for v in computes)
        hops = sum(v.get("steps", 0.0) for v in computes) * self._client.ready.attention_calls_per_step
        return rows, hops, sum(v.get("wait_s", 0.0) for v in computes)

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
        _, hops, wait_s = self._hops()
        return hops, wait_s

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = self._gauge_of(name, text)
        family.add_metric(self._values, value)
        return family

    def _gauge_of(self, name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, labels=[*self._names, *more])

    def _counter(self, name: str, text: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, text, labels=[*self._names, *more])

    def _by_label(self, family: GaugeMetricFamily | CounterMetricFamily, counts: Mapping[str, float]) -> Metric:
        """Return ``family`` with a value for each label of ``counts``."""
        for label, count in counts.items():
            family.add_metric([*self._values, label], count)
        return family
