"""Who is in the next step: continuous batching, chunked prefill, preemption. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from lamina.workers.stepplan import Free, New, Rows, SequenceOp, StepPlan

from .sequence import Sequence


class Ledger(Protocol):
    """The memory workers' KV blocks as the engine knows them; kv.blocks.BlockManager is one."""

    def can_apply(self, plan: StepPlan) -> bool:
        """Whether every memory worker can take the plan."""
        ...

    def apply(self, plan: StepPlan) -> object:
        """Book the plan, exactly as the memory workers will."""
        ...


class ScheduledStep:
    """A StepPlan and who its rows belong to: ``parts[i]`` owns ``plan.rows[i]``; ``draws`` sample behind their last row."""

    def __init__(self, plan: StepPlan, parts: list[Sequence], draws: list[Sequence]) -> None:
        self.plan = plan
        self.parts = parts
        self.draws = draws
        self.tokens = [
            s.token_at(p) for s, r in zip(parts, plan.rows, strict=True) for p in range(r.first, r.first + r.count)
        ]


class Scheduler:
    """First come, first served. The newest running sequence is preempted when KV blocks run out: its blocks are freed,
    and it is rebuilt from its tokens when there is room again, so nothing is lost.

    Membership of a step is fixed before the tokens of the step before are known. A sequence that turns out to be finished
    thus runs one row too many, whose token is dropped; its blocks are freed by the next plan.
    """

    def __init__(self, ledger: Ledger, *, max_num_seqs: int, prefill_chunk: int) -> None:
        self._ledger = ledger
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._ops: list[SequenceOp] = []  # of the next plan
        self._next_id = 0
        self._next_step = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.append(sequence)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None where nothing can be done before a step in flight is done."""
        self._drop_finished()
        picked = self._pick_running()
        self._admit(picked)
        if not picked and not self._ops:
            return None
        plan = self._plan(picked)
        self._ledger.apply(plan)
        self._ops = []
        self._next_step += 1
        return self._commit(plan, picked)

    def complete(self, step: ScheduledStep) -> None:
        """The step is done and its tokens have been appended."""
        for sequence in step.parts:
            sequence.steps_in_flight -= 1

    def _drop_finished(self) -> None:
        for sequence in self._running:
            if sequence.finished:
                self._ops.append(Free(sequence.id))
        self._running = [s for s in self._running if not s.finished]
        self._waiting = deque(s for s in self._waiting if not s.finished)

    def _pick_running(self) -> dict[Sequence, int]:
        budget = self._prefill_chunk
        picked: dict[Sequence, int] = {}
        for sequence in self._running:
            if sequence.wants_rows:
                prefilling = sequence.num_promised - sequence.num_scheduled > 1
                count = sequence.rows(budget if prefilling else 1)
                if prefilling:
                    budget -= count
                if count:
                    picked[sequence] = count
        while picked and not self._ledger.can_apply(self._plan(picked)):
            self._preempt(picked)
        return picked

    def _preempt(self, picked: dict[Sequence, int]) -> None:
        victim = self._running.pop()
        self._ops.append(Free(victim.id))
        picked.pop(victim, None)
        victim.restart()
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, picked: dict[Sequence, int]) -> None:
        budget = self._prefill_chunk - sum(c for c in picked.values() if c > 1)
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if budget <= 0 or sequence.num_drawing:  # a preempted one whose last token is still being drawn waits
                return
            sequence.id, self._ops = self._next_id, [*self._ops, New(self._next_id)]
            whole = {**picked, sequence: sequence.num_promised}
            if not self._ledger.can_apply(self._plan(whole)):
                self._ops.pop()
                sequence.id = -1
                return
            self._next_id += 1
            self._running.append(self._waiting.popleft())
            picked[sequence] = sequence.rows(budget)
            budget -= picked[sequence]

    def _plan(self, picked: dict[Sequence, int]) -> StepPlan:
        rows = [Rows(s.id, s.num_scheduled, count) for s, count in picked.items()]
        return StepPlan(step=self._next_step, ops=self._ops, rows=rows)

    def _commit(self, plan: StepPlan, picked: dict[Sequence, int]) -> ScheduledStep:
        draws = [s for s, count in picked.items() if s.num_scheduled + count == s.num_promised]
        step = ScheduledStep(plan, list(picked), draws)
        for sequence, count in picked.items():
            sequence.num_scheduled += count
            sequence.steps_in_flight += 1
        for sequence in draws:
            sequence.num_drawing += 1
        return step
