"""Which prompt each prefill worker computes next, chunk by chunk. Pure policy: no torch, no I/O; the clock comes in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from lamina.protocol.plan import GRANTS_AHEAD, Free, Grant, New, SequenceOp, StepPlan

from .blocks.prompt_store import PromptStore
from .conductor.choice import NOBODY
from .promises import Promises
from .rounds.steps import ScheduledStep
from .sequence import Sequence

NOTHING = -1


@dataclass
class _Lent:
    """So many tokens that another worker's store sends; it was asked for them then."""

    lender: PromptStore
    tokens: int
    asked_s: float = math.inf


@dataclass
class _PrefillLoad:
    index: int
    prompts: deque[Sequence] = field(default_factory=deque)  # that have tokens left to schedule, in their order
    store: PromptStore | None = None  # None: it has the prompt that it computes, and no other
    held: int = NOTHING  # the sequence that is in such a store
    next_step: int = 0
    in_flight: list[Sequence] = field(default_factory=list)  # of each chunk, its sequence
    computing: Sequence | None = None  # of the chunks that are computed now
    since_s: float = 0.0  # it is
    follows: bool = False  # it came behind another one, which kept all stages at work


class Prefill:
    """Deals prompts to prefill workers: the Conductor has said at the arrival of a prompt which one computes it
    (engine.promises). Each worker has one prompt after the other, first come, first served, and of each computes what
    neither the memory workers have nor its own store.

    A chunk is a step of a batch that is the worker's own. The memory workers are told of it by a Grant, in the plan of
    the batch in which the sequence will decode; so blocks for a chunk are held from then on. GRANTS_AHEAD chunks of
    a worker at most are computed or stored at a time: where attention has a window, the blocks of a chunk may be given
    back only once the next but one is granted, and then it has been stored.

    A worker may be a group of them, each with some of the layers (--prefill-pipeline): all have the same chunks, which
    go from one to the next, and more of them at a time (protocol.stages).
    """

    PROMPTS = 2  # of a worker: the one under way, and one more, so that the worker never waits

    def __init__(
        self,
        num_workers: int,
        chunk: int,
        first_batch: int,
        promises: Promises | None = None,
        stores: Several[PromptStore] = (),
        ahead: int = GRANTS_AHEAD,
    ) -> None:
        """``first_batch``: the number of the first worker's batch; those of the others follow. ``stores``: what they
        keep of prompts; none of them: nothing. ``ahead``: chunks of a worker in flight.
        """
        self._workers = [_PrefillLoad(i, store=stores[i] if stores else None) for i in range(num_workers)]
        self._lenders = dict[Sequence, _Lent]()  # of how a prompt begins
        self._chunk = chunk
        self._first_batch, self._ahead = first_batch, ahead
        self.promises = promises or Promises(num_workers)

    def wants(self, sequence: Sequence, known: int = 0) -> bool:
        """Whether a new sequence, of which so many tokens have KV on the memory workers, is for prefill workers. Where
        the rest of it is one chunk at most, which leaves others their time, it is computed where they decode: nobody
        need compute or move what is there.
        """
        rest = sequence.num_promised - known
        here = rest <= 1 or (known > 0 and rest <= self._chunk and self.promises.leaves_time(rest))
        return bool(self._workers) and not here

    def expect(self, sequence: Sequence) -> None:
        """A sequence waits: it has a worker from now on, where somebody wants to know."""
        if self.promises.watches and (not self._workers or self.wants(sequence, self.promises.pooled(sequence))):
            self.promises.expect(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """A new sequence has its prompt computed where it decodes."""
        if self._workers:
            self.promises.decodes(sequence)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for its worker alone, and others need not wait behind it."""
        return self.has_room and self.promises.is_booked(sequence) and not self.has_room_for(sequence)

    @property
    def has_room(self) -> bool:
        """Whether some worker can take a prompt."""
        return any(len(w.prompts) < self.PROMPTS for w in self._workers)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether the worker of a sequence can take its prompt."""
        return len(self._workers[self.promises.expect(sequence)].prompts) < self.PROMPTS

    def match(self, sequence: Sequence, most: int) -> int:
        """Of a sequence that is to be computed, the first tokens that its worker has already or is to have from
        another one, ``most`` at most.
        """
        store = self._workers[self.promises.expect(sequence)].store
        own = store.match(sequence, most) if store else 0
        lender = self._lender(sequence, most)
        return max(own, lender.sendable(sequence, most)) if lender else own

    def _lender(self, sequence: Sequence, most: int) -> PromptStore | None:
        """Who has the most of a sequence, where the Conductor has said that its worker has it from another one: the
        one that it has named, unless that has given up some since.
        """
        source = self.promises.source(sequence)
        if source == NOBODY:
            return None
        order = sorted(self._workers, key=lambda w: w.index != source)
        stores = [w.store for w in order if w.store is not None and w.index != self.promises.expect(sequence)]
        return max(stores, key=lambda store: store.sendable(sequence, most), default=None)

    def follows(self, sequence: Sequence, known: int) -> bool:
        """Whether more of it will soon be there than its ``known`` first tokens, which the memory workers have: by a
        prompt that its worker computes, or will before.
        """
        worker = self._workers[self.promises.expect(sequence)]
        before = [*worker.in_flight, *worker.prompts]
        return worker.store is not None and worker.store.will_match(sequence, known, before)

    def add(self, sequence: Sequence) -> None:
        """Give a new sequence, which has its id, to its worker. Of what has KV on the memory workers, the worker has
        all.
        """
        sequence.prefill_worker = self.promises.expect(sequence)
        worker = self._workers[sequence.prefill_worker]
        worker.prompts.append(sequence)
        if worker.store:
            begun = sequence.num_scheduled
            moved = begun - worker.store.match(sequence, begun)
            lender = self._lender(sequence, begun) if moved else None
            worker.store.promise(sequence, begun, lender)
            if lender is not None:
                self._lenders[sequence] = _Lent(lender, moved)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has no chunk in flight."""
        self.promises.drop(sequence)
        self._return(sequence)
        if sequence.prefill_worker is not None:
            worker = self._workers[sequence.prefill_worker]
            if sequence in worker.prompts:
                worker.prompts.remove(sequence)
            if worker.store:
                worker.store.drop(sequence)
            if worker.computing is sequence:
                self._go_on(worker)
            sequence.prefill_worker = None

    def roll_back(self, ended: Iterable[Sequence] = ()) -> None:
        """Take all prompts from the workers, in flight or to come; nobody expects those of ``ended`` any more. Numbers
        of steps never go back.
        """
        self._lenders.clear()
        for worker in self._workers:
            worker.prompts.clear()
            worker.in_flight.clear()
            worker.held, worker.computing = NOTHING, None
            if worker.store:
                worker.store.clear()
        for sequence in ended:
            self.promises.drop(sequence)
        self.promises.forget()

    def renew(self, stores: Several[PromptStore]) -> None:
        """Behind ``roll_back``: workers have these stores from now on, which are empty; none of them: nothing."""
        for worker in self._workers:
            worker.store = stores[worker.index] if stores else None

    def next_grant(self, sequence: Sequence) -> Grant | None:
        """For the next chunk of ``sequence``, if it is its turn."""
        if sequence.prefill_worker is None:
            return None
        worker = self._workers[sequence.prefill_worker]
        if len(worker.in_flight) >= self._ahead or not worker.prompts or worker.prompts[0] is not sequence:
            return None
        count = min(self._chunk, sequence.num_promised - sequence.num_scheduled)
        return Grant(sequence.id, sequence.num_scheduled, count, worker.index, worker.next_step, sequence.place)

    def begin(self, sequence: Sequence, grant: Grant, view: int = 0) -> ScheduledStep:
        """The worker's step for a grant that was given, under ``view``."""
        worker = self._workers[grant.worker]
        batch, ops = self._first_batch + worker.index, self._ops(worker, sequence)
        plan = StepPlan(view=view, batch=batch, step=grant.step, ops=ops, rows=[grant.rows])
        if worker.store:
            worker.store.apply(plan)
        if (lent := self._lenders.get(sequence)) is not None and lent.asked_s == math.inf:  # with its first chunk
            lent.asked_s = self.promises.now()
        draws = [sequence] if grant.first + grant.count == sequence.num_promised else []
        step = ScheduledStep(plan, [sequence], draws, worker.index)
        worker.next_step += 1
        worker.in_flight.append(sequence)
        if worker.computing is None:
            self._go_on(worker)
        sequence.num_scheduled += grant.count
        sequence.num_prefilling += 1
        if draws:
            sequence.num_drawing += 1
            worker.prompts.popleft()
        return step

    def _ops(self, worker: _PrefillLoad, sequence: Sequence) -> list[SequenceOp]:
        """Of the worker's next plan, for a chunk of a sequence."""
        if worker.store:
            return worker.store.begin(sequence)
        before, worker.held = worker.held, sequence.id
        if before == sequence.id:
            return []
        return [*([] if before == NOTHING else [Free(before)]), New(sequence.id)]

    def forget_prompts(self) -> None:
        """Forget the KV of earlier prompts on prefill workers: no later prompt begins with it."""
        for worker in self._workers:
            if worker.store:
                worker.store.forget()

    def complete(self, step: ScheduledStep, worker: int) -> None:
        """The memory workers have the K and V of ``step``, which ``worker`` has computed."""
        load = self._workers[worker]
        load.in_flight.pop(0)  # in their order
        (sequence,) = step.parts
        if lent := self._return(sequence):
            self.promises.fetched(sequence, lent.tokens, step.fetch_s, max(0.0, load.since_s - lent.asked_s))
        sequence.num_prefilling -= 1
        if step.draws:
            part = 1.0 if load.follows else self.promises.own_part(sequence)
            self.promises.computed(sequence, load.since_s, part)
            if load.store:
                load.store.computed(sequence)
            self._go_on(load, follows=True)
            sequence.prefill_worker = None

    def _return(self, sequence: Sequence) -> _Lent | None:
        """Its worker needs nothing of another one any more; what was to come from there."""
        lent = self._lenders.pop(sequence, None)
        if lent is not None:
            lent.lender.returned(sequence)
        return lent

    def _go_on(self, worker: _PrefillLoad, *, follows: bool = False) -> None:
        """The worker goes on to the prompt of the next chunk in flight, if there is one."""
        worker.computing, worker.follows = worker.in_flight[0] if worker.in_flight else None, follows
        if worker.computing is not None:
            worker.since_s = self.promises.begun(worker.computing)
