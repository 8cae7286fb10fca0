"""Simulated prefill workers that take time, and keep prefixes; see ``lamina.tools.plan.simulator.lossless``."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import msgspec

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.executor import EpochChanged
from lamina.protocol.step_plan import BindReply, FetchPrefix
from lamina.tools.plan.simulator.clock import VirtualClock
from lamina.tools.plan.simulator.lossless import (
    RoundLoad,
    SimulatedExecutor,
    SimulatedPool,
    StepLoad,
    done_of,
    load_of,
)


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
