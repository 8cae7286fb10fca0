"""Helpers of the Conductor's tests: a literal Algorithm 1, conductors by hand, traces made up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.executor import EpochChanged
from lamina.protocol.step_plan import BindReply, FetchPrefix
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
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.conducted_run import SimulatedPools, SimulatedPoolSpec, TracedPrompt
from lamina.tools.plan.simulator.lossless import (
    RoundLoad,
    SimulatedExecutor,
    SimulatedPool,
    StepLoad,
    done_of,
    load_of,
)

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
    """Asks workers with (queue, match)."""
    matches = [WorkerMatch(w, queue_s, prefix, prefix) for w, (queue_s, prefix) in enumerate(workers)]
    return RoutingQuery(tokens, matches, LAW.seconds, lambda source, worker, moved: moved / RATE, threshold)


def prompt(tokens: int, *blocks: int) -> PromptInfo:
    """Makes a prompt of blocks of 512 tokens."""
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


class TimedPrefillExecutor(SimulatedExecutor):
    """Chunks run on their prefill worker, one after the other. ``tokens_per_s``: from one such worker to another."""

    def __init__(
        self,
        clock: VirtualClock,
        pool: SimulatedPool,
        seconds: Callable[[RoundLoad], float],
        chunk_s: Callable[[StepLoad], float],
        kept: int,
    ) -> None:
        """``kept``: blocks that a worker keeps for shared prefixes, in addition to the longest prompt; 0 = none."""
        store = BindReply(
            windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[kept + pool.longest // pool.block + 1]
        )
        stores = [store] * pool.prefill if kept else []
        super().__init__(clock, msgspec.structs.replace(pool.ready, prefill_stores=stores), seconds)
        self._chunk_s, self.tokens_per_s = chunk_s, float("inf")
        self._chunks = list[tuple[float, int, list[StepDone]]]()  # a heap: when each is done
        self._chunks_free_at, self._num_chunks = dict[int, float](), 0

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        free_at = max(self.clock.now, self._chunks_free_at.get(worker, 0.0))
        moved = sum(op.count for step in new.steps for op in step.plan.ops if isinstance(op, FetchPrefix))
        begins = max(free_at, self.clock.now + moved / self.tokens_per_s)  # it comes while the chunk before is computed
        done = [msgspec.structs.replace(done_of(step), fetch_s=begins - free_at) for step in new.steps]
        self._chunks_free_at[worker] = begins + sum(self._chunk_s(load_of(step)) for step in new.steps)
        self._num_chunks += 1
        heappush(self._chunks, (self._chunks_free_at[worker], self._num_chunks, done))

    def wait(self) -> StepDone | EpochChanged:
        due = self.next_event_s
        while not self._done and self.clock.advance(due):  # until nothing else happens by then
            pass
        if not self._done and self._chunks and self._chunks[0][0] <= due:
            self._done.extend(heappop(self._chunks)[2])
        return super().wait()

    @property
    def next_event_s(self) -> float:
        event = super().next_event_s
        return event if self._done or not self._chunks else min(event, self._chunks[0][0])


def timed_engine(
    pool: SimulatedPool,
    clock: VirtualClock,
    seconds: Callable[[RoundLoad], float],
    chunk_s: Callable[[StepLoad], float],
    kept: int,
) -> tuple[Engine, TimedPrefillExecutor]:
    """The real engine on such workers."""
    executor = TimedPrefillExecutor(clock, pool, seconds, chunk_s, kept)
    return Engine(executor, make_config(pool.options | {"enable_prefix_caching": bool(kept)}), clock), executor
