"""All metrics of /metrics: kind, unit, labels and meaning. docs/metrics.md lists the same.

A name ends as vLLM's does where vLLM has a metric of the same meaning. Counters get ``_total`` at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

PREFIX = "lamina:"
COMMON_LABELS = ("model_name", "engine")
_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "info": InfoMetricFamily,
    "summary": SummaryMetricFamily,
}
# Bounds of buckets. In seconds: of whole requests, of first tokens, and between tokens.
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
            7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class MetricSpec(NamedTuple):
    """One metric. ``unit``: empty for plain counts. ``labels``: in addition to COMMON_LABELS. ``in_vllm``: vLLM has it
    under the same name.
    """

    kind: Literal["counter", "gauge", "histogram", "info", "summary"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    in_vllm: bool = False


def _of_vllm(kind: Literal["counter", "gauge", "info"], unit: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(kind, unit, text, labels, in_vllm=True)


def _histogram(unit: str, text: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec("histogram", unit, text, buckets=buckets, in_vllm=True)


def _counter(unit: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec("counter", unit, text, labels)


def _gauge(unit: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec("gauge", unit, text, labels)


METRICS: dict[str, MetricSpec] = {
    # Requests, measured by the server. A prompt with several completions counts once.
    "time_to_first_token_seconds": _histogram("seconds", "time from a request's arrival to its first token", _FIRST),
    "inter_token_latency_seconds": _histogram(
        "seconds", "time between two outputs of a completion; an output has one or more tokens", _BETWEEN
    ),
    "request_time_per_output_token_seconds": _histogram(
        "seconds", "a request's mean time per token after the first", _BETWEEN
    ),
    "e2e_request_latency_seconds": _histogram("seconds", "time from a request's arrival to its last token", _REQUEST),
    "request_queue_time_seconds": _histogram(
        "seconds", "time from a request's arrival to the start of its prefill", _REQUEST
    ),
    "request_prefill_time_seconds": _histogram("seconds", "time from prefill's start to the first token", _REQUEST),
    "request_decode_time_seconds": _histogram("seconds", "time from the first token to the last", _REQUEST),
    "request_inference_time_seconds": _histogram("seconds", "time from prefill's start to the last token", _REQUEST),
    "request_prompt_tokens": _histogram("tokens", "length of a prompt", _TOKENS),
    "request_generation_tokens": _histogram("tokens", "generated tokens of all completions of a prompt", _TOKENS),
    "request_max_num_generation_tokens": _histogram(
        "tokens", "generated tokens of a prompt's longest completion", _TOKENS
    ),
    "request_prefill_kv_computed_tokens": _histogram(
        "tokens", "prompt tokens whose KV was computed, not cached", _TOKENS
    ),
    "request_num_preemptions": _histogram("", "preemptions of a prompt's completions", _COUNTS),
    "request_params_n": _histogram("", "n of a request", _COUNTS),
    "request_params_max_tokens": _histogram("tokens", "max_tokens of a request", _TOKENS),
    "iteration_tokens_total": _histogram(
        "tokens", "tokens that a step generates, plus all tokens of prompts whose first token it generates", _TOKENS
    ),
    "prompt_tokens": _of_vllm("counter", "tokens", "prompt tokens"),
    "generation_tokens": _of_vllm("counter", "tokens", "generated tokens"),
    "prompt_tokens_cached": _of_vllm("counter", "tokens", "prompt tokens whose KV was cached"),
    "prompt_tokens_by_source": _of_vllm("counter", "tokens", "prompt tokens by the source of their KV", "source"),
    "request_success": _of_vllm("counter", "requests", "finished prompts", "finished_reason"),
    "admission_rejections": _of_vllm("counter", "requests", "requests that were refused because of load", "reason"),
    "goodput_requests": _counter("requests", "prompts that finished within --slo ttft= and --slo tbt="),
    "http_requests": _counter("requests", "HTTP requests", "handler", "method", "status"),
    "http_request_duration_seconds": MetricSpec(
        "histogram", "seconds", "duration of HTTP requests, streams included", ("handler", "method"), _FIRST
    ),
    "journal_unwritable": _gauge("", "1 while --journal cannot be written, such as on a full disk"),
    # The engine's queue, as it last reported.
    "num_requests_running": _of_vllm("gauge", "requests", "completions that decode, or whose prompt is being computed"),
    "num_requests_waiting": _of_vllm(
        "gauge", "requests", "completions that wait for KV blocks or a place among --max-num-seqs"
    ),
    "num_requests_waiting_by_reason": _of_vllm("gauge", "requests", "waiting completions by reason", "reason"),
    "num_preemptions": _of_vllm("counter", "", "preemptions: a completion's KV was freed for others"),
    "engine_steps": _counter("", "finished steps"),
    "rejected_step_plans": _counter("", "step plans that a memory worker refused", "worker"),
    # The KV cache.
    "cache_config": _of_vllm("info", "", "sizes of the KV cache"),
    "kv_cache_usage_perc": _of_vllm("gauge", "0 to 1", "share of KV blocks in use, in the fullest layer group"),
    "kv_blocks": _gauge("blocks", "KV blocks of a memory worker by layer group and state", "worker", "group", "state"),
    "kv_evictable_blocks": _gauge("blocks", "free KV blocks that hold KV of finished requests", "worker", "group"),
    "prefix_cache_queries": _of_vllm(
        "counter", "tokens", "tokens of admitted completions, looked up in the KV pool"
    ),
    "prefix_cache_hits": _of_vllm("counter", "tokens", "tokens whose KV was found in the KV pool"),
    "external_prefix_cache_queries": _of_vllm(
        "counter", "tokens", "tokens not in the KV pool, looked up in storage"
    ),
    "external_prefix_cache_hits": _of_vllm("counter", "tokens", "tokens whose KV was loaded from storage"),
    # Offload and sessions.
    "kv_offload_load_bytes": MetricSpec(
        "counter", "bytes", "K and V that a memory worker has loaded from storage", ("worker",), in_vllm=True
    ),
    "kv_offload_store_bytes": MetricSpec(
        "counter", "bytes", "K and V that a memory worker has saved to storage", ("worker",), in_vllm=True
    ),
    "kv_offload_failed_transfers": _counter(
        "", "loads and saves that a memory worker could not finish", "worker"),
    "kv_prefetched_pages": _counter(
        "pages", "pages that a memory worker read from its disk before a request needed them", "worker"),
    "sessions": _gauge("", "sessions by the tier where their KV is", "tier"),
    "session_resumed_turns": _counter(
        "", "second and later turns of sessions, by the tier where their KV was", "tier"),
    "session_wait_seconds": _counter(
        "seconds", "time that second and later turns waited for the start of their prefill", "tier"
    ),
    # KV sparsity.
    "kv_sparse_blocks_in_use": _gauge(
        "blocks", "KV blocks in use by layers with full KV, and by layers with sparse KV", "layers"),
    "kv_evicted_by_sparsity_blocks": _counter(
        "blocks", "KV blocks that completions have dropped in each sparse layer"),
    "kv_sparsity_measured_tokens": _gauge(
        "tokens", "tokens for which sparse KV was compared with full KV"),
    "kv_sparsity_kl_nats": _gauge("nats", "mean KL divergence from the distribution with full KV"),
    "kv_sparsity_top1_disagreement_ratio": _gauge(
        "0 to 1", "share of tokens that would differ with full KV"),
    "kv_sparsity_budget_tokens": _gauge(
        "tokens", "tokens that new completions keep or attend in sparse layers; 0 = all"),
    "kv_sparsity_recomputed_requests": _counter(
        "requests", "completions that were computed again with full KV"),
    # Prefill workers and --slo.
    "prefill_replicated_pages": _gauge(
        "pages", "additional copies of prompts' pages on prefill workers"),
    "prefill_load": _gauge("", "wait in the longest prompt queue, divided by --slo ttft="),
    "decode_load": _gauge("", "the time of a decoding step, divided by --slo tbt="),
    "ttft_samples": _counter(
        "requests", "prompts counted in lamina:ttft_predicted_seconds_total and lamina:ttft_actual_seconds_total"
    ),
    "ttft_predicted_seconds": _counter(
        "seconds", "sum of predicted times to the first token"),
    "ttft_actual_seconds": _counter(
        "seconds", "sum of measured times to the first token"),
    "rejected_after_prefill_tokens": _counter(
        "tokens", "tokens of prompts that were refused after they had been computed"),
    # KV on other workers and deployments.
    "spilled_blocks": _gauge(
        "blocks", "KV blocks outside their sequence's home; creditor = the memory worker that has them", "creditor"
    ),
    "borrowed_bytes": _gauge("bytes", "memory that other deployments lend this one", "creditor"),
    "borrow_refused": _counter("", "loan requests that creditors refused"),
    "lent_blocks": _gauge("blocks of 1 MiB", "memory that this deployment has lent to others or to itself", "debtor"),
    "debt_cycles": _gauge("", "circles of deployments that owe each other memory, as the ledger knows them"),
    "kv_migrated_bytes": _counter(
        "bytes", "KV that moved between memory workers while streams paused", "reason"),
    "kv_migrated_blocks": _counter(
        "blocks", "KV blocks that moved during decoding, to their sequence's home or with their sequence"),
    # Workers, as they last reported.
    "worker_seconds": _counter(
        "seconds",
        "a worker's time by activity; wait = waiting for messages of other workers",
        "worker", "activity",
    ),
    "memory_worker_message_bytes": _counter(
        "bytes", "bytes of a memory worker's messages, by direction", "worker", "direction"),
    "attention_message_bytes": _counter(
        "bytes", "bytes of tensors between compute and memory workers, by kind: q, kv, o", "kind"),
    "attention_kv_read_bytes": _counter(
        "bytes", "stored K and V that a memory worker's attention has read", "worker"),
    "attention_spilled_kv_read_bytes": _counter(
        "bytes", "stored K and V that attention has read for sequences whose home is another memory worker", "worker"),
    "attention_wait_seconds": MetricSpec(
        "summary", "seconds", "time that a compute worker waits for a layer's attention"),
}  # fmt: skip


def help_text(name: str) -> str:
    """Return a metric's HELP: its meaning, and its unit if it has one."""
    spec = METRICS[name]
    return f"{spec.text} ({spec.unit})" if spec.unit else spec.text


def full_name(name: str) -> str:
    """Return a metric's exported name, without a counter's ending. Metrics of HTTP have no prefix, as in vLLM."""
    return name if name.startswith("http_") else PREFIX + name


def family_of(name: str, common: Sequence[str]) -> Metric:
    """Return a metric without values, for a collector. ``common``: the labels in place of COMMON_LABELS."""
    spec = METRICS[name]
    family: Metric = _FAMILIES[spec.kind](full_name(name), help_text(name), labels=[*common, *spec.labels])
    return family


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Return a counter of this process."""
    return Counter(full_name(name), help_text(name), _labels(name), registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Return a gauge of this process."""
    return Gauge(full_name(name), help_text(name), _labels(name), registry=registry)


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    """Return a histogram of this process."""
    return Histogram(full_name(name), help_text(name), _labels(name), registry=registry, buckets=METRICS[name].buckets)


def _labels(name: str) -> tuple[str, ...]:
    return METRICS[name].labels if name.startswith("http_") else (*COMMON_LABELS, *METRICS[name].labels)


def names(exported: str, *, vllm: bool) -> list[str]:
    """Return the names under which a family is shown: its own and, with ``vllm``, vLLM's."""
    spec = METRICS.get(exported.removeprefix(PREFIX))
    return [exported] + [f"vllm:{exported.removeprefix(PREFIX)}"] * (vllm and spec is not None and spec.in_vllm)
