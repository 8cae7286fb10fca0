"""Results of a benchmark under the names of ``vllm bench serve``, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .openai_client import Answer

PERCENTILES = (50, 90, 95, 99)
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
    """Return the same results as a table."""
    lines = [
        _line("requests served", result["completed"]),
        _line("refused for load", result["refused"]),
        _line("failed", result["failed"]),
        _line("seconds", result["duration"]),
        _line("input tokens", result["total_input_tokens"]),
        _line("output tokens", result["total_output_tokens"]),
        _line("requests/s", result["request_throughput"]),
        _line("output tokens/s", result["output_throughput"]),
        _line("tokens/s", result["total_token_throughput"]),
    ]
    if "dropped" in result:
        lines.insert(3, _line("dropped, since too long", result["dropped"]))
    heads = ["mean", *(f"p{p}" for p in PERCENTILES)]
    lines.append(f"{'milliseconds':<44}" + "".join(f"{h:>11}" for h in heads))
    for name, title in TITLES.items():
        cells = [result[f"mean_{name}_ms"], *(result[f"p{p}_{name}_ms"] for p in PERCENTILES)]
        lines.append(f"{f'{name.upper()}  {title}':<44}" + "".join(f"{c:11.2f}" for c in cells))
    return "\n".join([*lines, *(f"error: {e}" for e in result["errors"])])


def _line(title: str, value: float) -> str:
    return f"{title:<44}{value:11.2f}" if isinstance(value, float) else f"{title:<44}{value:11d}"
