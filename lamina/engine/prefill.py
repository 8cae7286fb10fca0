"""Which prompt each prefill worker computes next, chunk by chunk. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lamina.protocol.plan import (
    GRANTS_AHEAD,
    Free,
    Grant,
    New,
    SequenceOp,
    StepPlan,
)

from .sequence import Sequence
from .steps import ScheduledStep

NOBODY = -1


@dataclass
class _PrefillLoad:
    index: int
    prompts: deque[Sequence] = field(default_factory=deque)  # that have tokens left to schedule, in their order
    held: int = NOBODY  # the sequence in its store
    next_step: int = 0
    in_flight: list[int] = field(default_factory=list)  # tokens of each chunk

    @property
    def tokens_left(self) -> int:
        return sum(self.in_flight) + sum(s.num_promised - s.num_scheduled for s in self.prompts)


class Prefill:
    """Deals prompts to prefill workers. First come, first served; each worker has one prompt after the other.

    A chunk is a step of a batch that is the worker's own. The memory workers are told of it by a Grant, in the plan of
    the batch in which the sequence will decode; so blocks for a chunk are held from then on. GRANTS_AHEAD chunks of
    a worker at most are computed or stored at a time: where attention has a window, the blocks of a chunk may be given
    back only once the next but one is granted, and then it has been stored.
    """

    PROMPTS = 2  # of a worker: the one that it computes, and one so that it need not wait

    def __init__(self, num_workers: int, chunk: int, first_batch: int) -> None:
        """``first_batch``: the number of the first worker's batch; those of the others follow."""
        self._workers = [_PrefillLoad(i) for i in range(num_workers)]
        self._chunk = chunk
        self._first_batch = first_batch

    def wants(self, sequence: Sequence) -> bool:
        """Whether a new sequence is for prefill workers. A single token is as cheap where the others decode."""
        return bool(self._workers) and sequence.num_promised > 1

    @property
    def has_room(self) -> bool:
        """Whether some worker can take a prompt."""
        return any(len(w.prompts) < self.PROMPTS for w in self._workers)

    def add(self, sequence: Sequence) -> None:
        """Give a new sequence to the worker that has the fewest tokens ahead of it."""
        worker = min(self._workers, key=lambda w: (len(w.prompts) >= self.PROMPTS, w.tokens_left))
        worker.prompts.append(sequence)
        sequence.prefill_worker = worker.index

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has no chunk in flight."""
        if sequence.prefill_worker is not None:
            prompts = self._workers[sequence.prefill_worker].prompts
            if sequence in prompts:
                prompts.remove(sequence)
            sequence.prefill_worker = None

    def roll_back(self) -> None:
        """Nobody has a prompt any more, in flight or to come. Numbers of steps never go back."""
        for worker in self._workers:
            worker.prompts.clear()
            worker.in_flight.clear()
            worker.held = NOBODY

    def next_grant(self, sequence: Sequence) -> Grant | None:
        """For the next chunk of ``sequence``, if it is its turn."""
        if sequence.prefill_worker is None:
            return None
        worker = self._workers[sequence.prefill_worker]
        if len(worker.in_flight) >= GRANTS_AHEAD or not worker.prompts or worker.prompts[0] is not sequence:
            return None
        count = min(self._chunk, sequence.num_promised - sequence.num_scheduled)
        return Grant(sequence.id, sequence.num_scheduled, count, worker.index, worker.next_step, sequence.place)

    def begin(self, sequence: Sequence, grant: Grant, view: int = 0) -> ScheduledStep:
        """The worker's step for a grant that was given, under ``view``."""
        worker = self._workers[grant.worker]
        ops: list[SequenceOp] = []
        if worker.held != sequence.id:
            ops = [Free(worker.held)] if worker.held != NOBODY else []
            ops.append(New(sequence.id))
            worker.held = sequence.id
        plan = StepPlan(
            view=view,
            batch=self._first_batch + worker.index,
            step=grant.step,
            ops=ops,
            rows=[grant.rows],
        )
        draws = [sequence] if grant.first + grant.count == sequence.num_promised else []
        step = ScheduledStep(plan, [sequence], draws, worker.index)
        worker.next_step += 1
        worker.in_flight.append(grant.count)
        sequence.num_scheduled += grant.count
        sequence.num_prefilling += 1
        if draws:
            sequence.num_drawing += 1
            worker.prompts.popleft()
        return step

    def complete(self, step: ScheduledStep, worker: int) -> None:
        """The memory workers have the K and V of ``step``, which ``worker`` has computed."""
        self._workers[worker].in_flight.pop(0)  # in their order
        (sequence,) = step.parts
        sequence.num_prefilling -= 1
        if step.draws:
            sequence.prefill_worker = None
