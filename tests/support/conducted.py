"""What the Conductor's tests share: a literal Algorithm 1, conductors by hand, traces made up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lamina.scheduler.conductor import Conductor, ConductorConfig, PromptInfo
from lamina.scheduler.conductor.latency_model import (
    PrefillLatency,
    PrefillLatencyEstimator,
    TransferLatency,
    TransferLatencyEstimator,
)
from lamina.scheduler.conductor.overload import NO_LIMITS, DecodeLoadModel, SloLimits, StepLatency
from lamina.scheduler.conductor.routing import RoutingQuery, WorkerMatch
from lamina.tools.plan.simulator.bounded_index import BoundedPrefixIndex
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt

LAW = PrefillLatency(0.0, 1 / 5000, 1 / 5e8)
RATE = 31_000.0
MOVES = TransferLatency.at_rate(RATE)
STEP = StepLatency(0.01, 0.0015, 8e-8)


def algorithm_1(asked: RoutingQuery, slo_ttft: float) -> tuple[int, float, int, bool] | None:
    """Mooncake's Algorithm 1, line by line, less the choice for decoding: (p, TTFT, tokens moved, accepted)."""
    ttft, p = math.inf, -1
    best_len, best_instance = -1, -1
    for instance in asked.workers:  # FindBestPrefixMatch
        if instance.prefix > best_len:
            best_len, best_instance = instance.prefix, instance.worker
    for instance in asked.workers:
        prefix_len = instance.prefix
        t_queue = instance.queue_s
        if best_len > prefix_len * asked.threshold:
            t_transfer = asked.transfer_s(best_instance, instance.worker, best_len - prefix_len)
            t_prefill = asked.prefill_s(asked.tokens, best_len)
            candidate = t_transfer + t_queue + t_prefill
        else:
            t_prefill = asked.prefill_s(asked.tokens, prefix_len)
            candidate = t_queue + t_prefill
        if candidate < ttft:
            ttft, p = candidate, instance.worker
    if ttft > slo_ttft:
        return None  # HTTP 429
    moved = 0
    own = asked.workers[p].prefix
    if best_len > own * asked.threshold:
        moved = best_len - own  # TransferKVCache(best_instance, p)
    return p, ttft, moved, True


def asked(workers: Sequence[tuple[float, int]], tokens: int = 10_000, threshold: float = 1.5) -> RoutingQuery:
    """Of workers with (queue, match)."""
    matches = [WorkerMatch(w, queue_s, prefix, prefix) for w, (queue_s, prefix) in enumerate(workers)]
    return RoutingQuery(tokens, matches, LAW.seconds, lambda source, worker, moved: moved / RATE, threshold)


def prompt(tokens: int, *blocks: int) -> PromptInfo:
    """Of blocks of 512 tokens."""
    return PromptInfo(tokens, [b.to_bytes(8, "little") for b in blocks], 512)


def conductor(
    workers: int = 2, pages: int = 6000, law: PrefillLatency = LAW, instances: int = 2, decode_s: float = 15.0,
    limits: SloLimits = NO_LIMITS, **rules: object,
) -> Conductor:  # fmt: skip
    return Conductor(
        config=ConductorConfig(**{"policy": "mooncake", "limits": limits, **rules}),  # type: ignore[arg-type]
        prefix_index=BoundedPrefixIndex(pages), prefill_latency=PrefillLatencyEstimator(law),
        transfer_latency=TransferLatencyEstimator(MOVES),
        decode_load_model=DecodeLoadModel(instances, STEP, decode_s), num_workers=workers,
    )  # fmt: skip


def played(
    one: Conductor, arrivals: Sequence[TracedPrompt], *, instances: int = 0, law: PrefillLatency = LAW
) -> SimulatedPools:
    pools = SimulatedPools(one, SimulatedPoolSpec(law, MOVES, instances, STEP), sample_s=1.0 if instances else 0.0)
    pools.run(arrivals)
    return pools


def even(count: int, per_s: float, tokens: int, answer: int, seed: int = 3) -> list[TracedPrompt]:
    """Poisson arrivals, all alike, none of whom begins as another does."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(per_s)
        found.append(TracedPrompt(at, prompt(tokens), answer))
    return found


def zipf(count: int, per_s: float, seed: int = 5) -> list[TracedPrompt]:
    """Prompts of 20 blocks, of which the first 16 are one of 40 documents: a few are hot."""
    rng, at, found = random.Random(seed), 0.0, []
    weights = [1 / (n + 1) for n in range(40)]
    for number in range(count):
        at += rng.expovariate(per_s)
        (document,) = rng.choices(range(40), weights)
        blocks = [1000 * (document + 1) + n for n in range(16)] + [10**6 + 10 * number + n for n in range(4)]
        found.append(TracedPrompt(at, prompt(20 * 512, *blocks), 10))
    return found
