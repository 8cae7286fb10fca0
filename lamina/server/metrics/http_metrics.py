"""Prometheus metrics that this process measures. Names end as vLLM's do, so its dashboards work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from lamina.request import SamplingParams
from lamina.scheduler.conductor.overload import NO_LIMITS, SloLimits
from lamina.server.engine_client.messages import Delta

from .metric_table import COMMON_LABELS, METRICS, counter, gauge, histogram, names

_TOTALS = ("prompt_tokens", "generation_tokens", "prompt_tokens_cached")
COMPUTED, FOUND = "local_compute", "local_cache_hit"  # sources of a prompt token's KV, in vLLM's words
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})  # of routes, and of browsers before a request
_HTTP_SECONDS = "http_request_duration_seconds"


class ServerMetrics:
    """The metrics of one server, in one registry. Histograms count prompts, not HTTP requests."""

    def __init__(self, model_name: str, limits: SloLimits = NO_LIMITS) -> None:
        self.limits = limits
        registry = self.registry = CollectorRegistry()
        self.labels = dict(zip(COMMON_LABELS, (model_name, "0"), strict=True))
        self._http, self._http_s = counter("http_requests", registry), histogram(_HTTP_SECONDS, registry)
        names = [name for name, spec in METRICS.items() if spec.kind == "histogram" and name != _HTTP_SECONDS]
        self.seconds = {name: histogram(name, registry).labels(**self.labels) for name in names}
        self.totals = dict.fromkeys(_TOTALS, 0)
        self._counts = {name: counter(name, registry).labels(**self.labels) for name in _TOTALS}
        self._success = counter("request_success", registry)
        self._sources = counter("prompt_tokens_by_source", registry)
        for source in (COMPUTED, FOUND):
            self._sources.labels(**self.labels, source=source)
        self._rejections = counter("admission_rejections", registry)
        self._good = counter("goodput_requests", registry).labels(**self.labels)

    def count(self, name: str, tokens: int) -> None:
        """Add ``tokens`` to a counter."""
        self.totals[name] += tokens
        self._counts[name].inc(tokens)

    def show(self, name: str, value: Callable[[], float]) -> None:
        """Show a gauge, whose value is asked for when Prometheus scrapes."""
        gauge(name, self.registry).labels(**self.labels).set_function(value)

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
        """Count an HTTP request and its duration. Clients choose names of methods: unknown ones are not counted."""
        if method not in METHODS:
            return
        self._http.labels(handler, method, str(status)).inc()
        self._http_s.labels(handler, method).observe(seconds)

    def render(self, *, vllm: bool) -> bytes:
        """Return the text format. ``vllm``: repeat metrics that vLLM has under vLLM's names."""
        return generate_latest(_RegistryView(self.registry, vllm=vllm))


class _RegistryView:
    """Looks like a registry: all families without their creation times, each under all of its names."""

    def __init__(self, registry: CollectorRegistry, *, vllm: bool) -> None:
        self._registry = registry
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield from (_renamed(family, name) for name in names(family.name, vllm=self._vllm))


def _renamed(family: Metric, name: str) -> Metric:
    """Return a copy of ``family`` under another name, without creation times."""
    view = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            view.samples.append(Sample(name + sample.name.removeprefix(family.name), *sample[1:]))
    return view


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
