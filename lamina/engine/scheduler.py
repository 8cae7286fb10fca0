"""Who is in the next steps: continuous batching, chunked prefill, preemption, n batches. Pure policy: no torch, no I/O,
no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol

from lamina.kv.blocks import blocks_of_one
from lamina.workers.stepplan import Free, New, Rows, SequenceOp, StepPlan

from .sequence import Sequence

Blocks = tuple[int, ...]  # by layer group


class Ledger(Protocol):
    """The memory workers' KV blocks as the engine knows them; kv.blocks.BlockTables is one. Counts are by layer
    group.
    """

    windows: tuple[int, ...]
    block_size: int

    @property
    def free_blocks(self) -> Blocks:
        """Blocks that nobody holds."""
        ...

    def blocks_needed(self, rows: Iterable[Rows]) -> Blocks:
        """Blocks that ``rows`` take more than they give back."""
        ...

    def can_apply(self, plan: StepPlan, held: Several[int] = ()) -> bool:
        """Whether every memory worker can take the plan while ``held`` of the free blocks are left alone."""
        ...

    def apply(self, plan: StepPlan) -> Blocks:
        """Book the plan, exactly as the memory workers will; returns what it gives back."""
        ...


class ScheduledStep:
    """A StepPlan and who its rows belong to: ``parts[i]`` owns ``plan.rows[i]``; ``draws`` sample behind their last
    row. ``scores``: owners of the log-probabilities of prompt tokens that come before the draws; the engine fills it.
    ``gives_back``: blocks that the plan frees.
    """

    def __init__(self, plan: StepPlan, parts: list[Sequence], draws: list[Sequence], gives_back: Blocks) -> None:
        self.plan = plan
        self.parts = parts
        self.draws = draws
        self.scores: list[Sequence] = []
        self.gives_back = gives_back
        self.tokens = [
            s.token_at(p) for s, r in zip(parts, plan.rows, strict=True) for p in range(r.first, r.first + r.count)
        ]


@dataclass
class Batch:
    """Sequences that take their steps together."""

    index: int
    running: list[Sequence] = field(default_factory=list)
    ops: list[SequenceOp] = field(default_factory=list)  # of its next plan
    in_flight: list[ScheduledStep] = field(default_factory=list)
    next_step: int = 0

    @property
    def load(self) -> int:
        """Tokens that its attention reads: what a batch costs the memory workers."""
        return sum(s.num_promised for s in self.running)


class Scheduler:
    """First come, first served. A new sequence joins the batch whose attention reads least. The newest sequence of a
    batch is preempted when KV blocks run out: its blocks are freed, and it is rebuilt from its tokens when there is
    room again, so nothing is lost.

    Membership of a step is fixed before the tokens of the step before are known. A sequence that turns out to be
    finished thus runs one row too many, whose token is dropped; its blocks are freed by the next plan.

    Batches run at their own pace, so the plans of two of them may reach a memory worker in either order. Blocks that a
    plan gives back are therefore not given to another batch before that plan's step is done.
    """

    LOOKAHEAD = 1  # steps of a batch that may be queued behind the running one

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        aligned: bool = False,
        num_batches: int = 1,
    ) -> None:
        """``aligned``: cut prompts at multiples of ``prefill_chunk`` only, whatever else is in the step."""
        self._ledger = ledger
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._aligned = aligned
        self._max_rows = max_num_seqs + prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self.batches = [Batch(i) for i in range(num_batches)]
        self._next_id = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(b.running) for b in self.batches)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.append(sequence)

    def schedule(self) -> list[ScheduledStep]:
        """The next step of every batch that has something to do and is not too far ahead."""
        self._waiting = deque(s for s in self._waiting if not s.finished)
        steps = [self._next(b) for b in self.batches if len(b.in_flight) <= self.LOOKAHEAD]
        return [s for s in steps if s is not None]

    def may_run_ahead(self, step: ScheduledStep) -> bool:
        """Whether the batch of ``step`` can take one more step before one is done."""
        return len(self.batches[step.plan.batch].in_flight) <= self.LOOKAHEAD

    def complete(self, step: ScheduledStep) -> None:
        """The step is done and its tokens have been appended."""
        self.batches[step.plan.batch].in_flight.remove(step)
        for sequence in step.parts:
            sequence.steps_in_flight -= 1

    def _next(self, batch: Batch) -> ScheduledStep | None:
        self._drop_finished(batch)
        picked = self._pick_running(batch)
        self._admit(batch, picked)
        if not picked and not batch.ops:
            return None
        plan = self._plan(batch, picked)
        gives_back = self._ledger.apply(plan)
        batch.ops = []
        batch.next_step += 1
        return self._commit(batch, plan, picked, gives_back)

    def _drop_finished(self, batch: Batch) -> None:
        for sequence in batch.running:
            if sequence.finished:
                batch.ops.append(Free(sequence.id))
        batch.running = [s for s in batch.running if not s.finished]

    def _pick_running(self, batch: Batch) -> dict[Sequence, int]:
        budget = self._prefill_chunk
        picked: dict[Sequence, int] = {}
        for sequence in batch.running:
            if sequence.wants_rows:
                prefilling = sequence.num_promised - sequence.num_scheduled > 1
                count = self._count(sequence, budget) if prefilling else 1
                if prefilling:
                    budget -= count
                if count:
                    picked[sequence] = count
        while picked and not self._ledger.can_apply(self._plan(batch, picked), self._held_for(batch)):
            self._preempt(batch, picked)
        return picked

    def _held_for(self, batch: Batch) -> Blocks:
        """Free blocks that ``batch`` must leave alone: a memory worker may not have them back yet."""
        others = [s.gives_back for b in self.batches if b is not batch for s in b.in_flight]
        return tuple(map(sum, zip(*others, strict=True))) if others else (0,) * len(self._ledger.windows)

    def _preempt(self, batch: Batch, picked: dict[Sequence, int]) -> None:
        victim = batch.running.pop()
        batch.ops.append(Free(victim.id))
        picked.pop(victim, None)
        victim.restart()
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, batch: Batch, picked: dict[Sequence, int]) -> None:
        """Take waiting sequences in while there is room for all of their known tokens; the first that does not fit
        holds up those behind it, so that nobody starves. Blocks freed by this very plan count from the next one on."""
        budget = self._prefill_chunk - sum(c for c in picked.values() if c > 1)
        needed = self._ledger.blocks_needed(self._rows(picked))
        left = [f - n - h for f, n, h in zip(self._ledger.free_blocks, needed, self._held_for(batch), strict=True)]
        for owner in self.batches:  # what running prefills will still take
            for sequence in owner.running:
                missing = sequence.num_promised - sequence.num_scheduled - picked.get(sequence, 0)
                if missing > 0 and (owner is not batch or sequence in picked):
                    left = [n - -(-missing // self._ledger.block_size) for n in left]
        while self._waiting and budget > 0 and self.num_running < self._max_num_seqs:
            sequence = self._waiting[0]
            count = self._count(sequence, budget)
            left = [f - n for f, n in zip(left, self._blocks_of(sequence), strict=True)]
            if (
                not count or min(left) < 0 or sequence.num_drawing or batch.load > min(b.load for b in self.batches)
            ):  # a preempted one whose last token is still being drawn waits
                return
            sequence.id, self._next_id = self._next_id, self._next_id + 1
            batch.ops.append(New(sequence.id))
            batch.running.append(self._waiting.popleft())
            picked[sequence] = count
            budget -= count

    def _count(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens of ``sequence`` in this step, at most ``budget``; 0 = none yet."""
        missing = sequence.num_promised - sequence.num_scheduled
        if not self._aligned:
            return min(missing, budget)
        piece = min(missing, self._prefill_chunk - sequence.num_scheduled % self._prefill_chunk)
        return piece if piece <= budget else 0

    def _blocks_of(self, sequence: Sequence) -> list[int]:
        length, ledger = sequence.num_promised, self._ledger
        return [blocks_of_one(length, w, ledger.block_size, self._max_rows) for w in ledger.windows]

    def _rows(self, picked: dict[Sequence, int]) -> list[Rows]:
        return [Rows(s.id, s.num_scheduled, count) for s, count in picked.items()]

    def _plan(self, batch: Batch, picked: dict[Sequence, int]) -> StepPlan:
        return StepPlan(batch=batch.index, step=batch.next_step, ops=batch.ops, rows=self._rows(picked))

    def _commit(self, batch: Batch, plan: StepPlan, picked: dict[Sequence, int], gives_back: Blocks) -> ScheduledStep:
        draws = [s for s, count in picked.items() if s.num_scheduled + count == s.num_promised]
        step = ScheduledStep(plan, list(picked), draws, gives_back)
        batch.in_flight.append(step)
        for sequence, count in picked.items():
            sequence.num_scheduled += count
            sequence.steps_in_flight += 1
        for sequence in draws:
            sequence.num_drawing += 1
        return step
