"""The engine's wire to simulated workers: rounds take time, memory workers are up to a round apart, and some die."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from lamina.engine.wire import Done, Report, ViewChanged
from lamina.fleet.arrivals import Arrivals
from lamina.planner.simulator.clock import VirtualClock
from lamina.protocol.control import ComputeReady, RunRound, StepDone
from lamina.protocol.plan import Drop, Export, Fork, Grant, Import, Keep, MoveStripes, New, Rows
from lamina.protocol.tiers import GateOpened, TierFacts, Transferred
from lamina.sampling.history import Histories

from .copies import SimCopies
from .elastic import SimElastic, capacity_of
from .model import EOS, VOCAB, drawn, value
from .passing import Chunk, Passing
from .scenario import MAX_LEN, Fault, Scenario
from .workers import MOST_KEPT, PAGE, TORN, SimMemory, SimPrefill

NOTICED_S = 0.01  # from a death to the driver's knowing it
START_S = 1.0  # of a new worker
Worker = tuple[str, int]


class SimWire:
    """A Wire of simulated workers on a virtual clock, with losses by the scenario."""

    def __init__(self, scenario: Scenario, clock: VirtualClock) -> None:
        layout = scenario.layout
        self.clock, self.layout = clock, layout
        self._rng = random.Random(scenario.seed)
        self.elastic = SimElastic(self._rng, clock)
        self._batches = scenario.options["pipeline"]
        self._replicas = max(1, self._batches - 1)
        self.memory = [SimMemory(w, layout) for w in range(scenario.options["memory_workers"])]
        self._num_prefill = scenario.options["prefill_workers"]
        self._keeps = bool(scenario.options.get("kv_offloading_size"))
        self.view, self._era = 1, b""
        self.ready = self._ready()
        self.losses = 0
        self._faults = deque(scenario.faults)
        self._dead: set[Worker] = set()
        self._noticed = False
        self._again: deque[Worker] = deque()
        self._ids: set[int] = set()  # of all sequences that there have been
        self._numbers: dict[int, int] = {}  # batch -> its last step
        self._begin_view()

    def _begin_view(self) -> None:
        self._prefills = [SimPrefill(self.layout) for _ in range(self._num_prefill)]
        self._histories = [Histories() for _ in range(self._replicas)]
        self._queues: list[deque[list[Passing]]] = [deque() for _ in self.memory]  # of rounds, by memory worker
        self._jobs: dict[int, deque[Passing]] = {}  # batch -> its steps, not executed
        self._last: dict[int, dict[int, int]] = {}  # batch -> sequence -> token
        self._chunks: list[deque[Chunk]] = [deque() for _ in range(self._num_prefill)]
        self._grants: list[dict[tuple[int, int], Grant]] = [{} for _ in self.memory]  # by prefill worker and step
        self._told: list[tuple[Worker, StepDone]] = []  # on their way to the driver
        self._inbox: list[StepDone] = []
        self._moved: deque[Report] = deque()
        self._copies = SimCopies(self.memory, self._rng, self._later, self._lives, self._moved.append)
        self._arrivals = Arrivals()

    def _ready(self) -> ComputeReady:
        layout = self.layout
        return ComputeReady(
            view=self.view, vocab_size=VOCAB, num_layers=3, max_model_len=MAX_LEN, dtype="float32",
            eos_token_ids=[EOS], windows=layout.windows, lanes=layout.lanes, stripe=layout.stripe, stays=layout.stays,
            num_blocks=[[layout.num_blocks] * len(h) for h in layout.holders], holders=layout.holders,
            block_size=layout.block_size, summary={}, tier=self._tier(),
        )  # fmt: skip

    def _tier(self) -> TierFacts | None:
        if not self._keeps:
            return None
        return TierFacts(secret=b"s" * 32, identity=b"", page=PAGE, pages=[list(w.medium) for w in self.memory],
                         rooms=[MOST_KEPT] * len(self.memory), era=self._era)  # fmt: skip

    # Wire:
    def submit(self, new: RunRound) -> None:
        new_ids = [op.sequence for step in new.steps for op in step.plan.ops if isinstance(op, New | Fork)]
        assert not self._ids & set(new_ids), "a sequence of a number that there was"
        self._ids |= set(new_ids)
        assert all(step.plan.view == self.view for step in new.steps), "a plan of another view"
        for step in new.steps:
            assert step.plan.step > self._numbers.get(step.plan.batch, -1), "a step of a number that there was"
            self._numbers[step.plan.batch] = step.plan.step
        self._arrivals.expect(new)
        jobs = [Passing(s, [h.learn(s.plan.ops, s.draws) for h in self._histories]) for s in new.steps]
        for job in jobs:
            self._jobs.setdefault(job.run.plan.batch, deque()).append(job)
        for number, queue in enumerate(self._queues):
            queue.append(jobs)
            if len(queue) == 1:
                self._go_on(number)

    def prefill(self, worker: int, new: RunRound) -> None:
        (run,) = new.steps
        assert run.plan.view == self.view, "a chunk of another view"
        self._chunks[worker].append(Chunk(run, worker))
        self._compute_next(worker)

    def wait(self) -> Done | ViewChanged:
        while True:
            if self._noticed or self.elastic.due:
                return self._halt()
            if self._moved:
                return self._moved.popleft()
            if (done := self._arrivals.take()) is not None:
                return done
            if self._inbox:
                return self._inbox.pop(0)
            self._let_faults_come()
            more = self.clock.advance(self._next_event()) or self._faults or self.elastic.under_way
            assert more, "nothing will ever happen any more"

    def look(self) -> ViewChanged | None:
        self._let_faults_come()
        return self._halt() if self._dead or self.elastic.due else None

    def resume(self, keep: Sequence[Keep]) -> ComputeReady | ViewChanged:
        if not self._dead and not self.elastic.move(self.memory, keep, self._die):
            return self._halt()
        self.clock.now += START_S
        self.view += 1
        for kind, number in self._dead:
            if kind == "memory":
                self.memory[number] = SimMemory(number, self.layout)
        self._dead.clear()
        if self._again:
            met = self._rng.randint(0, len(self.memory))
            for worker in self.memory[:met]:
                worker.reconcile(keep)
            self._die(self._again.popleft())
            return self._halt()
        for worker in self.memory:
            worker.reconcile(keep)
        self._begin_view()
        self.ready = self._ready()
        return self.ready

    def begin_era(self) -> bytes:
        self._era = self._rng.randbytes(16)
        self.ready = self._ready()
        return self._era

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> None: ...

    # Events:
    def _next_event(self) -> float:
        return min(self._faults[0].at_s if self._faults else float("inf"), self.elastic.due_at)

    def _let_faults_come(self) -> None:
        while self._faults and self._faults[0].at_s <= self.clock.now:
            fault: Fault = self._faults.popleft()
            self._again.extend(fault.again)
            self._die(fault.victim)

    def _die(self, victim: Worker) -> None:
        if victim[0] == "memory":  # of those that there are now
            victim = "memory", victim[1] % len(self.memory)
        self._dead.add(victim)
        self.losses += 1
        view = self.view

        def notice() -> None:
            self._noticed = self._noticed or (view == self.view and bool(self._dead))

        self.clock.later(NOTICED_S, notice)

    def _halt(self) -> ViewChanged:
        """All that live come to rest, and say what they have."""
        self._noticed = False
        silent = set[Worker]()
        for who, done in self._told:
            if who in self._dead and self._rng.random() >= 0.5:  # it may have been said before its end, in its order
                silent.add(who)
            if who not in silent:
                self._hear(done)
        self._told.clear()
        steps = []
        while (done_step := self._arrivals.take()) is not None:
            steps.append(done_step)
        steps += self._inbox
        self._tear()
        reports = [{} if ("memory", w.number) in self._dead else w.written.report() for w in self.memory]
        capacity = None
        if self.elastic.due and not self._dead:
            self.layout, before = self.elastic.commit(self.memory), self.memory
            self.memory = [SimMemory(w, self.layout) for w in range(1 + max(max(h) for h in self.layout.holders))]
            if len({x for worker in (*before, *self.memory) for x in worker.weights}) == 1:  # all have all heads
                for worker in self.memory:  # as if they shared a directory
                    worker.medium = {key: blocks for other in before for key, blocks in other.medium.items()}
            capacity = capacity_of(self.layout)
        self.view += 1  # what was to happen in the one before will not
        self._begin_view()
        return ViewChanged(steps, reports, capacity, self.elastic.stays)

    def _tear(self) -> None:
        """Steps that were executed are written to their end; of others a memory worker may have some layers."""
        for number, queue in enumerate(self._queues):
            worker = self.memory[number]
            for jobs in queue:
                if not all(number in job.begun for job in jobs):
                    break
                for job in jobs:
                    if job.executed:
                        worker.written.done(job.run.plan.rows)
                    elif self._rng.random() < 0.5:
                        for row in job.run.plan.rows:
                            for position in range(row.first, row.first + row.count):
                                worker.write(row.sequence, row.place, position, TORN)

    def _later(self, work: object, *args: object) -> None:
        view = self.view

        def run() -> None:
            if self.view == view:
                work(*args)  # type: ignore[operator]

        self.clock.later(self._rng.uniform(0.0005, 0.005), run)

    def _lives(self, kind: str, number: int) -> bool:
        return (kind, number) not in self._dead

    def _go_on(self, number: int) -> None:
        """Memory worker ``number`` takes its next round."""
        if self._queues[number]:
            self._later(self._begin, number, self._queues[number][0])

    def _begin(self, number: int, jobs: list[Passing]) -> None:
        if not self._lives("memory", number):
            return
        worker = self.memory[number]
        for job in jobs:
            assert job.run.plan.view == self.view
            for op in job.run.plan.ops:
                if isinstance(op, Grant):
                    self._grants[number][op.worker, op.step] = op
            worker.begin(job.run.plan)
            for op in job.run.plan.ops:
                if isinstance(op, Export | Import):
                    assert op.id > worker.last_transfer, "transfers are numbered in the order of the plans"
                    worker.last_transfer = op.id
                    self._later(self._transfer, number, op)
                elif isinstance(op, Drop):
                    worker.drop(op)
                elif isinstance(op, MoveStripes):
                    self._copies.begin(number, op)
            job.begun.add(number)
            if not job.run.plan.rows:
                job.written.add(number)
        for job in jobs:
            self._try_execute(job.run.plan.batch)
        self._deliver(number)
        self._if_round_is_over(number, jobs)

    def _try_execute(self, batch: int) -> None:
        """The oldest step of a batch, once all memory workers and its replicas are there."""
        queue = self._jobs.get(batch)
        if not queue or len(queue[0].begun) < len(self.memory) or any(kind == "compute" for kind, _ in self._dead):
            return
        job = queue.popleft()
        job.executed = True
        self._execute(job)
        for number in range(len(self.memory)):
            if number not in job.written:
                self._later(self._write, number, job)
        self._try_execute(batch)

    def _execute(self, job: Passing) -> None:
        run, plan, at = job.run, job.run.plan, 0
        last, ids, seen = self._last.get(plan.batch, {}), list[int](), list[int]()
        for row in plan.rows:
            tokens = [last[row.sequence] if t == -1 else t for t in run.tokens[at : at + row.count]]
            at += row.count
            ids += tokens
            seen += self._attend(row, tokens)
        due = job.due[plan.replica_of(3)]
        choices = [drawn(d, seen[d.row], due, ids[d.row] if d.pending else None) for d in run.draws]
        if plan.rows:
            drawn_now = zip(run.draws, choices, strict=True)
            self._last[plan.batch] = {d.sequence: x.token for d, x in drawn_now if d.known < 0}
        self._tell(
            ("compute", plan.replica_of(3)), StepDone(view=plan.view, batch=plan.batch, step=plan.step, drawn=choices)
        )

    def _attend(self, row: Rows, tokens: list[int]) -> list[int]:
        """What each row sees, itself included."""
        totals = []
        for position, token in enumerate(tokens, row.first):
            before = self._total(row, position, range(position))
            stored = value(token, position, before)
            for worker in self.memory:
                worker.write(row.sequence, row.place, position, stored)
            totals.append(before + self._total(row, position, range(position, position + 1)))
        return totals

    def _total(self, row: Rows, position: int, span: range) -> int:
        return sum([worker.total(row.sequence, row.place, position, span) for worker in self.memory])

    def _write(self, number: int, job: Passing) -> None:
        if self._lives("memory", number):
            self.memory[number].written.done(job.run.plan.rows)
            job.written.add(number)
            self._if_round_is_over(number, self._queues[number][0])

    def _if_round_is_over(self, number: int, jobs: list[Passing]) -> None:
        if self._queues[number] and self._queues[number][0] is jobs and all(number in j.written for j in jobs):
            self._queues[number].popleft()
            self._go_on(number)

    def _transfer(self, number: int, op: Export | Import) -> None:
        if self._lives("memory", number):
            self._later(self._report, op, self.memory[number].transfer(op, self._rng))

    def _report(self, op: Export | Import, said: Transferred) -> None:
        """Of a load whose rows may come early the end is told later, perhaps that it has failed."""
        if isinstance(op, Import) and op.spare_s and not any(self.layout.windows):
            self._moved.append(GateOpened(view=0, id=op.id))
            self._later(self._moved.append, said)
        else:
            self._moved.append(said)

    def _tell(self, who: Worker, done: StepDone) -> None:
        self._told.append((who, done))
        self._later(self._arrive, who)

    def _arrive(self, who: Worker) -> None:
        """A link keeps the order."""
        if self._lives(*who):
            first = next(x for x in self._told if x[0] == who)
            self._told.remove(first)
            self._hear(first[1])

    def _hear(self, done: StepDone) -> None:
        if done.batch >= self._batches:
            self._inbox.append(done)
        else:
            self._arrivals.add(done)

    # Prefill workers:
    def _compute_next(self, worker: int) -> None:
        chunk = next((c for c in self._chunks[worker] if not c.values), None)
        if chunk is not None:
            self._later(self._compute, worker, chunk)

    def _compute(self, worker: int, chunk: Chunk) -> None:
        if not self._lives("prefill", worker) or chunk.values:
            return
        (row,), at = chunk.run.plan.rows, self._prefills[worker]
        at.begin(chunk.run.plan)
        seen = []
        for i, token in enumerate(chunk.run.tokens):
            values, total = at.add(Rows(row.sequence, row.first + i, 1, row.place), [token])
            chunk.values += values
            seen.append(total)
        due = Histories().learn(chunk.run.plan.ops, chunk.run.draws)
        chunk.drawn = [drawn(d, seen[d.row], due, None) for d in chunk.run.draws]
        for number in range(len(self.memory)):
            self._deliver(number)
        self._compute_next(worker)

    def _deliver(self, number: int) -> None:
        """What prefill workers have computed and memory worker ``number`` was told of, in its order."""
        for worker, chunks in enumerate(self._chunks):
            chunk = next((c for c in chunks if number not in c.stored), None)
            if chunk is None or not chunk.values or (worker, chunk.run.plan.step) not in self._grants[number]:
                continue
            if number not in chunk.granted:
                chunk.granted.add(number)
                self._later(self._store, number, chunk)

    def _store(self, number: int, chunk: Chunk) -> None:
        if not self._lives("memory", number):
            return
        grant, memory = self._grants[number][chunk.worker, chunk.run.plan.step], self.memory[number]
        for position, stored in enumerate(chunk.values, grant.first):
            memory.write(grant.sequence, grant.place, position, stored)
        memory.written.done([grant.rows])
        chunk.stored.add(number)
        self._deliver(number)
        while self._chunks[chunk.worker] and len(self._chunks[chunk.worker][0].stored) == len(self.memory):
            over = self._chunks[chunk.worker].popleft()
            plan = over.run.plan
            self._tell(
                ("prefill", chunk.worker), StepDone(view=plan.view, batch=plan.batch, step=plan.step, drawn=over.drawn)
            )
