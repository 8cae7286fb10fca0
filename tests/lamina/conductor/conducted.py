"""What the Conductor's tests share: a literal Algorithm 1, conductors by hand, traces made up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lamina.engine.conductor import Conductor, ConductorRules, KnownPrompt
from lamina.engine.conductor.choice import Question, WorkerMatch
from lamina.engine.conductor.directory import Directory
from lamina.engine.conductor.estimate import PrefillFit, PrefillTime, TransferFit, TransferTime
from lamina.engine.conductor.overload import NO_LIMITS, DecodePool, Limits, TokenTime
from lamina.planner.simulator.run import PoolTruth, SimulatedPools, TracedPrompt

LAW = PrefillTime(0.0, 1 / 5000, 1 / 5e8)
RATE = 31_000.0
MOVES = TransferTime.at_rate(RATE)
STEP = TokenTime(0.01, 0.0015, 8e-8)


def algorithm_1(asked: Question, slo_ttft: float) -> tuple[int, float, int, bool] | None:
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


def asked(workers: Sequence[tuple[float, int]], tokens: int = 10_000, threshold: float = 1.5) -> Question:
    """Of workers with (queue, match)."""
    matches = [WorkerMatch(w, queue_s, prefix, prefix) for w, (queue_s, prefix) in enumerate(workers)]
    return Question(tokens, matches, LAW.seconds, lambda source, worker, moved: moved / RATE, threshold)


def prompt(tokens: int, *blocks: int) -> KnownPrompt:
    """Of blocks of 512 tokens."""
    return KnownPrompt(tokens, [b.to_bytes(8, "little") for b in blocks], 512)


def conductor(
    workers: int = 2, pages: int = 6000, law: PrefillTime = LAW, instances: int = 2, decode_s: float = 15.0,
    limits: Limits = NO_LIMITS, **rules: object,
) -> Conductor:  # fmt: skip
    return Conductor(
        rules=ConductorRules(**{"policy": "mooncake", "limits": limits, **rules}),  # type: ignore[arg-type]
        directory=Directory(workers, pages), fit=PrefillFit(law), transfers=TransferFit(MOVES),
        decoding=DecodePool(instances, STEP, decode_s), num_workers=workers,
    )  # fmt: skip


def played(
    one: Conductor, arrivals: Sequence[TracedPrompt], *, instances: int = 0, law: PrefillTime = LAW
) -> SimulatedPools:
    pools = SimulatedPools(one, PoolTruth(law, MOVES, instances, STEP), sample_s=1.0 if instances else 0.0)
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
