"""A trace played by the shipped Engine and Scheduler on a virtual clock: workers that take the time of the cost model.

Nothing is computed and nothing sleeps: a step is done at the moment at which the cost model says so, so the same trace
gives the same numbers whatever else the host does. Prompts are computed by prefill workers that take no time, as in the
paper, which replays decoding alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lamina.config import make_config
from lamina.engine.engine import Engine
from lamina.engine.wire import ViewChanged
from lamina.protocol.control import ComputeReady, Drawn, RunRound, StepDone
from lamina.protocol.options import EngineConfig
from lamina.protocol.partition import Lanes
from lamina.protocol.plan import Keep
from lamina.request import RequestOutput, SamplingParams
from lamina.sim.clock import VirtualClock

from .cost import CostModel, Load
from .deployment import Deployment, DeviceMemory
from .traces import RequestTrace

BLOCK = 16  # tokens of a KV block
PREFILL_WORKERS = 64  # that take no time: only so many prompts begin in a round
_WARM = 0.15  # of the tokens, until as many sequences run as fit
_AHEAD = 2 * PREFILL_WORKERS  # requests that wait at least, so that there always is a next one


class Replayed(NamedTuple):
    """Of a trace, behind its first tokens. batch: rows of a round, on average; tbt: seconds between two tokens of a
    sequence; rounds: that were run; preemptions: of the scheduler.
    """

    tokens: int
    seconds: float
    batch: float
    tbt_p50_s: float
    tbt_p99_s: float
    rounds: int
    preemptions: int

    @property
    def tokens_s(self) -> float:
        """Per second."""
        return self.tokens / self.seconds


class ModelledWire:
    """See engine.wire.Wire. Rounds run one after the other, each in the time of the cost model; nothing is lost."""

    def __init__(
        self, costs: CostModel, deployment: Deployment, clock: VirtualClock, num_blocks: int, max_len: int
    ) -> None:
        self.clock = clock
        self._costs, self._deployment = costs, deployment
        self._done: deque[StepDone] = deque()
        self._free_at = 0.0
        self.rows: list[int] = []  # of each round
        self.ready = ComputeReady(
            view=1, vocab_size=8, num_layers=costs.model.num_layers, max_model_len=max_len + 1, dtype="bfloat16",
            eos_token_ids=[], windows=[0], lanes=[Lanes()], stripe=0, num_blocks=[[num_blocks]], holders=[[0]],
            block_size=BLOCK, summary={},
        )  # fmt: skip

    def submit(self, new: RunRound) -> None:
        loads, done = [], []
        for step in new.steps:
            rows = step.plan.num_rows
            if rows:
                seen = float(sum(row.first + row.count for row in step.plan.rows))
                loads.append(Load(rows, dict.fromkeys(self._costs.model.windows, seen)))
            done.append(_drawn(step.plan.view, step.plan.batch, step.plan.step, [d.sequence for d in step.draws]))
        begin = max(self.clock.now, self._free_at)
        self._free_at = begin + (self._costs.round(self._deployment, loads).seconds if loads else 0.0)
        self.rows.append(sum(int(load.rows) for load in loads))
        self.clock.later(self._free_at - self.clock.now, lambda: self._done.extend(done))

    def prefill(self, worker: int, new: RunRound) -> None:
        (step,) = new.steps
        self._done.append(_drawn(step.plan.view, step.plan.batch, step.plan.step, [d.sequence for d in step.draws]))

    def wait(self) -> StepDone | ViewChanged:
        while not self._done:
            assert self.clock.advance(), "nothing is in flight"
        return self._done.popleft()

    def look(self) -> ViewChanged | None:
        return None

    def resume(self, keep: Sequence[Keep]) -> ComputeReady | ViewChanged:
        raise AssertionError("nothing is ever lost here")

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        return None


def replay(
    costs: CostModel, memory: DeviceMemory, deployment: Deployment, trace: RequestTrace, most: int = 0
) -> Replayed:
    """All requests, one after the other, as soon as there is room. ``most``: sequences at once, 0 = as many as fit.
    Raises ValueError for a model with windows, whose blocks are not modelled here, and for a trace that does not fit.
    """
    if costs.model.windows != [0]:
        raise ValueError(
            f"{costs.model.name} has layers with a window: a replay counts KV blocks of layers without one only"
        )
    blocks = int(memory.for_kv(costs.model, deployment) / costs.model.kv_bytes_per_token) // BLOCK
    if trace.longest > blocks * BLOCK:
        raise ValueError(f"--trace: a request of {trace.longest} tokens does not fit {blocks * BLOCK} tokens of KV")
    clock = VirtualClock()
    wire = ModelledWire(costs, deployment, clock, blocks, trace.longest)
    return _Replay(Engine(wire, _config(deployment, trace, most or blocks), clock), wire, trace).run()


class _Replay:
    def __init__(self, engine: Engine, wire: ModelledWire, trace: RequestTrace) -> None:
        self._engine, self._wire, self._trace = engine, wire, trace
        self._left = deque(trace.requests)
        self._last: dict[int, tuple[int, float]] = {}  # request -> its tokens, and when the last one came
        self._gaps: list[float] = []
        self._warm_tokens = int(_WARM * sum(r.answer for r in trace.requests))
        self._tokens = 0
        self._measured: list[
            tuple[float, int, int]
        ] = []  # time, tokens, rounds at the first and the last one that counts

    def run(self) -> Replayed:
        while self._refill() or self._engine.has_work:
            self._take(self._engine.step())
        if len(self._measured) < 2 or not self._gaps:
            raise ValueError(
                f"{len(self._trace.requests)} requests are too few for a replay: they never fill the deployment"
            )
        (begin, before, first), (end, after, last) = self._measured
        gaps, rows = sorted(self._gaps), self._wire.rows[first:last]
        return Replayed(
            tokens=after - before,
            seconds=end - begin,
            batch=sum(rows) / len(rows),
            tbt_p50_s=gaps[len(gaps) // 2],
            tbt_p99_s=gaps[len(gaps) * 99 // 100],
            rounds=len(self._wire.rows),
            preemptions=self._engine.scheduler.num_preemptions,
        )

    def _refill(self) -> bool:
        while self._left and self._engine.scheduler.num_waiting < _AHEAD:
            request = self._left.popleft()
            self._engine.add(
                [0] * request.prompt, SamplingParams(max_tokens=request.answer, ignore_eos=True, temperature=0)
            )
        return bool(self._left)

    def _take(self, outputs: list[RequestOutput]) -> None:
        now = self._wire.clock.now
        full = bool(self._left) or self._engine.scheduler.num_waiting > 0
        counts = full and self._tokens >= self._warm_tokens
        for output in outputs:
            length = len(output.outputs[0].token_ids)
            before = self._last.get(output.request_id)
            if before and counts:
                self._gaps.append(now - before[1])
            self._tokens += length - (before[0] if before else 0)
            self._last[output.request_id] = length, now
            if output.finished:
                del self._last[output.request_id]
        if counts and outputs and (not self._measured or now > self._measured[-1][0]):
            self._measured[1:] = [(now, self._tokens, len(self._wire.rows))]


def _drawn(view: int, batch: int, step: int, sequences: Sequence[int]) -> StepDone:
    return StepDone(view=view, batch=batch, step=step, drawn=[Drawn(s, 1, []) for s in sequences])


def _config(deployment: Deployment, trace: RequestTrace, most: int) -> EngineConfig:
    options = {
        "transport": "shm", "block_size": BLOCK, "max_num_seqs": most, "prefill_chunk": max(trace.longest, BLOCK),
        "memory_workers": 1, "pipeline": deployment.batches, "prefill_workers": PREFILL_WORKERS,
    }  # fmt: skip
    return make_config(options)
