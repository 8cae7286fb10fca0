"""Who is in the next step: continuous batching, chunked prefill, preemption. Pure policy: no torch, no I/O, no
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from lamina.kv.blocks import blocks_of_one
from lamina.workers.stepplan import Free, New, Rows, SequenceOp, StepPlan

from .sequence import Sequence


class Ledger(Protocol):
    """The memory workers' KV blocks as the engine knows them; kv.blocks.BlockTables is one. Counts are by layer
    group.
    """

    windows: tuple[int, ...]
    block_size: int

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Blocks that nobody holds."""
        ...

    def blocks_needed(self, rows: Iterable[Rows]) -> tuple[int, ...]:
        """Blocks that ``rows`` take more than they give back."""
        ...

    def can_apply(self, plan: StepPlan) -> bool:
        """Whether every memory worker can take the plan."""
        ...

    def apply(self, plan: StepPlan) -> object:
        """Book the plan, exactly as the memory workers will."""
        ...


class ScheduledStep:
    """A StepPlan and who its rows belong to: ``parts[i]`` owns ``plan.rows[i]``; ``draws`` sample behind their last
    row. ``scores``: owners of the log-probabilities of prompt tokens that come before the draws; the engine fills it.
    """

    def __init__(self, plan: StepPlan, parts: list[Sequence], draws: list[Sequence]) -> None:
        self.plan = plan
        self.parts = parts
        self.draws = draws
        self.scores: list[Sequence] = []
        self.tokens = [
            s.token_at(p) for s, r in zip(parts, plan.rows, strict=True) for p in range(r.first, r.first + r.count)
        ]


class Scheduler:
    """First come, first served. The newest running sequence is preempted when KV blocks run out: its blocks are freed,
    and it is rebuilt from its tokens when there is room again, so nothing is lost.

    Membership of a step is fixed before the tokens of the step before are known. A sequence that turns out to be
    finished thus runs one row too many, whose token is dropped; its blocks are freed by the next plan.
    """

    def __init__(self, ledger: Ledger, *, max_num_seqs: int, prefill_chunk: int, aligned: bool = False) -> None:
        """``aligned``: cut prompts at multiples of ``prefill_chunk`` only, whatever else is in the step."""
        self._ledger = ledger
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._aligned = aligned
        self._max_rows = max_num_seqs + prefill_chunk
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
                count = self._count(sequence, budget) if prefilling else 1
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
        """Take waiting sequences in while there is room for all of their known tokens; the first that does not fit
        holds up those behind it, so that nobody starves. Blocks freed by this very plan count from the next one on."""
        budget = self._prefill_chunk - sum(c for c in picked.values() if c > 1)
        needed = self._ledger.blocks_needed(self._rows(picked))
        left = [f - n for f, n in zip(self._ledger.free_blocks, needed, strict=True)]
        for sequence, count in picked.items():  # what running prefills will still take
            missing = sequence.num_promised - sequence.num_scheduled - count
            left = [n - -(-missing // self._ledger.block_size) for n in left]
        while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            count = self._count(sequence, budget)
            left = [f - n for f, n in zip(left, self._blocks_of(sequence), strict=True)]
            if (
                not count or min(left) < 0 or sequence.num_drawing
            ):  # a preempted one whose last token is still being drawn waits
                return
            sequence.id, self._next_id = self._next_id, self._next_id + 1
            self._ops.append(New(sequence.id))
            self._running.append(self._waiting.popleft())
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

    def _plan(self, picked: dict[Sequence, int]) -> StepPlan:
        return StepPlan(step=self._next_step, ops=self._ops, rows=self._rows(picked))

    def _commit(self, plan: StepPlan, picked: dict[Sequence, int]) -> ScheduledStep:
        draws = [s for s, count in picked.items() if s.num_scheduled + count == s.num_promised]
        step = ScheduledStep(plan, list(picked), draws)
        for sequence, count in picked.items():
            sequence.num_scheduled += count
            sequence.steps_in_flight += 1
        for sequence in draws:
            sequence.num_drawing += 1
        return step
