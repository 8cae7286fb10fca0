"""The executor of real workers: it starts both pools, sends them steps, and ends them. Every wait has a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import structs

from lamina.config.engine_config import EngineConfig
from lamina.engine.feature import EngineFeature
from lamina.facts.report import count_text
from lamina.observe.trace import Event, Recorder
from lamina.observe.trace_collection import ROUND_TRIPS, Tracer
from lamina.protocol.control import ClockRequest, ClockTime, ComputeReady, RunRound, Stats, StatsRequest, StepDone
from lamina.protocol.executor import Clock, Done, EpochChanged, Report, WorkerError
from lamina.protocol.offload_messages import LoadReady, PagesExpired
from lamina.protocol.step_plan import CopyStripes, LoadKv, SaveKv, ScoreBlocks, SurvivingKv
from lamina.utils.state_machine import StateMachine

from .counter_collection import CounterCollector
from .elastic import MemoryResizer
from .launchers import Launcher, open_launcher
from .states import EXECUTOR_TRANSITIONS, ExecutorState
from .step_reorder_buffer import PendingChunks, StepReorderBuffer
from .supervisor import Supervisor
from .termination_notice import TerminationNotices
from .worker_group import WorkerGroup
from .worker_registry import (
    JOIN_AFTER_LOSS_S,
    JOIN_S,
    BadInputError,
    Links,
    RegisteredWorker,
    WorkerRegistry,
    WorkersLostError,
)

if TYPE_CHECKING:
    from .lending.borrower import Borrower

STATS_S = 5.0
LOCAL_HOST = "localhost"
# More than a worker's own limit: a worker whose peer is late knows the cause, and reports it first.
DRIVER_GRACE_S = 1.0
REPORTED = SaveKv | LoadKv | ScoreBlocks | CopyStripes  # ops whose end each memory worker reports


class WorkerExecutor:
    """The memory workers, the model's replicas on compute workers, the prefill workers, and the links to them."""

    borrower: Borrower | None = None  # if memory may be borrowed; set once all workers have started

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        clock: Clock = time.monotonic,
        links: Links | None = None,
        launch: Callable[..., Launcher] = open_launcher,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start and connect all workers. ``model``: path, hub id, or an nn.Module, which then runs in this process.
        ``links``, ``launch``: replaced by simulations. ``meanwhile``: called a few times a second during waits. Raises
        ValueError, WorkerError.
        """
        self._config, self._clock = config, clock
        self._state = StateMachine(ExecutorState.STARTING, EXECUTOR_TRANSITIONS)
        self.registry = WorkerRegistry(self._gather, self._after_end, links, clock, on_tick=self._check_health)
        self.tracer = Tracer(config.launch.trace or os.environ.get("LAMINA_TRACE", ""))
        self.workers = WorkerGroup(
            config, self.registry, on_progress, trace=self.tracer.is_enabled, clock=clock, launch=launch
        )
        self.supervisor = Supervisor(config, self.registry, self.workers, clock)
        self.resizer = MemoryResizer(config, self.registry, self.workers, clock)
        self._termination_notices = TerminationNotices(self.registry, self.resizer, clock)
        self._loss: WorkersLostError | None = None  # a loss that ``wait`` or ``check_workers`` has yet to report
        self._meanwhile = meanwhile
        self._batches = config.topology.max_batches
        self._lock = threading.Lock()  # one reader of the links at a time: run or stats
        self._expect_nothing()
        try:
            with self._end_on_error():
                if config.topology.may_borrow:  # its debt ledger may not be reachable
                    from .lending.borrower import open_borrower

                    self.borrower = open_borrower(config, self.registry, self.workers, self.resizer)
                self.workers.start(model)
                counts = config.topology.num_workers.items()
                awaited = ", ".join(count_text(count, f"{role} worker") for role, count in counts if count)
                stage = f"connecting workers: waiting for {awaited}"
                on_progress(stage, 0, 1)
                self.ready = self.workers.connect()
                on_progress(stage, 1, 1)
                self._read_clocks()
                self.workers.spare_workers.start_missing(config.deadlines.start_timeout_s)
            self._state.enter(ExecutorState.RUNNING)
        except BaseException:
            self.close()
            raise

    @property
    def engine_features(self) -> Sequence[EngineFeature]:
        """The features that an engine of these workers has in addition to its own: loans, if memory may be borrowed."""
        return [] if self.borrower is None else [self.borrower]

    def connect(self) -> ComputeReady:
        """Reconnect all workers under the next epoch; they keep all that they have loaded and stored. No step may be in
        flight. Raises WorkerError, ValueError.
        """
        if len(self._steps_in_flight) or self._pending_chunks:
            raise ValueError("workers cannot be connected anew while steps are in flight: wait for them first")
        with self._lock, self._end_on_error():
            self.ready = self.workers.connect(copies_kv=self.resizer.copies_kv)
        self._expect_nothing()
        return self.ready

    def _expect_nothing(self) -> None:
        self._counters: CounterCollector | None = None  # while some worker has yet to report what it counts
        self._steps_in_flight = StepReorderBuffer()
        self._waits_since: float | None = None  # for what is owed; None: what was waited for last has come
        self._reports, self._progress_at = 0, 0.0  # outstanding reports of memory workers; time of the last one
        topology = self._config.topology
        self._pending_chunks = PendingChunks(topology.prefill_groups, topology.prefill_pipeline)

    @contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """If a worker is lost meanwhile, end all other workers soon, since no step can complete."""
        try:
            yield
        except WorkersLostError as e:
            words = self.supervisor.exit_message(e)
            self.registry.shut_down(JOIN_AFTER_LOSS_S)
            raise WorkerError(words) from None
        except BadInputError:
            self.registry.shut_down(JOIN_S)
            raise

    @contextmanager
    def _note_loss(self) -> Iterator[None]:
        """Keep a recoverable loss for ``wait`` or ``check_workers`` to report; else act as ``_end_on_error``."""
        with self._end_on_error():
            try:
                yield
            except WorkersLostError as loss:
                if not self.supervisor.is_recoverable(loss):
                    raise
                self._loss = self._loss or loss

    @property
    def pids(self) -> dict[str, int]:
        """The name of each worker -> its process id; without workers on loan, which other deployments run."""
        return {m.label: m.handle.pid for m in self.registry if m.handle.pid}

    @property
    def hosts(self) -> dict[str, str]:
        """The name of each worker -> the address of its host, by which other hosts reach it; LOCAL_HOST: this host."""
        places = {m.label: m.handle.host.rpartition(":")[0].strip("[]") for m in self.registry}
        return {label: place or LOCAL_HOST for label, place in places.items()}

    def submit(self, new: RunRound) -> None:
        """Queue a round for the compute workers. If one is lost, ``wait`` reports it."""
        self._waits_since = None
        self._steps_in_flight.add_round(new)
        self._expect_reports(sum(isinstance(op, REPORTED) for step in new.steps for op in step.plan.ops))
        with self._note_loss():
            for member in self.registry.compute:
                self.registry.send(member, new)

    def submit_prefill(self, worker: int, new: RunRound) -> None:
        """Queue a chunk of a prompt, a round of one step, for a prefill worker, or for all workers of the group of that
        number. If one is lost, ``wait`` reports it.
        """
        self._waits_since = None
        self._pending_chunks.on_sent(worker, self._clock())
        with self._note_loss():
            for member in self._pending_chunks.group_workers(worker, self.registry.prefill):
                self.registry.send(member, new)

    def _expect_reports(self, ops: int) -> None:
        if ops:
            self._progress_at = self._progress_at if self._reports else self._clock()
            self._reports += ops * len(self.registry.memory)

    def wait(self) -> Done | EpochChanged:
        """Wait for the next step, transfer or report that has ended, or for the loss of a worker. Raises WorkerError if
        a lost worker cannot be replaced.
        """
        start = self.tracer.recorder.now()
        done: Done | None = None
        with self._lock:
            self._look_for_leaving()
            if not self._must_quiesce():
                with self._note_loss():
                    done = self._next_done()
                    if isinstance(done, StepDone):
                        self.tracer.recorder.add(Event.WAIT_DONE, start, done)
            return self._quiesce() if done is None else done

    def check_workers(self) -> EpochChanged | PagesExpired | None:
        """Return EpochChanged if a worker has been lost, or which stored pages have expired, without waiting. Raises
        WorkerError as ``wait`` does.
        """
        with self._lock:
            if self._loss is None:
                with self._note_loss():
                    self.registry.check()
                    self.supervisor.check_health(self._waited_for())
                    self._look_for_leaving()
            if self._must_quiesce():
                return self._quiesce()
            expired = self.registry.read_messages(PagesExpired)
            keys = [key for each in expired for key in each.keys]
            return PagesExpired(epoch=self.registry.epoch, keys=keys) if keys else None

    def _look_for_leaving(self) -> None:
        """Begin to replace memory workers that got SIGTERM, and reap those that have left."""
        if self._loss is None and (self.registry.has_notices or self.resizer.dismissed):
            self._termination_notices.poll()

    def _must_quiesce(self) -> bool:
        """Return whether the epoch is to change: after a loss, or because workers come or go."""
        due = self._loss is not None or (self.resizer.change is not None and self.resizer.is_ready())
        if not due and self.workers.degraded.loading:
            with self._note_loss():
                due = self.workers.degraded.is_any_loaded()
        return due or self._loss is not None

    def resume(self, keep: Sequence[SurvivingKv]) -> ComputeReady | EpochChanged:
        """Replace lost workers, and reconnect all with the KV of ``keep`` alone. Returns another EpochChanged if more
        workers are lost meanwhile. Raises WorkerError if workers cannot be replaced.
        """
        with self._lock, self._recovery(ExecutorState.RESUMING):
            with self._note_loss():  # after a new loss KV still moves first, since the engine has laid it out so
                if not self.resizer.move_kv(keep) or self._loss or not self.supervisor.rebuild(keep):
                    return self._quiesce()
                self._resume_workers(keep)
                self.resizer.finish()
            if self._loss is not None:
                return self._quiesce()
            self._state.enter(ExecutorState.RUNNING)
            return self.ready

    def begin_era(self) -> bytes:
        """Make all offloaded pages unreachable for sequences. Returns the new era, a part of all later page keys."""
        return self.workers.storage.begin_era()

    def _resume_workers(self, keep: Sequence[SurvivingKv]) -> None:
        kept = [structs.replace(each, previous_location=None) for each in keep]
        ready = self.supervisor.resume(kept, copies_kv=self.resizer.copies_kv)
        shape, had = ((x.num_blocks, x.state_slots, x.kv_shards, x.state_shards) for x in (ready, self.ready))
        if shape != had:
            raise WorkersLostError(
                f"memory workers have {shape[0]} KV blocks and {shape[1]} states in place of {had[0]} and {had[1]} "
                f"after a loss",
                [],
            )
        self._read_clocks()
        self._expect_nothing()
        self.ready = ready

    def _quiesce(self) -> EpochChanged:
        """Quiesce all workers and commit a change that is due. Returns the steps done before and the remaining KV."""
        paused_at = self._clock()
        with self._end_on_error(), self._recovery(ExecutorState.QUIESCING):
            loss, self._loss = self._loss, None
            kept = self.supervisor.quiesce(loss)
            steps = list[StepDone]()
            for done in self.registry.read_messages(StepDone):
                if done.batch >= self._batches:
                    steps.append(done)
                else:
                    self._steps_in_flight.on_step_done(done)
            while (next_done := self._steps_in_flight.next_done()) is not None:
                steps.append(next_done)
            self._expect_nothing()
            capacity = None if loss or self.registry.lost_workers else self.resizer.commit(paused_at)
            if capacity is not None:
                self.ready = structs.replace(self.ready, **capacity._asdict())
            self._state.enter(ExecutorState.QUIESCED)
        return EpochChanged(steps, kept, capacity, self.resizer.new_shards, self.supervisor.state_versions)

    @contextmanager
    def _recovery(self, state: ExecutorState) -> Iterator[None]:
        """Enter ``state``. A start that fails meanwhile ends the run."""
        self._state.enter(state)
        try:
            self._meanwhile()  # observers learn of it at once
            yield
        except (ValueError, OSError) as error:  # a start failed where an earlier one succeeded
            self.registry.shut_down(JOIN_AFTER_LOSS_S)
            raise self.supervisor.no_replacement_message(error) from error

    @property
    def is_recovering(self) -> bool:
        """Return whether workers are being replaced or reconnected."""
        return self._state.state in (ExecutorState.QUIESCING, ExecutorState.RESUMING)

    def _next_done(self) -> Done:
        while (done := self._steps_in_flight.next_done()) is None:
            done = self._receive()
            if isinstance(done, Report):
                if isinstance(done, PagesExpired):  # no progress of anything that is owed
                    return done
                self._reports -= not isinstance(done, LoadReady)  # after which a transfer continues
                self._progress_at = self._clock()
                return done
            if done.batch >= self._batches:  # from a prefill worker: its one link keeps the order
                break
            self._steps_in_flight.on_step_done(done)
        self._note(done)
        return done

    def _receive(self) -> Any:
        limit, steps = self._config.deadlines.step_timeout_s, len(self._steps_in_flight)
        owing = self._pending_chunks.busy_workers(self.registry.prefill)
        what = "a step" if steps else "a chunk of a prompt" if owing else "KV to be saved, loaded, scored or moved"
        if steps or not (owing or self._reports):
            owing = self.registry.compute + owing
        owing = owing + (self.registry.memory if self._reports else [])
        text = f"for {what} (--step-timeout-s {limit:g})"
        now = self._clock()
        since = self._waits_since = now if self._waits_since is None else self._waits_since
        done = self.registry.wait_for(owing, Done, max(0.0, since + limit + DRIVER_GRACE_S - now), text)
        if not isinstance(done, PagesExpired):
            self._waits_since = None
        return done

    def _note(self, done: StepDone) -> None:
        """Raise WorkersLostError if a worker hangs while the steps of other workers still complete. A worker whose
        reply is already in the link does not hang, however late the driver reads it.
        """
        now, limit, first = self._clock(), self._config.deadlines.step_timeout_s, self._batches
        if self._reports and now - self._progress_at > limit + DRIVER_GRACE_S:
            silent = [m for m in self.registry.memory if not self.registry.has_message(m)]
            if silent:
                raise self.registry.timeout_error(
                    silent, f"to save, load, score or move KV (--step-timeout-s {limit:g})"
                )
        if done.batch >= first:
            self._pending_chunks.on_done(done.batch - first, now)
        for group in self._pending_chunks.late_groups(self.registry.prefill, now, limit + DRIVER_GRACE_S):
            if not self.registry.has_message(group[-1]):
                raise self.registry.timeout_error(group, f"for a chunk of a prompt (--step-timeout-s {limit:g})")

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the counters of every worker, by the names of ``pids``; a lost worker has none."""
        with self._lock:
            there = [m for m in self.registry if m not in self.registry.lost_workers]
            for member in there:
                with self._note_loss():
                    self.registry.send(member, StatsRequest())
            counters = {member.label: self._stats_of(member) for member in there}
        return {label: values for label, values in counters.items() if values is not None}

    def _stats_of(self, worker: RegisteredWorker) -> dict[str, float] | None:
        """Return a worker's counters; None if it is lost, or late, or was stopped while it owes nothing else."""
        answers = list[dict[str, float] | None]()
        while not answers and worker not in self.registry.lost_workers:
            with self._note_loss():
                answers.append(self._answer_of(worker))
            if self._loss is not None and worker in self._loss.workers:
                break
        return answers[0] if answers else None

    def _answer_of(self, worker: RegisteredWorker) -> dict[str, float] | None:
        try:
            answer: Stats = self.registry.wait_for([worker], Stats, *self._counters_limit)
        except WorkersLostError as loss:
            if worker not in loss.workers or not worker.handle.is_stopped:
                raise
            return None
        return answer.values

    def _check_health(self) -> None:
        self.supervisor.check_health(self._waited_for())
        self._meanwhile()

    def _waited_for(self) -> list[RegisteredWorker]:
        """The workers that owe a step, a transfer or counters. All other workers may be stopped without harm."""
        if self.is_recovering:
            return list(self.registry)
        steps = len(self._steps_in_flight) > 0
        lending = self.registry.prefill if self._pending_chunks else []  # one may wait for another one's KV
        computing = self.registry.compute * (steps or bool(lending)) + lending  # they pass on grants
        counting = self._counters.pending_workers if self._counters else []
        return (self.registry.memory if computing or self._reports else []) + computing + counting

    def request_stats(self) -> None:
        """Request the counters of all workers, unless some have yet to reply; for the thread that calls ``wait``."""
        with self._note_loss():
            if self._counters is None and self._loss is None and not self.is_recovering:
                self._counters = CounterCollector(self.registry, self._clock)
                self._counters.request()

    @property
    def has_pending_stats(self) -> bool:
        """Return whether some worker has yet to reply to ``request_stats``."""
        return self._counters is not None and bool(self._counters.pending_workers)

    def collect_stats(self) -> dict[str, dict[str, float]] | None:
        """Return all workers' counters once all have replied; None before that, and if they were not requested."""
        counters = None
        with self._note_loss():
            if self._counters is not None and self._loss is None and not self.is_recovering:
                counters = self._counters.collect(*self._counters_limit)
        if counters is not None:
            self._counters = None
        return counters

    @property
    def _counters_limit(self) -> tuple[float, str]:
        limit_s = self._config.deadlines.step_timeout_s
        return limit_s + DRIVER_GRACE_S, f"to report its counters (--step-timeout-s {limit_s:g})"

    def close(self) -> None:
        """End all workers: request it, wait, then use force. Idempotent."""
        self.registry.shut_down(JOIN_S)

    def _gather(self, limit_s: float) -> None:
        self.tracer.collect({m.label: m.link for m in self.registry}, limit_s)

    def _after_end(self) -> None:
        if self.borrower is not None:
            self.borrower.close()
        self.resizer.close()
        self.workers.close()
        self.tracer.save()

    def _read_clocks(self) -> None:
        for member in self.registry if self.tracer.is_enabled else []:
            trips = []
            for _ in range(ROUND_TRIPS):
                asked = Recorder.now()
                self.registry.send(member, ClockRequest())
                answer = self.registry.wait_for([member], ClockTime, STATS_S, "to read its clock")
                trips.append((asked, answer.now, Recorder.now()))
            self.tracer.set_clock(member.label, trips)

    @property
    def is_closed(self) -> bool:
        """Return whether the workers have been ended, by ``close`` or because one was lost."""
        return self.registry.closed
