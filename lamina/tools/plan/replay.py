"""Replays a trace with the shipped Engine and Scheduler on a virtual clock, whose workers take the times of the cost
model.

Nothing is computed and nothing sleeps: a step is done when the cost model ends it, so the same trace always gives the
same numbers. Prompts are computed by prefill workers that take no time, as in the paper, which replays decoding only.
With a chunk, the compute workers compute them, next to the rows that decode.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from lamina.engine.engine import Engine
from lamina.request import RequestOutput, SamplingParams
from lamina.tools.request_traces import RequestTrace

from .cost_model import BatchLoad, CostModel
from .deployment import Deployment, DeviceMemory
from .simulator.clock import VirtualClock
from .simulator.lossless import PREFILL_WORKERS, RoundLoad, SimulatedExecutor, SimulatedPool

BLOCK = 16  # tokens of a KV block
CHUNK = 512  # tokens of a prompt in a round, if prompts take time
_WARM = 0.15  # share of the tokens before as many sequences run as fit
_TELL = 64  # rounds between two reports of progress
_AHEAD = 3 * PREFILL_WORKERS  # least requests without a token, so that there always is one that waits


class NotSimulatableError(ValueError):
    """A deployment that cannot be replayed."""


class ReplayResult(NamedTuple):
    """The result of a replay, after its first tokens. batch: sequences that decode in a round, on average; tbt: seconds
    between two tokens of a sequence. first: from a request to its first token, 0 if all requests wait at once. rounds:
    all. preemptions: of the scheduler. requests: of the trace.
    """

    tokens: int
    seconds: float
    batch: float
    tbt_p50_s: float
    tbt_p99_s: float
    first_p50_s: float
    first_p99_s: float
    rounds: int
    preemptions: int
    requests: int

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def replay(
    costs: CostModel,
    memory: DeviceMemory,
    deployment: Deployment,
    trace: RequestTrace,
    most: int = 0,
    *,
    paced: bool = False,
    chunk: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay all requests: if ``paced``, when they came; else one after the other, as soon as they fit. ``most``:
    sequences at once, 0 = as many as fit. ``chunk``: rows of prompts in a round, 0 = they take no time.
    ``on_progress``: called now and then with the number of tokens so far and in all. Raises NotSimulatableError for a
    model with windows, whose blocks are not modelled here, for a trace that does not fit, and for one that never fills
    the deployment.
    """
    blocks = int(memory.kv_bytes(costs.model, deployment) / costs.model.kv_bytes_per_token) // BLOCK
    engine, wire = simulated(costs, deployment, trace, blocks, most, chunk)
    return _Replay(engine, wire, _Asking(engine, wire.clock, trace, paced=paced)).run(on_progress)


def simulated(
    costs: CostModel,
    deployment: Deployment,
    trace: RequestTrace,
    blocks: int,
    most: int = 0,
    chunk: int = 0,
    took: Callable[[float], float] = lambda expected_s: expected_s,
) -> tuple[Engine, SimulatedExecutor]:
    """Return an engine with so many KV blocks, whose pools take ``took`` of the cost model's times; the rest as for
    ``replay``.
    """
    if costs.model.windows != [0]:
        raise NotSimulatableError(
            f"{costs.model.name} has layers with a window: a replay counts KV blocks of layers without one only"
        )
    if trace.longest > blocks * BLOCK:
        raise NotSimulatableError(
            f"--trace: a request of {trace.longest} tokens does not fit {blocks * BLOCK} tokens of KV"
        )
    layers, seconds = costs.model.num_layers, _seconds(costs, deployment)
    pool = SimulatedPool(layers, blocks, BLOCK, trace.longest, most or blocks, deployment.batches, chunk)
    return pool.engine(VirtualClock(), lambda load: took(seconds(load)))


class _Asking:
    """Passes requests to the engine."""

    def __init__(self, engine: Engine, clock: VirtualClock, trace: RequestTrace, *, paced: bool) -> None:
        self._engine, self._clock, self._paced = engine, clock, paced
        self._left, self.count = deque(trace.requests), len(trace.requests)
        self.came: dict[int, float] = {}  # request -> when it came, until its first token
        self.tokens = sum(r.answer for r in trace.requests)
        self.warm_tokens = int(_WARM * self.tokens)

    @property
    def next_s(self) -> float:
        """The time of the next request."""
        return self._left[0].at_s if self._paced and self._left else math.inf

    @property
    def full(self) -> bool:
        """True if the engine has as many requests as it should have now."""
        return self._paced or bool(self._left) or self._engine.scheduler.num_waiting > 0

    def ask(self) -> bool:
        """Pass on all requests that come now. Returns True if there is something to do."""
        if self._paced and self._left and not self._engine.has_work:
            self._clock.now = max(self._clock.now, self.next_s)
        while self._left and self._comes():
            request = self._left.popleft()
            params = SamplingParams(max_tokens=request.answer, ignore_eos=True, temperature=0)
            came = request.at_s if self._paced else math.nan
            self.came[self._engine.add([0] * request.prompt, params)] = came
        return bool(self._left) or self._engine.has_work

    def _comes(self) -> bool:
        if self._paced:
            return self.next_s <= self._clock.now
        return len(self.came) < _AHEAD


class _Replay:
    def __init__(self, engine: Engine, executor: SimulatedExecutor, asking: _Asking) -> None:
        self._engine, self._wire, self._asking = engine, executor, asking
        self._last: dict[int, tuple[int, float]] = {}  # request -> its tokens, and when the last one came
        self._gaps, self._firsts = Counter[float](), Counter[float]()
        self._tokens = 0
        # Time, tokens, rounds at the first and the last one that counts:
        self._measured: list[tuple[float, int, int]] = []

    def run(self, on_progress: Callable[[int, int], None]) -> ReplayResult:
        for turn in count():
            if not self._asking.ask():
                break
            self._take(self._engine.step())
            if turn % _TELL == 0:
                on_progress(self._tokens, self._asking.tokens)
        if len(self._measured) < 2 or not self._gaps:
            raise NotSimulatableError(
                f"{self._asking.count} requests are too few for a replay: they never fill the deployment"
            )
        (begin, before, first), (end, after, last) = self._measured
        decoding = self._wire.decoding[first:last]
        return ReplayResult(
            tokens=after - before,
            seconds=end - begin,
            batch=sum(decoding) / len(decoding),
            tbt_p50_s=_quantile(self._gaps, 50),
            tbt_p99_s=_quantile(self._gaps, 99),
            first_p50_s=_quantile(self._firsts, 50),
            first_p99_s=_quantile(self._firsts, 99),
            rounds=len(self._wire.decoding),
            preemptions=self._engine.scheduler.num_preemptions,
            requests=self._asking.count,
        )

    def _take(self, outputs: list[RequestOutput]) -> None:
        now, gaps, tokens = self._wire.clock.now, Counter[float](), 0
        for output in outputs:
            length = len(output.outputs[0].token_ids)
            had, when = self._last.get(output.request_id, (0, now))
            if had:
                gaps[now - when] += 1
            elif length and (came := self._asking.came.pop(output.request_id)) <= now:
                self._firsts[now - came] += 1
            tokens += length - had
            self._last[output.request_id] = length, now
            if output.finished:
                del self._last[output.request_id]
        if outputs:
            self._count(now, gaps, tokens, len(self._wire.decoding))

    def _count(self, now: float, gaps: Counter[float], tokens: int, rounds: int) -> None:
        """Count the results of a step at ``now``, when so many rounds were begun."""
        counts = self._asking.full and self._tokens >= self._asking.warm_tokens
        if counts:
            self._gaps.update(gaps)
        self._tokens += tokens
        if counts and (not self._measured or now > self._measured[-1][0]):
            self._measured[1:] = [(now, self._tokens, rounds)]


def _quantile(gaps: Counter[float], percent: int) -> float:
    """Return a percentile; 0 if there are no gaps."""
    if not gaps:
        return 0.0
    at = gaps.total() * percent // 100
    each = iter(sorted(gaps.items()))
    value, times = next(each)
    while at >= times:
        at -= times
        value, times = next(each)
    return value


def _seconds(costs: CostModel, deployment: Deployment) -> Callable[[RoundLoad], float]:
    """Return a function for the seconds of a round, by the cost model."""

    def seconds(load: RoundLoad) -> float:
        windows = costs.model.windows
        return costs.round(
            deployment,
            [
                BatchLoad(s.rows, dict.fromkeys(windows, float(s.stored)), dict.fromkeys(windows, float(s.pairs)))
                for s in load.steps
            ],
        ).seconds

    return seconds
