"""An executor with simulated workers that lose nothing and compute nothing: a round is done when its time is over. A
function gives that time: the cost model's, or none at all if only the engine is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.engine.engine import Engine
from lamina.netstack import HERE
from lamina.protocol.control import ComputeReady, RunRound, RunStep, SampledToken, StepDone
from lamina.protocol.executor import EpochChanged
from lamina.protocol.step_plan import SurvivingKv

from .clock import VirtualClock

TOKEN = 1  # the token that every row draws
PREFILL_WORKERS = 64  # they take no time: only so many prompts begin in a round


class StepLoad(NamedTuple):
    """The work of a step: rows in its slices, and how many of these belong to chunks of prompts. ``stored``: tokens
    that its attention reads (its own rows included); ``pairs``: pairs of a row and a token that the row attends.
    """

    batch: int
    rows: int
    prompt: int
    stored: int
    pairs: int


class RoundLoad(NamedTuple):
    """The steps of a round that have rows, in the order of service."""

    steps: tuple[StepLoad, ...]

    @property
    def rows(self) -> int:
        """Rows of all steps."""
        return sum(step.rows for step in self.steps)

    @property
    def decoding(self) -> int:
        """Rows that belong to no chunk of a prompt."""
        return sum(step.rows - step.prompt for step in self.steps)


class _Flight(NamedTuple):
    due: float
    done: list[StepDone]


class SimulatedExecutor:
    """An Executor on a virtual clock, without losses. Rounds run one after the other, and all steps of a round are done
    with it. Chunks on prefill workers take no time. Every draw is TOKEN.
    """

    def __init__(self, clock: VirtualClock, ready: ComputeReady, seconds: Callable[[RoundLoad], float]) -> None:
        self.clock, self.ready, self._seconds = clock, ready, seconds
        self._done: deque[StepDone] = deque()
        self._flights: deque[_Flight] = deque()
        self._free_at = 0.0
        self.decoding: list[int] = []  # decoding rows of each round

    def submit(self, new: RunRound) -> None:
        load = RoundLoad(tuple(load_of(step) for step in new.steps if step.plan.rows))
        self._free_at = max(self.clock.now, self._free_at) + (self._seconds(load) if load.steps else 0.0)
        self.decoding.append(load.decoding)
        self._flights.append(_Flight(self._free_at, [done_of(step) for step in new.steps]))

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        self._done.extend(done_of(step) for step in new.steps)

    def wait(self) -> StepDone | EpochChanged:
        if not self._done:
            due = self.next_event_s
            while self.clock.advance(due):  # until nothing else happens by then
                pass
            self._done.extend(self._flights.popleft().done)
        return self._done.popleft()

    @property
    def next_event_s(self) -> float:
        """The time at which ``wait`` has a result; infinite if nothing is in flight."""
        if self._done:
            return self.clock.now
        return self._flights[0].due if self._flights else float("inf")

    def check_workers(self) -> EpochChanged | None:
        return None

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        raise AssertionError("nothing is ever lost here")

    def begin_era(self) -> bytes:
        return b""

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None:
        return None


class SimulatedPool(NamedTuple):
    """Simulated workers that take the time of a function, as an engine sees them. ``blocks`` of ``block`` tokens;
    sequences of up to ``longest`` tokens, ``most`` at once, in ``batches``. ``chunk``: rows of prompts in a round or,
    with ``prefill`` workers, on one of these. 0 = prompts take no time, and ``prefill`` of them can begin at once.
    """

    layers: int
    blocks: int
    block: int
    longest: int
    most: int
    batches: int = 1
    chunk: int = 0
    prefill: int = 0

    @property
    def ready(self) -> ComputeReady:
        """The facts of the workers."""
        return simulated_ready(
            num_layers=self.layers, num_blocks=self.blocks, block_size=self.block, max_len=self.longest + 1
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of an engine for them."""
        return {
            "transport": HERE, "block_size": self.block, "max_num_seqs": self.most, "memory_workers": 1,
            "prefill_chunk": self.chunk or max(self.longest, self.block),
            "prefill_workers": self.prefill or (0 if self.chunk else PREFILL_WORKERS), "pipeline": self.batches,
            "enable_prefix_caching": False,
        }  # fmt: skip

    def engine(self, clock: VirtualClock, seconds: Callable[[RoundLoad], float]) -> tuple[Engine, SimulatedExecutor]:
        """Return the real engine, unchanged, on an executor with such workers. ``seconds``: of a round."""
        executor = SimulatedExecutor(clock, self.ready, seconds)
        return Engine(executor, make_config(self.options), clock), executor


def simulated_ready(*, num_layers: int, num_blocks: int, block_size: int, max_len: int) -> ComputeReady:
    """Return the facts of workers that keep all KV in one pool of ``num_blocks``; sequences have up to ``max_len``
    tokens.
    """
    return ComputeReady(
        epoch=1, vocab_size=8, num_layers=num_layers, max_model_len=max_len, dtype="bfloat16", eos_token_ids=[],
        windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[[num_blocks]], holders=[[0]],
        block_size=block_size, summary={},
    )  # fmt: skip


def load_of(step: RunStep) -> StepLoad:
    """Return the work of a step."""
    number = prompt = stored = pairs = 0
    for row in step.plan.rows:
        first, count = row.first, row.count
        number, stored = number + count, stored + first + count
        if count == 1:
            pairs += first + 1
        else:
            prompt, pairs = prompt + count, pairs + count * first + count * (count + 1) // 2
    return StepLoad(step.plan.batch, number, prompt, stored, pairs)


def done_of(step: RunStep) -> StepDone:
    """Return the report on a step."""
    plan = step.plan
    return StepDone(
        epoch=plan.epoch,
        batch=plan.batch,
        step=plan.step,
        sampled_tokens=[SampledToken(d.sequence, TOKEN, []) for d in step.sampling_requests],
    )
