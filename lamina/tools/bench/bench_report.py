"""Results of a benchmark under the names of ``vllm bench serve``, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.facts import report

if TYPE_CHECKING:
    from .openai_client import Answer

PERCENTILES = (50, 90, 95, 99)
_TITLES = {  # of numbers alone
    "completed": "requests served",
    "refused": "refused for load",
    "failed": "failed",
    "dropped": "dropped, since too long",
    "duration": "seconds",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s",
}
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, first one excluded",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the sorted values; 0 for none."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


def spread_ms(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, deviation and percentiles in milliseconds: mean_ttft_ms, median_ttft_ms, p99_ttft_ms, ..."""
    ms = [s * 1000 for s in seconds]
    fields = {
        f"mean_{name}_ms": statistics.fmean(ms) if ms else 0.0,
        f"median_{name}_ms": percentile(ms, 50),
        f"std_{name}_ms": statistics.pstdev(ms) if ms else 0.0,
    }
    return fields | {f"p{p}_{name}_ms": percentile(ms, p) for p in PERCENTILES}


def summary(answers: Sequence[Answer], *, details: bool = False) -> dict[str, Any]:
    """Return counts, throughput and latencies of the served requests; ``details`` adds the values of each request."""
    served = [a for a in answers if a.ok]
    end = max((a.last_s for a in served), default=0.0)
    duration = end - min((a.start_s for a in answers), default=0.0) if served else 0.0
    tokens_in, tokens_out = sum(a.input_tokens for a in served), sum(a.output_tokens for a in served)
    per_s = 1.0 / duration if duration > 0 else 0.0
    fields: dict[str, Any] = {
        "completed": len(served),
        "refused": sum(a.refused for a in answers),
        "failed": sum(not a.ok and not a.refused for a in answers),
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(served) * per_s,
        "output_throughput": tokens_out * per_s,
        "total_token_throughput": (tokens_in + tokens_out) * per_s,
        **spread_ms("ttft", [a.ttft_s for a in served]),
        **spread_ms("tpot", [a.tpot_s for a in served if a.output_tokens > 1]),
        **spread_ms("itl", [g for a in served for g in a.gaps_s]),
        **spread_ms("e2el", [a.e2el_s for a in served]),
        "errors": sorted({a.error[:200] for a in answers if a.error and not a.refused})[:5],
    }
    if details:
        fields["input_lens"] = [a.input_tokens for a in answers]
        fields["output_lens"] = [a.output_tokens for a in answers]
        fields["ttfts"] = [a.ttft_s if a.ok else None for a in answers]
        fields["itls"] = [a.gaps_s for a in answers]
        fields["generated_texts"] = [a.text for a in answers]
    return fields


def table(result: dict[str, Any]) -> str:
    """Return the same results as tables."""
    named = {name: title for name, title in _TITLES.items() if name in result}
    rows = [[title, _number(result[name])] for name, title in named.items()]
    times = {f"{name.upper()}  {title}": name for name, title in TITLES.items()}
    lines = [*report.table(rows), *spread_table(result, times)]
    return "\n".join([*lines, *(f"error: {e}" for e in result["errors"])])


def spread_table(result: dict[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return lines with mean and percentiles of what ``spread_ms`` has put into a result: title -> its name there."""
    fields = ("mean", *(f"p{p}" for p in PERCENTILES))
    rows = [[title, *(_number(result[f"{field}_{name}_ms"]) for field in fields)] for title, name in names.items()]
    return report.table([["milliseconds", *fields], *rows])


def _number(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
