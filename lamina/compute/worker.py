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

from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.control import Drawn, RunRound, RunStep, StepDone
from lamina.protocol.plan import StepPlan
from lamina.sampling.history import Due, Histories, seen_of
from lamina.workers.devices import CPU
from lamina.workers.staging import Staging, open_staging

from .ranks import Alone, Ranks, Turn, Turns
from .ring import Ring, Stay

FIXED_ROWS = 32


class Program(Protocol):
    """The part of converter.SlicedProgram that a compute worker runs."""

    @property
    def slices(self) -> Sequence[Any]:
        """L + 1 callables; see converter.slices.Slice. None: another stage has it."""
        ...


class Attention(Protocol):
    """Where Q, K and V go and O comes from: by hosts (MemoryPool), from device to device (DirectAttention), or nowhere,
    where the worker attends by itself (prefill.OwnAttention).
    """

    @property
    def send_s(self) -> float:
        """Seconds spent sending."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for O."""
        ...

    def announce(self, plan: StepPlan) -> None:
        """A step is to come."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """The step of ``plan`` will be selected: what that needs is worked out here, while memory workers attend."""
        ...

    def select(self, plan: StepPlan) -> None:
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

    def settle(self) -> None:
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
        ring: Ring | None = None,
        ranks: Ranks | None = None,
        staging: Staging | None = None,
        trace: Recorder = OFF,
        view: int = 0,
    ) -> None:
        """``ring``: None for the only replica; ``ranks``: None where it has all weights; ``staging``: of the program's
        device, None for the CPU. ``pool`` and the others take and give tensors of that device.
        """
        self._slices = program.slices
        self._pool = pool
        self._replica = replica
        self._ring = ring or Stay()
        self._ranks = ranks or Alone()
        self._up = (staging or open_staging(CPU)).up
        self._trace = trace
        self._dtype = dtype
        self._call = self._call_fixed if deterministic else self._call_plain
        self._turns: Turns = []  # of this replica
        self._last: dict[int, dict[int, int]] = {}  # batch -> sequence -> the token drawn by its step before
        self._histories = Histories()
        self._due: dict[tuple[int, int], dict[int, Due]] = {}  # batch, step -> what the draws ahead here count
        self._view = view
        self._past = dict.fromkeys(("send_s", "wait_s", "carry_s"), 0.0)  # of older views
        self.slice_s = 0.0
        self.sample_s = 0.0
        self.steps = 0
        self.rows = 0

    @property
    def has_work(self) -> bool:
        """Whether some turn is ahead."""
        return self._ranks.may_take(self._turns)

    def connect(
        self, pool: Attention, view: int, ring: Ring | None = None, ranks: Ranks | None = None, replica: int = 0
    ) -> None:
        """Go on under ``view`` with others to talk to, as the replica of that number. Of older views nothing is left:
        no turns, no last tokens, and nothing that penalties count.
        """
        before = self._waits()
        self._replica = replica
        self._pool, self._ring, self._ranks, self._view = pool, ring or Stay(), ranks or Alone(), view
        self._past = dict.fromkeys(before, 0.0)
        now = self._waits()
        self._past = {name: seconds - now[name] for name, seconds in before.items()}
        self._turns, self._due, self._last, self._histories = [], {}, {}, Histories()

    def submit(self, new: RunRound) -> None:
        """Queue the turns of a round that are this replica's; replica 0 announces its plans to the memory workers.
        Steps of an older view are dropped.

        Raises ValueError for penalties that count on what this worker was not told.
        """
        last = len(self._slices) - 1
        for step in new.steps:
            if step.plan.view < self._view:
                continue
            due = self._histories.learn(step.plan.ops, step.draws)
            if due and self._runs(step.plan, last):
                self._due[step.plan.batch, step.plan.step] = due
            if self._replica == 0:
                self._pool.announce(step.plan)
            turns = [i for i in range(last + 1 if step.tokens else 1) if self._runs(step.plan, i)]
            if step.tokens and turns:
                self._pool.prepare(step.plan)
            for index in turns:
                ahead = (new.round, index) if index < last else (new.round + 1, 0)
                heapq.heappush(self._turns, (Turn(*ahead, step.plan.batch, begins=index == 0), step))

    def _runs(self, plan: StepPlan, index: int) -> bool:
        return plan.replica_of(index) == self._replica and self._slices[index] is not None

    @torch.inference_mode()
    def turn(self) -> StepDone | None:
        """Take the next turn; returns its step if that is done now and this rank is to say so."""
        if (taken := self._ranks.take(self._turns)) is None:
            return None
        turn, step = taken
        if not step.tokens:
            return self._done(step, [])
        self._pool.select(step.plan)
        if turn.begins:
            self._begin(step)
        elif turn.slice:
            self._advance(step, turn.slice)
        else:
            return self._finish(step)
        return None

    def stats(self) -> dict[str, float]:
        """Seconds by activity (``slice_s`` excludes sending), and counts."""
        waits = self._waits()
        return {
            "slice_s": self.slice_s - waits["send_s"],
            **waits,
            "sample_s": self.sample_s,
            "steps": float(self.steps),
            "rows": float(self.rows),
        }

    def _waits(self) -> dict[str, float]:
        now = self._pool.send_s, self._pool.wait_s, self._ring.wait_s
        return {name: past + s for (name, past), s in zip(self._past.items(), now, strict=True)}

    def _begin(self, step: RunStep) -> None:
        self.steps += 1
        self.rows += len(step.tokens)
        ids = torch.tensor([[t] for t in _resolve(step, self._last.get(step.plan.batch, {}))])
        positions = torch.tensor([[p] for r in step.plan.rows for p in range(r.first, r.first + r.count)])
        self._run(step, 0, ids, (self._up(ids), self._up(positions)))

    def _advance(self, step: RunStep, index: int) -> None:
        ids, *carry = self._ring.take(step.plan, index - 1)
        self._run(step, index, ids, (*carry, self._receive(step, index - 1)))

    def _run(self, step: RunStep, index: int, ids: Tensor, inputs: tuple[Tensor, ...]) -> None:
        start = self._trace.now()
        self._ring.give(step.plan, index, (ids, *self._call(index, inputs)))
        self._trace.add(Event.SLICE, start, step.plan, index, value=len(step.tokens))

    def _finish(self, step: RunStep) -> StepDone | None:
        last, drawn = len(self._slices) - 1, list[Drawn]()
        ids, *carry = self._ring.take(step.plan, last - 1)
        o = self._receive(step, last - 1)
        if step.draws:
            start = self._trace.now()
            wanted = self._up(torch.tensor([d.row for d in step.draws]))
            (logits,) = self._call(last, tuple(x[wanted] for x in (*carry, o)))
            self._trace.add(Event.SLICE, start, step.plan, last, value=len(step.draws))
        self._pool.settle()
        if step.draws:
            begun = time.perf_counter()
            pending = {d.sequence: int(ids[d.row]) for d in step.draws if d.pending}
            due = self._due.pop((step.plan.batch, step.plan.step), {})
            drawn = self._ranks.draw(logits[:, -1], step.draws, seen_of(due, pending))
            self.sample_s += time.perf_counter() - begun
            self._trace.add(Event.SAMPLE, begun, step.plan)
        # A sequence that got no token ends; until the driver knows, its rows are those of some token.
        self._last[step.plan.batch] = {d.sequence: max(d.token, 0) for d in drawn}
        return self._done(step, drawn)

    def _done(self, step: RunStep, drawn: list[Drawn]) -> StepDone | None:
        plan = step.plan
        return StepDone(view=plan.view, batch=plan.batch, step=plan.step, drawn=drawn) if self._ranks.leads else None

    def _receive(self, step: RunStep, layer: int) -> Tensor:
        return self._pool.o(layer, len(step.tokens), self._dtype)

    def _call_plain(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = time.perf_counter()
        send = () if index == len(self._slices) - 1 else (self._pool,)
        out: tuple[Tensor, ...] = self._slices[index](*inputs, *send)
        self.slice_s += time.perf_counter() - start
        return out

    def _call_fixed(self, index: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """In calls of FIXED_ROWS rows, the last one padded, so that no GEMM's shape depends on batch mates."""
        start = time.perf_counter()
        rows = inputs[0].shape[0]
        held = Held()
        send = () if index == len(self._slices) - 1 else (held,)
        outs = []
        for at in range(0, rows, FIXED_ROWS):
            part = [x[at : at + FIXED_ROWS] for x in inputs]
            missing = FIXED_ROWS - part[0].shape[0]
            if missing:
                part = [torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) for x in part]
            outs.append(self._slices[index](*part, *send))
        held.forward(self._pool, rows)
        self.slice_s += time.perf_counter() - start
        return tuple(torch.cat(parts)[:rows] for parts in zip(*outs, strict=True))


def _resolve(step: RunStep, last: dict[int, int]) -> list[int]:
    if -1 not in step.tokens:
        return step.tokens
    # Sequences that go on with another one's token.
    beside = {d.sequence: step.draws[d.beside].sequence for d in step.draws if d.beside >= 0}
    owners = [beside.get(r.sequence, r.sequence) for r in step.plan.rows for _ in range(r.count)]
    return [last[s] if t == -1 else t for s, t in zip(owners, step.tokens, strict=True)]


class Held:
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
        """Send the first ``rows`` rows to ``pool``, which takes sends as a MemoryPool does."""
        for kind, parts in self._parts.items():
            getattr(pool, kind)(self._layer, *(torch.cat(p)[:rows] for p in zip(*parts, strict=True)))
