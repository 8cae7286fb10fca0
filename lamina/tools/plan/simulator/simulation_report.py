"""The results of a simulated run of the pools, in numbers and in words."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lamina.scheduler.conductor import Conductor
from lamina.scheduler.prefix_index import PREFILL

from .conducted_run import RequestOutcome, SimulatedPools

_WARM = 0.05  # share of the arrivals' time that does not count for loads


@dataclass(frozen=True)
class PoolsReport:
    """Seconds, tokens and counts. Of the requests that were not refused: ``ttft_*``; ``hit``: the share of prompt
    tokens that were not computed. ``expected_off``: the median error of the predicted first token, relative to the real
    time. ``imbalance``: the busiest worker's work over the mean; ``reasons``: why each was computed on its worker.
    ``correlation`` and ``decode_deviation``: of the loads of both pools while requests came; 0 if nothing decodes.
    """

    requests: int
    mean_ttft_s: float
    p50_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    hit: float
    moved_tokens: int
    kv_replicas: int
    imbalance: float
    expected_off: float
    refused: dict[str, int]
    reasons: dict[str, int]
    wasted_tokens: int
    goodput_requests: int
    correlation: float
    decode_deviation: float

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        return asdict(self)


def report(pools: SimulatedPools, conductor: Conductor) -> PoolsReport:
    """Return the report on a run that has ended."""
    done = [r for r in pools.requests if r.computed]
    times = sorted(r.ttft_s for r in done) or [0.0]
    limits = conductor.config.limits
    busy, prompts = pools.busy_s, sum(r.arrival.prompt.tokens for r in done)
    off = [abs(r.choice.ttft_s - r.ttft_s) / r.ttft_s for r in done if r.ttft_s > 0]
    end = max((r.arrival.at_s for r in pools.requests), default=0.0)
    looked = [s for s in pools.samples if _WARM * end <= s.at_s <= end]
    return PoolsReport(
        requests=len(pools.requests),
        mean_ttft_s=statistics.fmean(times),
        p50_ttft_s=_part(times, 0.5),
        p90_ttft_s=_part(times, 0.9),
        p99_ttft_s=_part(times, 0.99),
        hit=sum(r.prefix for r in done) / max(1, prompts),
        moved_tokens=sum(r.choice.transferred_tokens for r in done),
        kv_replicas=conductor.prefix_index.num_replicas(PREFILL),
        imbalance=max(busy) / statistics.fmean(busy) if any(busy) else 0.0,
        expected_off=statistics.median(off) if off else 0.0,
        reasons=dict(Counter(r.choice.reason for r in done)),
        refused=dict(Counter(r.refused for r in pools.requests if r.refused)),
        wasted_tokens=sum(r.computed for r in pools.requests if r.refused),
        goodput_requests=sum(_is_good(r, limits.ttft_s, limits.tbt_s) for r in pools.requests),
        correlation=_correlation([s.prefill for s in looked], [s.decode for s in looked]),
        decode_deviation=statistics.pstdev([s.decode for s in looked]) if looked else 0.0,
    )


def _is_good(request: RequestOutcome, ttft_s: float, tbt_s: float) -> bool:
    return request.ended and request.ttft_s <= ttft_s and request.longest_step_s <= tbt_s


def _part(times: Sequence[float], part: float) -> float:
    return times[min(len(times) - 1, int(len(times) * part))]


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    if len(x) < 2 or statistics.pstdev(x) == 0 or statistics.pstdev(y) == 0:
        return 0.0
    return statistics.correlation(x, y)
