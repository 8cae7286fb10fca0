"""Checks at the start that the limits of ``--slo`` are above the latency of a single, short request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from lamina.engine.engine import Engine
from lamina.request import SamplingParams
from lamina.scheduler.conductor.overload import NO_LIMITS, SloLimits
from lamina.utils.progress import OnProgress

NUM_TRIES = 5  # the best counts, since a process's first steps are slow, and other programs may hold the cores
FIRST, STEP = "the first token of a prompt of 1 token", "a step of one completion"
NUM_TOKENS = 4  # intervals between tokens in each try


class UnloadedLatency(NamedTuple):
    """The TTFT and TBT of the shortest request, in seconds, on an otherwise idle engine."""

    ttft_s: float
    tbt_s: float


def check_slo(
    engine: Engine, limits: SloLimits, on_progress: OnProgress, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Raises ValueError, which names the flag, if a single request of one token exceeds ``limits`` in every try.

    ``on_progress`` counts tries. The requests leave no KV and no decisions in the log. Raises WorkerError.
    """
    if limits == NO_LIMITS:
        return
    best = UnloadedLatency(float("inf"), float("inf"))
    with engine.slo_admission.without_log():
        for number in range(NUM_TRIES):
            on_progress("measuring", number, NUM_TRIES)
            best = UnloadedLatency(*map(min, best, measure(engine, clock)))
            if best.ttft_s <= limits.ttft_s and best.tbt_s <= limits.tbt_s:
                return
    if best.ttft_s > limits.ttft_s:
        raise ValueError(_below("--slo ttft=", limits.ttft_s, FIRST, best.ttft_s))
    raise ValueError(_below("--slo tbt=", limits.tbt_s, STEP, best.tbt_s))


def measure(engine: Engine, clock: Callable[[], float]) -> UnloadedLatency:
    """Measures once. A time is 0 if the sequence is too short for it, or has no room."""
    count, ends = min(NUM_TOKENS + 1, engine.worker_info.max_model_len - 1), [clock()]
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, seed=0)
    request = engine.add([1 % engine.worker_info.vocab_size], params, cacheable=False, accepted=True)
    while engine.has_work:
        if engine.step():
            ends.append(clock())
        elif engine.idle:
            engine.cancel(request)
    engine.release_idle_blocks()
    begun, first, last = ends[0], ends[min(1, len(ends) - 1)], ends[-1]
    return UnloadedLatency(
        first - begun, (last - first) / max(1, len(ends) - 2)
    )  # the mean: tokens may come two by two


def _below(name: str, limit_s: float, what: str, took_s: float) -> str:
    took = f"{what} takes alone, {_spelt(took_s)}, the best of {NUM_TRIES}"
    return f"{name}{_spelt(limit_s)} is below what {took}: raise it"


def _spelt(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1e3 * seconds:.3g}ms"
