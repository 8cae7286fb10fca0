"""The compute worker: runs the slices of a model, sends Q, K, V as soon as they exist, receives O, samples.

It holds weights and no state of requests. From one step to the next it keeps only the tokens just drawn, and what
penalties count.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.grammar.rules import Grammars
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.ops.sampling.sampler import Sampler
from lamina.ops.sampling.token_history import LogitChanges, PendingHistory, TokenHistories, logit_changes_of
from lamina.protocol.control import RunRound, RunStep, SampledToken, SamplingRequest, StepDone
from lamina.protocol.step_plan import StepPlan
from lamina.workers.device_selection import CPU
from lamina.workers.staging import Staging, open_staging

FIXED_ROWS = 32


class Program(Protocol):
    """The part of converter.SlicedProgram that a compute worker runs."""

    @property
    def slices(self) -> Sequence[Any]:
        """The L + 1 callables; see converter.slices.Slice. An entry is None if another stage has that slice."""
        ...


class Attention(Protocol):
    """The attention of a worker: takes Q, K and V, and returns O. AttentionClient sends messages of the host,
    DeviceAttentionClient those of the device. ``prefill.LocalAttention`` sends none: that worker attends by itself.
    """

    @property
    def send_s(self) -> float:
        """The seconds spent sending."""
        ...

    @property
    def wait_s(self) -> float:
        """The seconds spent waiting for O."""
        ...

    def send_plan(self, plan: StepPlan) -> None:
        """Announce a coming step."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Prepare the step of ``plan`` ahead of time, while memory workers attend."""
        ...

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step of ``plan``: the next messages belong to it."""
        ...

    def q(self, layer: int, q: Tensor) -> None:
        """Send q [R, Hq, 1, D]."""
        ...

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]."""
        ...

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Wait for all outputs of an exchange and return them: O [R, 1, Hq, Dv], if there is no other one."""
        ...

    def check_errors(self) -> None:
        """Raise errors of messages that no caller has waited for. Called before tokens of a step are drawn."""
        ...


class PipelineComm(Protocol):
    """Sends the tensors of a cut from the replica that computed them to the one that needs them."""

    @property
    def wait_s(self) -> float:
        """The seconds spent in ``receive``."""
        ...

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Send the results of slice ``index`` to the replica that runs the next slice."""
        ...

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Return the results of slice ``index``, from whichever replica ran it. Calls follow the order of slice
        tasks.
        """
        ...


class LocalPipeline:
    """The pipeline of a single replica: it keeps cuts for its own next slice."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._carry: dict[int, tuple[Tensor, ...]] = {}  # by batch

    @property
    def has_carry(self) -> bool:
        """True if results are kept that were not received yet."""
        return bool(self._carry)

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        """Keep the results of slice ``index`` for this replica's own next slice."""
        self._carry[plan.batch] = carry

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        """Return the results of slice ``index`` that were kept."""
        return self._carry.pop(plan.batch)


class SliceTask(NamedTuple):
    """One slice of one batch's step. All workers run slice tasks in this order: by round, slice and batch. The last
    slice counts as slice 0 of the next round, right before the first slice of the same batch there, with sampling
    between the two.
    """

    round: int
    slice: int
    batch: int
    is_first: bool


SliceTasks = list[tuple[SliceTask, RunStep]]  # a heap


class RankGroup(Protocol):
    """All ranks of a replica, as seen by one of them."""

    @property
    def is_leader(self) -> bool:
        """True if this rank reports the drawn tokens to the driver."""
        ...

    def has_next(self, tasks: SliceTasks) -> bool:
        """Return whether ``pop_next`` will find a slice task."""
        ...

    def pop_next(self, tasks: SliceTasks) -> tuple[SliceTask, RunStep] | None:
        """Remove and return the next slice task; None if it has not arrived yet."""
        ...

    def sample(
        self, logits: Tensor, requests: list[SamplingRequest], seen: Mapping[int, LogitChanges]
    ) -> list[SampledToken]:
        """Draw one token for each row of ``logits`` [len(requests), this rank's vocabulary]; see Sampler.sample."""
        ...


class SingleRank:
    """A single rank, which has all weights."""

    is_leader = True

    def __init__(self) -> None:
        self._sampler = Sampler()

    def has_next(self, tasks: SliceTasks) -> bool:
        """Return whether a slice task is queued."""
        return bool(tasks)

    def pop_next(self, tasks: SliceTasks) -> tuple[SliceTask, RunStep] | None:
        """Remove and return the next slice task; one must be queued."""
        return heapq.heappop(tasks)

    def sample(
        self, logits: Tensor, requests: list[SamplingRequest], seen: Mapping[int, LogitChanges]
    ) -> list[SampledToken]:
        """Draw one token for each row of ``logits`` [len(requests), vocabulary]."""
        return self._sampler.sample(logits, requests, seen)


class ComputeWorker:
    """One replica of the model. Runs its slice tasks in their order, whatever order messages arrive in."""

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
        """``ring``: None for the only replica. ``ranks``: None if this rank has all weights. ``staging``: of the
        program's device; None for the CPU. ``pool``, ``ring`` and ``ranks`` take and return tensors on that device.
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
        self._tasks: SliceTasks = []  # this replica's queue
        self._last_tokens: dict[int, dict[int, int]] = {}  # batch -> sequence -> the token that the last step drew
        self._grammars = Grammars()
        self._histories = TokenHistories(self._grammars.rules_of)
        self._masks_begun = set[tuple[int, int]]()  # (batch, step)
        self._penalties_due: dict[
            tuple[int, int], dict[int, PendingHistory]
        ] = {}  # (batch, step) -> what its penalties count
        self._epoch = epoch
        self._past = dict.fromkeys(("send_s", "wait_s", "carry_s"), 0.0)  # the seconds of older epochs
        self.slice_s = 0.0
        self.sample_s = 0.0
        self.steps = 0
        self.rows = 0

    @property
    def has_work(self) -> bool:
        """True if a slice task can be run."""
        return self._rank_group.has_next(self._tasks)

    def connect(
        self,
        pool: Attention,
        epoch: int,
        ring: PipelineComm | None = None,
        ranks: RankGroup | None = None,
        replica: int = 0,
    ) -> None:
        """Continue in ``epoch`` with new peers, as the replica of that number. Slice tasks, last tokens and the history
        that penalties count are discarded.
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
        self._tasks, self._penalties_due, self._last_tokens = [], {}, {}
        self._histories = TokenHistories(self._grammars.rules_of)
        self._masks_begun.clear()

    def submit(self, new: RunRound) -> None:
        """Queue this replica's slice tasks of a round. Replica 0 also sends the plans to the memory workers. Steps of
        an older epoch are dropped. Raises ValueError for penalties that count tokens this worker does not know.
        """
        last = len(self._slices) - 1
        if new.vocabulary is not None:
            self._grammars.set_vocabulary(new.vocabulary)
        for step in new.steps:
            if step.plan.epoch < self._epoch:
                continue
            updates = [request for request in step.sampling_requests if request.logits_update is not None]
            if updates or self._histories:
                due = self._histories.note(step.plan.ops, updates)
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
        """Run the next slice task. Returns the result of its step if that is now done and this rank reports it."""
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
        """Return seconds by activity, and counts. ``slice_s`` excludes sending."""
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
        self._run(step, index, ids, (*carry, *self._receive(step, index - 1)))

    def _run(self, step: RunStep, index: int, ids: Tensor, inputs: tuple[Tensor, ...]) -> None:
        start = self._trace.now()
        self._pipeline.send(step.plan, index, (ids, *self._call(index, inputs)))
        self._trace.add(Event.SLICE, start, step.plan, index, value=len(step.token_ids))
        self._begin_masks(step, ids)

    def _begin_masks(self, step: RunStep, ids: Tensor) -> None:
        """Let the rules of the step's draws make their masks while memory workers attend."""
        key = step.plan.batch, step.plan.step
        if key in self._masks_begun or (due := self._penalties_due.get(key)) is None:
            return
        self._masks_begun.add(key)
        pending = _pending_tokens(step, ids)
        for sequence, each in due.items():
            each.history.begin(each.num_tokens, pending.get(sequence))

    def _finish(self, step: RunStep) -> StepDone | None:
        last, sampled = len(self._slices) - 1, list[SampledToken]()
        ids, *carry = self._pipeline.receive(step.plan, last - 1)
        outputs = self._receive(step, last - 1)
        if step.sampling_requests:
            start = self._trace.now()
            wanted = self._to_device(torch.tensor([d.row for d in step.sampling_requests]))
            (logits,) = self._call(last, tuple(x[wanted] for x in (*carry, *outputs)))
            self._trace.add(Event.SLICE, start, step.plan, last, value=len(step.sampling_requests))
        self._client.check_errors()
        if step.sampling_requests:
            begun = time.perf_counter()
            changes = dict[int, LogitChanges]()
            if (due := self._penalties_due.pop((step.plan.batch, step.plan.step), None)) is not None:
                self._masks_begun.discard((step.plan.batch, step.plan.step))
                changes = logit_changes_of(due, _pending_tokens(step, ids))
            sampled = self._rank_group.sample(logits[:, -1], step.sampling_requests, changes)
            self.sample_s += time.perf_counter() - begun
            self._trace.add(Event.SAMPLE, begun, step.plan)
        # A sequence without a token ends. Until the driver knows, its rows are computed with token 0.
        self._last_tokens[step.plan.batch] = {d.sequence: max(d.token_id, 0) for d in sampled}
        return self._done(step, sampled)

    def _done(self, step: RunStep, sampled: list[SampledToken]) -> StepDone | None:
        plan = step.plan
        return (
            StepDone(epoch=plan.epoch, batch=plan.batch, step=plan.step, sampled_tokens=sampled)
            if self._rank_group.is_leader
            else None
        )

    def _receive(self, step: RunStep, exchange: int) -> tuple[Tensor, ...]:
        return self._client.outputs(exchange, len(step.token_ids), self._dtype)

    def _call_plain(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = time.perf_counter()
        send = () if index == len(self._slices) - 1 else (self._client,)
        out: tuple[Tensor, ...] = self._slices[index](*inputs, *send)
        self.slice_s += time.perf_counter() - start
        return out

    def _call_fixed(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run a slice in calls of FIXED_ROWS rows, the last one padded: no GEMM's shape depends on other requests."""
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


def _pending_tokens(step: RunStep, ids: Tensor) -> dict[int, int]:
    """Return the tokens that the step before drew, of sequences whose draws count them."""
    return {d.sequence: int(ids[d.row]) for d in step.sampling_requests if d.has_pending_token}


def _resolve(step: RunStep, last: dict[int, int]) -> list[int]:
    if -1 not in step.token_ids:
        return step.token_ids
    # Sequences that continue with another sequence's token.
    reference_of = {
        d.sequence: step.sampling_requests[d.reference_request].sequence
        for d in step.sampling_requests
        if d.reference_request >= 0
    }
    owners = [reference_of.get(r.sequence, r.sequence) for r in step.plan.rows for _ in range(r.count)]
    return [last[s] if t == -1 else t for s, t in zip(owners, step.token_ids, strict=True)]


class BufferedSends:
    """Collects the sends of several calls of one slice and forwards each kind as one message."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, ...]]] = {}
        self._layer = -1

    def q(self, layer: int, q: Tensor) -> None:
        self._layer = layer
        self._parts.setdefault("q", []).append((q,))

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._parts.setdefault("kv", []).append((k, v))

    def mix(self, layer: int, *inputs: Tensor) -> None:
        self._layer = layer
        self._parts.setdefault("mix", []).append(inputs)

    def messages(self, rows: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield each message of the first ``rows`` rows: the name of AttentionClient's method, and its arguments."""
        for kind, parts in self._parts.items():
            yield kind, (self._layer, *(torch.cat(p)[:rows] for p in zip(*parts, strict=True)))

    def forward(self, pool: Any, rows: int) -> None:
        """Send the first ``rows`` rows to ``pool``, which has the methods of AttentionClient."""
        for kind, message in self.messages(rows):
            getattr(pool, kind)(*message)
