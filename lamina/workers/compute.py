"""The compute worker: runs the slices of a model, sends Q, K, V as they appear, takes O back, samples.

It holds weights and no request state: all that it keeps from one step to the next are the tokens just drawn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.engine.sampler import sample
from lamina.observe.trace import OFF, Event, Recorder

from .control import Drawn, RunStep, StepDone
from .links import MemoryPool

FIXED_ROWS = 32


class Program(Protocol):
    """The part of converter.SlicedProgram that a compute worker runs."""

    @property
    def slices(self) -> Sequence[Any]:
        """L + 1 callables; see converter.slices.Slice."""
        ...


@dataclass
class Pass:
    """A step on its way: the tensors that the next slice takes from the one before."""

    step: RunStep
    num_rows: int
    carry: tuple[Tensor, ...] = ()
    layer: int = 0  # whose O is awaited


@dataclass
class Batch:
    """Where one of the batches that take turns is."""

    queued: deque[RunStep] = field(default_factory=deque)
    current: Pass | None = None
    last: dict[int, int] = field(default_factory=dict)  # sequence -> token drawn by the step before


class ComputeWorker:
    """One replica. Batches take turns; a turn is what one of them does between two attentions: a slice, or the last
    slice, sampling and the first slice of its next step.
    """

    def __init__(
        self,
        program: Program,
        pool: MemoryPool,
        *,
        dtype: torch.dtype,
        deterministic: bool = False,
        trace: Recorder = OFF,
    ) -> None:
        self._slices = program.slices
        self._pool = pool
        self._trace = trace
        self._dtype = dtype
        self._call = self._call_fixed if deterministic else self._call_plain
        self._batches: dict[int, Batch] = {}
        self._order: deque[Batch] = deque()  # those with something to do, the one that waited longest first
        self.slice_s = 0.0
        self.sample_s = 0.0
        self.steps = 0
        self.rows = 0

    @property
    def has_work(self) -> bool:
        """Whether some batch can take a turn."""
        return bool(self._order)

    def submit(self, step: RunStep) -> None:
        """Queue ``step`` behind those of its batch."""
        batch = self._batches.setdefault(step.plan.batch, Batch())
        if batch.current is None and not batch.queued:
            self._order.append(batch)
        batch.queued.append(step)

    @torch.inference_mode()
    def turn(self) -> StepDone | None:
        """One turn of the batch that waited longest; returns its step if that is done now.

        The memory workers serve in the order of the sends, so its O is the next to come.
        """
        batch, done = self._order.popleft(), None
        current = batch.current
        if current is not None and current.num_rows and current.layer < len(self._slices) - 2:
            self._advance(current)
        else:
            done = self._finish(batch, current) if current is not None else None
            batch.current = self._begin(batch, batch.queued.popleft()) if batch.queued else None
        if batch.current is not None:
            self._order.append(batch)
        return done

    def stats(self) -> dict[str, float]:
        """Seconds by activity (``slice_s`` excludes sending), and counts."""
        return {
            "slice_s": self.slice_s - self._pool.send_s,
            "send_s": self._pool.send_s,
            "wait_s": self._pool.wait_s,
            "sample_s": self.sample_s,
            "steps": float(self.steps),
            "rows": float(self.rows),
        }

    def _advance(self, current: Pass) -> None:
        self._pool.select(current.step.plan)
        o, start = self._receive(current), self._trace.now()
        current.layer += 1
        current.carry = self._call(current.layer, (*current.carry, o))
        self._trace.add(Event.SLICE, start, current.step.plan, current.layer, value=current.num_rows)

    def _begin(self, batch: Batch, step: RunStep) -> Pass:
        self._pool.begin(step.plan)
        self.steps += 1
        self.rows += len(step.tokens)
        current = Pass(step, len(step.tokens))
        if current.num_rows:
            ids = torch.tensor([[t] for t in _resolve(step, batch.last)])
            positions = torch.tensor([[p] for r in step.plan.rows for p in range(r.first, r.first + r.count)])
            start = self._trace.now()
            current.carry = self._call(0, (ids, positions))
            self._trace.add(Event.SLICE, start, step.plan, 0, value=current.num_rows)
        return current

    def _finish(self, batch: Batch, ending: Pass) -> StepDone:
        step, drawn = ending.step, list[Drawn]()
        if ending.num_rows:
            self._pool.select(step.plan)
            o = self._receive(ending)
            if step.draws:
                begun = self._trace.now()
                wanted = torch.tensor([d.row for d in step.draws])
                (logits,) = self._call(len(self._slices) - 1, tuple(x[wanted] for x in (*ending.carry, o)))
                self._trace.add(Event.SLICE, begun, step.plan, len(self._slices) - 1, value=len(step.draws))
                start = time.perf_counter()
                drawn = sample(logits[:, -1], step.draws, batch.last)
                self.sample_s += time.perf_counter() - start
                self._trace.add(Event.SAMPLE, start, step.plan)
        batch.last = {d.sequence: d.token for d in drawn}
        return StepDone(batch=step.plan.batch, step=step.plan.step, drawn=drawn)

    def _receive(self, current: Pass) -> Tensor:
        return self._pool.o(current.layer, current.num_rows, self._dtype)

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
        held = _Held()
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
    owners = [r.sequence for r in step.plan.rows for _ in range(r.count)]
    return [last[s] if t == -1 else t for s, t in zip(owners, step.tokens, strict=True)]


class _Held:
    """Takes the sends of several calls of one slice and forwards them as one message each."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, ...]]] = {}
        self._layer = -1

    def q(self, layer: int, q: Tensor) -> None:
        self._layer = layer
        self._parts.setdefault("q", []).append((q,))

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._parts.setdefault("kv", []).append((k, v))

    def forward(self, pool: MemoryPool, rows: int) -> None:
        for kind, parts in self._parts.items():
            getattr(pool, kind)(self._layer, *(torch.cat(p)[:rows] for p in zip(*parts, strict=True)))
