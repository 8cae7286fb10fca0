"""Prometheus metrics that this process measures. Names end as vLLM's do, so its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from lamina.request import SamplingParams
from lamina.scheduler.conductor.overload import NO_LIMITS, SloLimits
from lamina.server.engine_client.messages import Delta

PREFIX = "lamina:"
_LABELS = ("model_name", "engine")
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
            7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("from the request's arrival to its first token", _FIRST),
    "inter_token_latency_seconds": ("between two deltas of a completion", _BETWEEN),
    "request_time_per_output_token_seconds": ("mean of a request's tokens but the first", _BETWEEN),
    "e2e_request_latency_seconds": ("from the request's arrival to its last token", _SECONDS),
    "request_queue_time_seconds": ("until the prompt's first row ran", _SECONDS),
    "request_prefill_time_seconds": ("from the first row to the first token", _SECONDS),
    "request_decode_time_seconds": ("from the first token to the last", _SECONDS),
    "request_inference_time_seconds": ("from the first row to the last token", _SECONDS),
    "request_prompt_tokens": ("tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("tokens of all completions of a prompt", _TOKENS),
    "request_max_num_generation_tokens": ("tokens of the longest completion of a prompt", _TOKENS),
    "request_prefill_kv_computed_tokens": ("tokens of a prompt whose KV was not there", _TOKENS),
    "request_num_preemptions": ("how often KV of a prompt's completions was freed for others", _COUNTS),
    "iteration_tokens_total": (
        "tokens of a step: generated, and of prompts that have their first token by it",
        _TOKENS,
    ),
    "request_params_n": ("n as asked for", _COUNTS),
    "request_params_max_tokens": ("max_tokens as asked for", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "generation_tokens": "tokens generated",
    "prompt_tokens_cached": "tokens of prompts whose KV was there",
}
COMPUTED, FOUND = "local_compute", "local_cache_hit"  # sources of a prompt token's KV, in vLLM's words


class ServerMetrics:
    """The metrics of one server, in one registry. Histograms count prompts, not HTTP requests."""

    def __init__(self, model_name: str, limits: SloLimits = NO_LIMITS) -> None:
        self.limits = limits
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.seconds = {
            name: Histogram(PREFIX + name, text, _LABELS, buckets=buckets, registry=self.registry).labels(**self.labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.totals = dict.fromkeys(_COUNTERS, 0)
        self._counts = {
            name: Counter(PREFIX + name, text, _LABELS, registry=self.registry).labels(**self.labels)
            for name, text in _COUNTERS.items()
        }
        self._success = Counter(
            PREFIX + "request_success", "prompts that were finished", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._sources = Counter(
            PREFIX + "prompt_tokens_by_source", "tokens of prompts by where their KV comes from", (*_LABELS, "source"),
            registry=self.registry,
        )  # fmt: skip
        for source in (COMPUTED, FOUND):
            self._sources.labels(**self.labels, source=source)
        self._rejections = Counter(
            PREFIX + "admission_rejections", "requests refused for load", (*_LABELS, "reason"), registry=self.registry
        )
        self._good = Counter(
            PREFIX + "goodput_requests", "prompts that were answered to their ends within --slo ttft= and --slo tbt=",
            _LABELS, registry=self.registry,
        ).labels(**self.labels)  # fmt: skip
        self._http = Counter("http_requests", "HTTP requests", ("handler", "method", "status"), registry=self.registry)
        self._http_s = Histogram(
            "http_request_duration_seconds", "of HTTP requests, streams included", ("handler", "method"),
            buckets=_FIRST, registry=self.registry,
        )  # fmt: skip

    def count(self, name: str, tokens: int) -> None:
        """Add ``tokens`` to a counter."""
        self.totals[name] += tokens
        self._counts[name].inc(tokens)

    def on_step(self, tokens: int) -> None:
        """Count the ``tokens`` of a step, tokens of prompts included."""
        self.seconds["iteration_tokens_total"].observe(tokens)

    def on_first_token(self, tokens: int, cached: int) -> None:
        """Count a prompt's first token. ``tokens``: the prompt's length; ``cached``: those whose KV was cached."""
        self.count("prompt_tokens_cached", cached)
        self.seconds["request_prefill_kv_computed_tokens"].observe(tokens - cached)
        for source, number in ((COMPUTED, tokens - cached), (FOUND, cached)):
            self._sources.labels(**self.labels, source=source).inc(number)

    def on_finished(self, reason: str) -> None:
        """Count a finished prompt; ``reason``: "stop", "length" or "abort"."""
        self._success.labels(**self.labels, finished_reason=reason).inc()

    def on_goodput(self) -> None:
        """Count a prompt that ended within its limits of time."""
        self._good.inc()

    def on_rejected(self, reason: str) -> None:
        """Count a request that was refused for load."""
        self._rejections.labels(**self.labels, reason=reason).inc()

    def on_http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request and its duration."""
        self._http.labels(handler, method, str(status)).inc()
        self._http_s.labels(handler, method).observe(seconds)

    def render(self, *, vllm: bool) -> bytes:
        """Return the text format. ``vllm``: repeat families that vLLM has under vLLM's names."""
        text = generate_latest(_RegistryView(self.registry))
        return text + generate_latest(_RegistryView(self.registry, "vllm:")) if vllm else text


# Families that vLLM has too, in addition to the histograms and counters of this file.
SHARED = frozenset(
    PREFIX + name
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "cache_config",
        "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_by_source", "num_requests_waiting_by_reason",
        "external_prefix_cache_queries", "external_prefix_cache_hits",
        "kv_offload_load_bytes", "kv_offload_store_bytes",
        "request_success", "admission_rejections", *_HISTOGRAMS, *_COUNTERS,
    )
)  # fmt: skip


class _RegistryView:
    """Looks like a registry: all families without their creation times, or the shared ones under another prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str = "") -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if not self._prefix or family.name in SHARED:
                view = Metric(self._named(family.name), family.documentation, family.type)
                kept = (s for s in family.samples if not s.name.endswith("_created"))
                view.samples = [Sample(self._named(s.name), *s[1:]) for s in kept]
                yield view

    def _named(self, name: str) -> str:
        return self._prefix + name.removeprefix(PREFIX) if self._prefix else name


class PromptMeter:
    """Measures one prompt: fills the histograms, and keeps what the log line shows. Seconds of this process's clock."""

    def __init__(self, metrics: ServerMetrics, arrival_s: float, prompt_tokens: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._last_s: dict[int, float] = {}
        self._lengths: dict[int, int] = {}  # number of tokens of each completion
        self._longest_s = 0.0  # longest time between two deltas
        self.tokens = 0
        self.first_s: float | None = None
        metrics.count("prompt_tokens", prompt_tokens)

    def on_delta(self, delta: Delta) -> None:
        """Measure a delta that has come in."""
        now, seconds = time.monotonic(), self._metrics.seconds
        if self.first_s is None:
            self.first_s = now - self._arrival_s
            seconds["time_to_first_token_seconds"].observe(self.first_s)
        elif delta.index in self._last_s:
            gap_s = now - self._last_s[delta.index]
            self._longest_s = max(self._longest_s, gap_s)
            seconds["inter_token_latency_seconds"].observe(gap_s)
        self._last_s[delta.index] = now
        self.tokens += len(delta.token_ids)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.token_ids)
        if delta.num_cached_tokens is not None:
            self._metrics.on_first_token(self._prompt_tokens, delta.num_cached_tokens)
        self._metrics.count("generation_tokens", len(delta.token_ids))
        if delta.times is not None:
            self._finish(delta, now)

    def _finish(self, delta: Delta, now: float) -> None:
        seconds, params, times = self._metrics.seconds, self._params, delta.times
        if times is None or delta.refusal is not None:  # a refused one counts as an abort when the call closes
            return
        total, first = now - self._arrival_s, self.first_s or 0.0
        seconds["e2e_request_latency_seconds"].observe(total)
        seconds["request_queue_time_seconds"].observe(times.queue)
        seconds["request_prefill_time_seconds"].observe(times.prefill)
        seconds["request_decode_time_seconds"].observe(times.decode)
        seconds["request_inference_time_seconds"].observe(times.prefill + times.decode)
        seconds["request_prompt_tokens"].observe(self._prompt_tokens)
        seconds["request_generation_tokens"].observe(self.tokens)
        seconds["request_max_num_generation_tokens"].observe(max(self._lengths.values()))
        seconds["request_num_preemptions"].observe(times.preemptions)
        seconds["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            seconds["request_params_max_tokens"].observe(params.max_tokens)
        if self.tokens > params.n:
            seconds["request_time_per_output_token_seconds"].observe(
                (total - first) * params.n / (self.tokens - params.n)
            )
        self._metrics.on_finished(delta.finish_reason or "abort")
        limits = self._metrics.limits
        if delta.finish_reason in ("stop", "length") and first <= limits.ttft_s and self._longest_s <= limits.tbt_s:
            self._metrics.on_goodput()
