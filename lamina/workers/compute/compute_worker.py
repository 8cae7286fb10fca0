"""The compute worker: runs the slices of a model, sends Q, K, V as they appear, takes O back, samples.

It holds weights and no request state: all that it keeps from one step to the next are the tokens just drawn, and what
penalties count.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.ops.sampling.token_history import PendingHistory, TokenHistories, logit_changes_of
from lamina.protocol.control import RunRound, RunStep, SampledToken, StepDone
from lamina.protocol.step_plan import StepPlan
from lamina.workers.device_selection import CPU
from lamina.workers.staging import Staging, open_staging

from .pipeline_comm import LocalPipeline, PipelineComm
from .tensor_parallel import RankGroup, SingleRank, SliceTask, SliceTasks

FIXED_ROWS = 32


class Program(Protocol):
    """The part of converter.SlicedProgram that a compute worker runs."""

    @property
    def slices(self) -> Sequence[Any]:
        """L + 1 callables; see converter.slices.Slice. None: another stage has it."""
        ...


class Attention(Protocol):
    """Where Q, K and V go and O comes from: by hosts (AttentionClient), from device to device (DeviceAttentionClient),
    or nowhere, where the worker attends by itself (prefill.LocalAttention).
    """

    @property
    def send_s(self) -> float:
        """Seconds spent sending."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for O."""
        ...

    def send_plan(self, plan: StepPlan) -> None:
        """A step is to come."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """The step of ``plan`` will be selected: what that needs is worked out here, while memory workers attend."""
        ...

    def begin_step(self, plan: StepPlan) -> None:
        """The messages that follow belong to the step of ``plan``."""
        ...

    def q(self, layer: int, q: Tensor) -> None:
        """q [R, Hq, 1, D]."""
        ...

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k [R, Hkv, 1, D], v [R, Hkv, 1, Dv]."""
        ...

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """[R, 1, Hq, Dv], once it is there."""
        ...

    def check_errors(self) -> None:
        """Before anything is drawn from a step: raise what went wrong with messages that nobody has waited for."""
        ...


class ComputeWorker:
    """One replica of the model. Takes its turns in their order, whichever messages come first."""

    def __init__(
        self,
        program: Program,
        pool: Attention,
        *,
        dtype: torch.dtype,
        deterministic: bool = False,
        replica: int = 0,
        ring: PipelineComm | None = None,
        ranks: RankGroup | None = None,
        staging: Staging | None = None,
        trace: Recorder = NULL_RECORDER,
        epoch: int = 0,
    ) -> None:
        """``ring``: None for the only replica; ``ranks``: None where it has all weights; ``staging``: of the program's
        device, None for the CPU. ``pool`` and the others take and give tensors of that device.
        """
        self._slices = program.slices
        self._client = pool
        self._replica = replica
        self._pipeline = ring or LocalPipeline()
        self._rank_group = ranks or SingleRank()
        self._to_device = (staging or open_staging(CPU)).to_device
        self._trace = trace
        self._dtype = dtype
        self._call = self._call_fixed if deterministic else self._call_plain
        self._tasks: SliceTasks = []  # of this replica
        self._last_tokens: dict[int, dict[int, int]] = {}  # batch -> sequence -> the token drawn by its step before
        self._histories = TokenHistories()
        self._penalties_due: dict[
            tuple[int, int], dict[int, PendingHistory]
        ] = {}  # batch, step -> what the draws ahead here count
        self._epoch = epoch
        self._past = dict.fromkeys(("send_s", "wait_s", "carry_s"), 0.0)  # of older epochs
        self.slice_s = 0.0
        self.sample_s = 0.0
        self.steps = 0
        self.rows = 0

    @property
    def has_work(self) -> bool:
        """Whether some turn is ahead."""
        return self._rank_group.has_next(self._tasks)

    def connect(
        self,
        pool: Attention,
        epoch: int,
        ring: PipelineComm | None = None,
        ranks: RankGroup | None = None,
        replica: int = 0,
    ) -> None:
        """Go on under ``epoch`` with others to talk to, as the replica of that number. Of older epochs nothing is left:
        no turns, no last tokens, and nothing that penalties count.
        """
        before = self._activity_seconds()
        self._replica = replica
        self._client, self._pipeline, self._rank_group, self._epoch = (
            pool,
            ring or LocalPipeline(),
            ranks or SingleRank(),
            epoch,
        )
        self._past = dict.fromkeys(before, 0.0)
        now = self._activity_seconds()
        self._past = {name: seconds - now[name] for name, seconds in before.items()}
        self._tasks, self._penalties_due, self._last_tokens, self._histories = [], {}, {}, TokenHistories()

    def submit(self, new: RunRound) -> None:
        """Queue the turns of a round that are this replica's; replica 0 announces its plans to the memory workers.
        Steps of an older epoch are dropped.

        Raises ValueError for penalties that count on what this worker was not told.
        """
        last = len(self._slices) - 1
        for step in new.steps:
            if step.plan.epoch < self._epoch:
                continue
            due = self._histories.update(step.plan.ops, step.sampling_requests)
            if due and self._runs(step.plan, last):
                self._penalties_due[step.plan.batch, step.plan.step] = due
            if self._replica == 0:
                self._client.send_plan(step.plan)
            turns = [i for i in range(last + 1 if step.token_ids else 1) if self._runs(step.plan, i)]
            if step.token_ids and turns:
                self._client.prepare(step.plan)
            for index in turns:
                ahead = (new.round, index) if index < last else (new.round + 1, 0)
                heapq.heappush(self._tasks, (SliceTask(*ahead, step.plan.batch, is_first=index == 0), step))

    def _runs(self, plan: StepPlan, index: int) -> bool:
        return plan.replica_of(index) == self._replica and self._slices[index] is not None

    @torch.inference_mode()
    def run_next(self) -> StepDone | None:
        """Take the next turn; returns its step if that is done now and this rank is to say so."""
        if (taken := self._rank_group.pop_next(self._tasks)) is None:
            return None
        turn, step = taken
        if not step.token_ids:
            return self._done(step, [])
        self._client.begin_step(step.plan)
        if turn.is_first:
            self._begin(step)
        elif turn.slice:
            self._advance(step, turn.slice)
        else:
            return self._finish(step)
        return None

    def stats(self) -> dict[str, float]:
        """Seconds by activity (``slice_s`` excludes sending), and counts."""
        waits = self._activity_seconds()
        return {
            "slice_s": self.slice_s - waits["send_s"],
            **waits,
            "sample_s": self.sample_s,
            "steps": float(self.steps),
            "rows": float(self.rows),
        }

    def _activity_seconds(self) -> dict[str, float]:
        now = self._client.send_s, self._client.wait_s, self._pipeline.wait_s
        return {name: past + s for (name, past), s in zip(self._past.items(), now, strict=True)}

    def _begin(self, step: RunStep) -> None:
        self.steps += 1
        self.rows += len(step.token_ids)
        ids = torch.tensor([[t] for t in _resolve(step, self._last_tokens.get(step.plan.batch, {}))])
        positions = torch.tensor([[p] for r in step.plan.rows for p in range(r.first, r.first + r.count)])
        self._run(step, 0, ids, (self._to_device(ids), self._to_device(positions)))

    def _advance(self, step: RunStep, index: int) -> None:
        ids, *carry = self._pipeline.receive(step.plan, index - 1)
        self._run(step, index, ids, (*carry, self._receive(step, index - 1)))

    def _run(self, step: RunStep, index: int, ids: Tensor, inputs: tuple[Tensor, ...]) -> None:
        start = self._trace.now()
        self._pipeline.send(step.plan, index, (ids, *self._call(index, inputs)))
        self._trace.add(Event.SLICE, start, step.plan, index, value=len(step.token_ids))

    def _finish(self, step: RunStep) -> StepDone | None:
        last, sampled = len(self._slices) - 1, list[SampledToken]()
        ids, *carry = self._pipeline.receive(step.plan, last - 1)
        o = self._receive(step, last - 1)
        if step.sampling_requests:
            start = self._trace.now()
            wanted = self._to_device(torch.tensor([d.row for d in step.sampling_requests]))
            (logits,) = self._call(last, tuple(x[wanted] for x in (*carry, o)))
            self._trace.add(Event.SLICE, start, step.plan, last, value=len(step.sampling_requests))
        self._client.check_errors()
        if step.sampling_requests:
            begun = time.perf_counter()
            pending = {d.sequence: int(ids[d.row]) for d in step.sampling_requests if d.has_pending_token}
            due = self._penalties_due.pop((step.plan.batch, step.plan.step), {})
            sampled = self._rank_group.sample(logits[:, -1], step.sampling_requests, logit_changes_of(due, pending))
            self.sample_s += time.perf_counter() - begun
            self._trace.add(Event.SAMPLE, begun, step.plan)
        # A sequence that got no token ends; until the driver knows, its rows are those of some token.
        self._last_tokens[step.plan.batch] = {d.sequence: max(d.token_id, 0) for d in sampled}
        return self._done(step, sampled)

    def _done(self, step: RunStep, sampled: list[SampledToken]) -> StepDone | None:
        plan = step.plan
        return (
            StepDone(epoch=plan.epoch, batch=plan.batch, step=plan.step, sampled_tokens=sampled)
            if self._rank_group.is_leader
            else None
        )

    def _receive(self, step: RunStep, layer: int) -> Tensor:
        return self._client.o(layer, len(step.token_ids), self._dtype)

    def _call_plain(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = time.perf_counter()
        send = () if index == len(self._slices) - 1 else (self._client,)
        out: tuple[Tensor, ...] = self._slices[index](*inputs, *send)
        self.slice_s += time.perf_counter() - start
        return out

    def _call_fixed(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """In calls of FIXED_ROWS rows, the last one padded, so that no GEMM's shape depends on batch mates."""
        start = time.perf_counter()
        rows = inputs[0].shape[0]
        held = BufferedSends()
        send = () if index == len(self._slices) - 1 else (held,)
        outs = []
        for at in range(0, rows, FIXED_ROWS):
            part = [x[at : at + FIXED_ROWS] for x in inputs]
            missing = FIXED_ROWS - part[0].shape[0]
            if missing:
                part = [torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) for x in part]
            outs.append(self._slices[index](*part, *send))
        held.forward(self._client, rows)
        self.slice_s += time.perf_counter() - start
        return tuple(torch.cat(parts)[:rows] for parts in zip(*outs, strict=True))


def _resolve(step: RunStep, last: dict[int, int]) -> list[int]:
    if -1 not in step.token_ids:
        return step.token_ids
    # Sequences that go on with another one's token.
    reference_of = {
        d.sequence: step.sampling_requests[d.reference_request].sequence
        for d in step.sampling_requests
        if d.reference_request >= 0
    }
    owners = [reference_of.get(r.sequence, r.sequence) for r in step.plan.rows for _ in range(r.count)]
    return [last[s] if t == -1 else t for s, t in zip(owners, step.token_ids, strict=True)]


class BufferedSends:
    """Takes the sends of several calls of one slice and forwards them as one message each."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, ...]]] = {}
        self._layer = -1

    def q(self, layer: int, q: Tensor) -> None:
        self._layer = layer
        self._parts.setdefault("q", []).append((q,))

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._parts.setdefault("kv", []).append((k, v))

    def forward(self, pool: Any, rows: int) -> None:
        """Send the first ``rows`` rows to ``pool``, which takes sends as a AttentionClient does."""
        for kind, parts in self._parts.items():
            getattr(pool, kind)(self._layer, *(torch.cat(p)[:rows] for p in zip(*parts, strict=True)))
