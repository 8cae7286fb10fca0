"""Which prompt each prefill worker computes next, chunk by chunk. Pure policy: no torch, no I/O; the clock comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lamina.protocol.plan import (
    GRANTS_AHEAD,
    Free,
    Grant,
    New,
    SequenceOp,
    StepPlan,
)

from .conductor import Conductor, ConductorRules, KnownPrompt
from .conductor.choice import NOBODY
from .conductor.directory import Directory
from .conductor.estimate import PrefillFit, PrefillTime
from .conductor.overload import DecodePool, TokenTime
from .rounds.steps import ScheduledStep
from .sequence import Sequence

FIRST_LAW = PrefillTime(0.0, 1e-4, 0.0)  # of prompts, until some were computed


@dataclass
class _PrefillLoad:
    index: int
    prompts: deque[Sequence] = field(default_factory=deque)  # that have tokens left to schedule, in their order
    held: int = NOBODY  # the sequence in its store
    next_step: int = 0
    in_flight: list[int] = field(default_factory=list)  # of each chunk, its sequence
    computing: int = NOBODY  # the sequence of the chunks that are computed now
    since_s: float = 0.0  # it is


class Prefill:
    """Deals prompts to prefill workers: the Conductor says which one computes a prompt, by what prompts have taken so
    far. Each worker has one prompt after the other, first come, first served.

    A chunk is a step of a batch that is the worker's own. The memory workers are told of it by a Grant, in the plan of
    the batch in which the sequence will decode; so blocks for a chunk are held from then on. GRANTS_AHEAD chunks of
    a worker at most are computed or stored at a time: where attention has a window, the blocks of a chunk may be given
    back only once the next but one is granted, and then it has been stored.
    """

    PROMPTS = 2  # of a worker: the one that it computes, and one so that it need not wait

    def __init__(
        self, num_workers: int, chunk: int, first_batch: int, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        """``first_batch``: the number of the first worker's batch; those of the others follow. ``clock``: seconds; by
        one that stands still, a prompt costs as many seconds as it has tokens.
        """
        self._workers = [_PrefillLoad(i) for i in range(num_workers)]
        self._chunk = chunk
        self._first_batch = first_batch
        self._clock = clock
        self.conductor = _conductor(num_workers)

    def wants(self, sequence: Sequence) -> bool:
        """Whether a new sequence is for prefill workers. A single token is as cheap where the others decode."""
        return bool(self._workers) and sequence.num_promised > 1

    @property
    def has_room(self) -> bool:
        """Whether some worker can take a prompt."""
        return any(len(w.prompts) < self.PROMPTS for w in self._workers)

    def add(self, sequence: Sequence) -> None:
        """Give a new sequence, which has its id, to the worker that has room and will have computed it first."""
        able = [w.index for w in self._workers if len(w.prompts) < self.PROMPTS]
        prompt, now = KnownPrompt(sequence.num_promised), self._clock()
        choice = self.conductor.choose(prompt, now, able or None)
        self.conductor.book(sequence.id, prompt, choice, now)
        self._workers[choice.worker].prompts.append(sequence)
        sequence.prefill_worker = choice.worker

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has no chunk in flight."""
        if sequence.prefill_worker is not None:
            worker = self._workers[sequence.prefill_worker]
            if sequence in worker.prompts:
                worker.prompts.remove(sequence)
            self.conductor.cancelled(sequence.id, self._clock())
            if worker.computing == sequence.id:
                self._go_on(worker)
            sequence.prefill_worker = None

    def roll_back(self) -> None:
        """Take all prompts from the workers, in flight or to come. Numbers of steps never go back."""
        for worker in self._workers:
            worker.prompts.clear()
            worker.in_flight.clear()
            worker.held = worker.computing = NOBODY
        self.conductor.forget()

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
        worker.in_flight.append(sequence.id)
        if worker.computing == NOBODY:
            self._go_on(worker)
        sequence.num_scheduled += grant.count
        sequence.num_prefilling += 1
        if draws:
            sequence.num_drawing += 1
            worker.prompts.popleft()
        return step

    def complete(self, step: ScheduledStep, worker: int) -> None:
        """The memory workers have the K and V of ``step``, which ``worker`` has computed."""
        load, now = self._workers[worker], self._clock()
        load.in_flight.pop(0)  # in their order
        (sequence,) = step.parts
        sequence.num_prefilling -= 1
        if step.draws:
            self.conductor.computed(sequence.id, now, now - load.since_s, 0)
            self._go_on(load)
            sequence.prefill_worker = None

    def _go_on(self, worker: _PrefillLoad) -> None:
        """The worker goes on to the prompt of the next chunk in flight, if there is one."""
        worker.computing, worker.since_s = worker.in_flight[0] if worker.in_flight else NOBODY, self._clock()
        if worker.computing != NOBODY:
            self.conductor.begun(worker.computing, worker.since_s)


def _conductor(num_workers: int) -> Conductor:
    """Of workers whose stores have nothing for another prompt: only queues differ."""
    return Conductor(
        rules=ConductorRules(policy="auto"),
        directory=Directory(num_workers, 0),
        fit=PrefillFit(FIRST_LAW, trusted=False),
        tokens_per_s=1.0,
        decoding=DecodePool(1, TokenTime(0.0, 0.0, 0.0), 1.0),
        num_workers=num_workers,
    )
