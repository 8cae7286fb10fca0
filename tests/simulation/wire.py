"""The engine's wire to simulated workers: rounds take time, memory workers are up to a round apart, and some die."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

from lamina.executor.step_reorder_buffer import StepReorderBuffer
from lamina.ops.sampling.token_history import TokenHistories
from lamina.protocol.control import ComputeReady, RunRound, SampledToken, StepDone
from lamina.protocol.executor import Done, EpochChanged, Report
from lamina.protocol.offload_messages import LoadReady, OffloadFacts, TransferDone
from lamina.protocol.step_plan import (
    BlockScoresReport,
    CopyStripes,
    DeletePages,
    Fork,
    LoadKv,
    New,
    PrefillGrant,
    RowRange,
    SaveKv,
    ScoreBlocks,
    SurvivingKv,
)
from lamina.tools.plan.simulator.clock import VirtualClock

from .copies import SimCopies
from .elastic import SimElastic, capacity_of
from .model import EOS, VOCAB, drawn, value
from .passing import Chunk, Passing
from .scenario import Fault, Scenario
from .workers import MOST_KEPT, PAGE, TORN, SimMemory, SimPrefill

NOTICED_S = 0.01  # from a death to the driver's knowing it
START_S = 1.0  # of a new worker
Worker = tuple[str, int]


class SimExecutor:
    """A Wire of simulated workers on a virtual clock, with losses by the scenario."""

    def __init__(self, scenario: Scenario, clock: VirtualClock) -> None:
        layout = scenario.layout
        self._max_len = scenario.max_len
        self.clock, self.layout = clock, layout
        self._rng = random.Random(scenario.seed)
        self.elastic = SimElastic(self._rng, clock)
        self._batches = scenario.options["pipeline"]
        self._replicas = max(1, self._batches - 1)
        self.counts = Counter[str]()  # of what memory workers have done
        self._homes = scenario.options["memory_workers"]  # those after it are on loan, if it borrows
        self._borrows = bool(scenario.options.get("borrow"))
        self.memory = self._memory_workers(self._homes)
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
        self._histories = [TokenHistories() for _ in range(self._replicas)]
        self._queues: list[deque[list[Passing]]] = [deque() for _ in self.memory]  # of rounds, by memory worker
        self._jobs: dict[int, deque[Passing]] = {}  # batch -> its steps, not executed
        self._last: dict[int, dict[int, int]] = {}  # batch -> sequence -> token
        self._chunks: list[deque[Chunk]] = [deque() for _ in range(self._num_prefill)]
        self._grants: list[dict[tuple[int, int], PrefillGrant]] = [
            {} for _ in self.memory
        ]  # by prefill worker and step
        self._told: list[tuple[Worker, StepDone]] = []  # on their way to the driver
        self._inbox: list[StepDone] = []
        self._moved: deque[Report] = deque()
        self._copies = SimCopies(self.memory, self._rng, self._later, self._lives, self._moved.append)
        self._arrivals = StepReorderBuffer()

    def _ready(self) -> ComputeReady:
        layout = self.layout
        return ComputeReady(
            epoch=self.view, vocab_size=VOCAB, num_layers=3, max_model_len=self._max_len, dtype="float32",
            eos_token_ids=[EOS], windows=layout.windows, kv_shards=layout.lanes, stripe_blocks=layout.stripe,
            single_shard=layout.stays, sparse=list(layout.sparse),
            num_blocks=[[layout.num_blocks] * len(h) for h in layout.holders], holders=layout.holders,
            block_size=layout.block_size, summary={}, storage=self._tier(),
        )  # fmt: skip

    def _tier(self) -> OffloadFacts | None:
        if not self._keeps:
            return None
        return OffloadFacts(secret=b"s" * 32, identity=b"", page_size=PAGE, pages=[list(w.medium) for w in self.memory],
                         capacities=[MOST_KEPT * (not w.on_loan) for w in self.memory], era=self._era)  # fmt: skip

    def _memory_workers(self, count: int) -> list[SimMemory]:
        return [self._memory_worker(number) for number in range(count)]

    def _memory_worker(self, number: int) -> SimMemory:
        return SimMemory(number, self.layout, self.counts, on_loan=self._borrows and number >= self._homes)

    # Wire:
    def submit(self, new: RunRound) -> None:
        new_ids = [op.sequence for step in new.steps for op in step.plan.ops if isinstance(op, New | Fork)]
        assert not self._ids & set(new_ids), "a sequence of a number that there was"
        self._ids |= set(new_ids)
        assert all(step.plan.epoch == self.view for step in new.steps), "a plan of another epoch"
        for step in new.steps:
            assert step.plan.step > self._numbers.get(step.plan.batch, -1), "a step of a number that there was"
            self._numbers[step.plan.batch] = step.plan.step
        self._arrivals.add_round(new)
        jobs = [Passing(s, [h.note(s.plan.ops, s.sampling_requests) for h in self._histories]) for s in new.steps]
        for job in jobs:
            self._jobs.setdefault(job.run.plan.batch, deque()).append(job)
        for number, queue in enumerate(self._queues):
            queue.append(jobs)
            if len(queue) == 1:
                self._go_on(number)

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        (run,) = new.steps
        assert run.plan.epoch == self.view, "a chunk of another epoch"
        self._chunks[worker].append(Chunk(run, worker))
        self._compute_next(worker)

    def wait(self) -> Done | EpochChanged:
        while True:
            if self._noticed or self.elastic.due:
                return self._halt()
            if self._moved:
                return self._moved.popleft()
            if (done := self._arrivals.next_done()) is not None:
                return done
            if self._inbox:
                return self._inbox.pop(0)
            self._let_faults_come()
            more = self.clock.advance(self._next_event()) or self._faults or self.elastic.under_way
            assert more, "nothing will ever happen any more"

    def check_workers(self) -> EpochChanged | None:
        self._let_faults_come()
        return self._halt() if self._dead or self.elastic.due else None

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        if not self._dead and not self.elastic.move(self.memory, keep, self._die):
            return self._halt()
        self.clock.now += START_S
        self.view += 1
        for kind, number in self._dead:
            if kind == "memory":
                self.memory[number] = self._memory_worker(number)
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

    def _halt(self) -> EpochChanged:
        """All that live quiesce, and report what they have."""
        self._noticed = False
        silent = set[Worker]()
        for who, done in self._told:
            if who in self._dead and self._rng.random() >= 0.5:  # it may have been sent before its end, in its order
                silent.add(who)
            if who not in silent:
                self._hear(done)
        self._told.clear()
        steps = []
        while (done_step := self._arrivals.next_done()) is not None:
            steps.append(done_step)
        steps += self._inbox
        self._tear()
        reports = [{} if ("memory", w.number) in self._dead else w.written.report() for w in self.memory]
        capacity = None
        if self.elastic.due and not self._dead:
            self.layout, before = self.elastic.commit(self.memory), self.memory
            self.memory = self._memory_workers(1 + max(max(h) for h in self.layout.holders))
            if len({x for worker in (*before, *self.memory) for x in worker.weights}) == 1:  # all have all heads
                for worker in (w for w in self.memory if not w.on_loan):  # as if they shared a directory
                    worker.medium = {key: blocks for other in before for key, blocks in other.medium.items()}
            capacity = capacity_of(self.layout)
        self.view += 1  # what was to happen in the one before will not
        self._begin_view()
        return EpochChanged(steps, reports, capacity, self.elastic.stays)

    def _tear(self) -> None:
        """Steps that were executed are written to their end; of others a memory worker may have some layers."""
        for number, queue in enumerate(self._queues):
            worker = self.memory[number]
            for jobs in queue:
                if not all(number in job.begun for job in jobs):
                    break
                for job in jobs:
                    if job.executed:
                        worker.written.commit(job.run.plan.rows)
                    elif self._rng.random() < 0.5:
                        for row in job.run.plan.rows:
                            for position in range(row.first, row.first + row.count):
                                worker.write(row.sequence, row.location, position, TORN)

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
            assert job.run.plan.epoch == self.view
            for op in job.run.plan.ops:
                if isinstance(op, PrefillGrant):
                    self._grants[number][op.worker, op.step] = op
            worker.begin(job.run.plan)
            for op in job.run.plan.ops:
                if isinstance(op, SaveKv | LoadKv):
                    assert op.transfer_id > worker.last_transfer, "transfers are numbered in the order of the plans"
                    worker.last_transfer = op.transfer_id
                    self._later(self._transfer, number, op)
                elif isinstance(op, DeletePages):
                    worker.drop(op)
                elif isinstance(op, CopyStripes):
                    self._copies.begin(number, op)
                elif isinstance(op, ScoreBlocks):
                    self._later(self._score, number, op)
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
        self.execute(job)
        for number in range(len(self.memory)):
            if number not in job.written:
                self._later(self._write, number, job)
        self._try_execute(batch)

    def execute(self, job: Passing) -> None:
        run, plan, at = job.run, job.run.plan, 0
        last, ids, seen = self._last.get(plan.batch, {}), list[int](), list[int]()
        draws = run.sampling_requests
        target = {d.sequence: draws[d.reference_request].sequence for d in draws if d.reference_request >= 0}
        for row in plan.rows:
            owner = target.get(row.sequence, row.sequence)
            tokens = [last[owner] if t == -1 else t for t in run.token_ids[at : at + row.count]]
            at += row.count
            ids += tokens
            seen += self._attend(row, tokens)
        due = job.due[plan.replica_of(3)]
        choices = [
            drawn(d, seen[d.row], due, ids[d.row] if d.has_pending_token else None) for d in run.sampling_requests
        ]
        for i, d in enumerate(draws):
            if d.reference_request >= 0:  # the other's token, and how far both are apart
                token = choices[d.reference_request].token_id
                apart = (token + d.row) % 5 == 0, (token % 20) / 50
                choices[i] = SampledToken(d.sequence, token, divergence=apart)
        if plan.rows:
            drawn_now = zip(run.sampling_requests, choices, strict=True)
            self._last[plan.batch] = {d.sequence: x.token_id for d, x in drawn_now if d.prompt_logprob_token < 0}
        self._tell(
            ("compute", plan.replica_of(3)),
            StepDone(epoch=plan.epoch, batch=plan.batch, step=plan.step, sampled_tokens=choices),
        )

    def _attend(self, row: RowRange, tokens: list[int]) -> list[int]:
        """Returns what each row sees, itself included."""
        totals = []
        if self.layout.sparse:  # each token depends on its row alone
            return [value(token, position, 0) for position, token in enumerate(tokens, row.first)]
        for position, token in enumerate(tokens, row.first):
            before = self._total(row, position, range(position))
            stored = value(token, position, before)
            for worker in self.memory:
                worker.write(row.sequence, row.location, position, stored)
            totals.append(before + self._total(row, position, range(position, position + 1)))
        return totals

    def _total(self, row: RowRange, position: int, span: range) -> int:
        return sum([worker.total(row.sequence, row.location, position, span) for worker in self.memory])

    def _write(self, number: int, job: Passing) -> None:
        if self._lives("memory", number):
            self.memory[number].written.commit(job.run.plan.rows)
            job.written.add(number)
            self._if_round_is_over(number, self._queues[number][0])

    def _if_round_is_over(self, number: int, jobs: list[Passing]) -> None:
        if self._queues[number] and self._queues[number][0] is jobs and all(number in j.written for j in jobs):
            self._queues[number].popleft()
            self._go_on(number)

    def _score(self, number: int, op: ScoreBlocks) -> None:
        """Report some weight for each block of a sequence, for none if it has gone."""
        tables = self.memory[number].tables
        if self._lives("memory", number):
            length = tables.length(op.sequence) if op.sequence in tables.sequences else 0
            blocks = range(-(-length // tables.block_size))
            scores = [(block * 37 + op.sequence * 11 + number * 5) % 101 for block in blocks]
            self._moved.append(BlockScoresReport(epoch=0, step=0, sequence=op.sequence, scores=scores))

    def _transfer(self, number: int, op: SaveKv | LoadKv) -> None:
        if self._lives("memory", number):
            self._later(self._report, op, self.memory[number].transfer(op, self._rng))

    def _report(self, op: SaveKv | LoadKv, said: TransferDone) -> None:
        """The end of a load whose rows may come early is reported later, perhaps as a failure."""
        if isinstance(op, LoadKv) and op.slack_s and not any(self.layout.windows):
            self._moved.append(LoadReady(epoch=0, transfer_id=op.transfer_id))
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
            self._arrivals.on_step_done(done)

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
        for i, token in enumerate(chunk.run.token_ids):
            values, total = at.add(RowRange(row.sequence, row.first + i, 1, row.location), [token])
            chunk.values += values
            seen.append(total)
        due = TokenHistories().note(chunk.run.plan.ops, chunk.run.sampling_requests)
        chunk.drawn = [drawn(d, seen[d.row], due, None) for d in chunk.run.sampling_requests]
        for number in range(len(self.memory)):
            self._deliver(number)
        self._compute_next(worker)

    def _deliver(self, number: int) -> None:
        """Delivers what prefill workers have computed and memory worker ``number`` was sent, in its order."""
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
            memory.write(grant.sequence, grant.location, position, stored)
        memory.written.commit([grant.rows])
        chunk.stored.add(number)
        self._deliver(number)
        while self._chunks[chunk.worker] and len(self._chunks[chunk.worker][0].stored) == len(self.memory):
            over = self._chunks[chunk.worker].popleft()
            plan = over.run.plan
            self._tell(
                ("prefill", chunk.worker),
                StepDone(epoch=plan.epoch, batch=plan.batch, step=plan.step, sampled_tokens=over.drawn),
            )
