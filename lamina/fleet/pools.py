"""Both pools as the engine sees them: started together, given steps, ended together. Every wait has a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import structs

from lamina.engine.wire import Clock, Done, Report, ViewChanged, WorkerError
from lamina.observe.collect import ROUND_TRIPS, Tracer
from lamina.observe.trace import Event, Recorder
from lamina.protocol.control import AskClock, AskStats, ClockTime, ComputeReady, RunRound, Stats, StepDone
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.plan import Keep
from lamina.protocol.tiers import GateOpened

from .arrivals import Arrivals, ChunksDue
from .cohort import Cohort
from .counters import Counters
from .elastic import Elastic
from .launchers import Launcher, open_launcher
from .links import Links
from .members import JOIN_AFTER_LOSS_S, JOIN_S, BadInputError, LostError, Member, Members
from .notices import Notices
from .supervise import Supervisor
from .tiers import num_reports

if TYPE_CHECKING:
    from lamina.engine.engine import Engine

    from .lending.borrower import Borrower

STATS_S = 5.0
HERE = "localhost"
GRACE_S = 1.0  # a worker that waits for another one in vain knows more than we do: let it speak first


class Pools:
    """Memory workers, the replicas of the model on compute workers, prefill workers, and the engine's links to them."""

    borrower: Borrower | None = None  # where memory may be borrowed, once all have started

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        clock: Clock = time.monotonic,
        links: Links | None = None,
        launch: Callable[..., Launcher] = open_launcher,
    ) -> None:
        """``model``: path, hub id, or an nn.Module, which then runs in this process. ``links``, ``launch``: of a
        simulation. Raises ValueError, WorkerError.
        """
        self._config, self._clock = config, clock
        self._members = Members(self._gather, self._after_end, links, clock)
        self.tracer = Tracer(config.launching.trace or os.environ.get("LAMINA_TRACE", ""))
        self._cohort = Cohort(config, self._members, on_progress, trace=self.tracer.on, clock=clock, launch=launch)
        self._supervisor = Supervisor(config, self._members, self._cohort, clock)
        self.elastic = Elastic(config, self._members, self._cohort, clock)
        self._notices = Notices(self._members, self.elastic, clock)
        self._loss: LostError | None = None  # that is to be made good
        self.recovering = False  # whether one is being made good
        self._meanwhile: Callable[[], None] = lambda: None
        self._members.meanwhile = self._look_round
        self._batches = config.topology.most_batches
        self._lock = threading.Lock()  # one reader of the links at a time: run or stats
        self._expect_nothing()
        try:
            with self._or_end():
                if config.topology.on_loan:  # whose ledger may not be there
                    from .lending.borrower import open_borrower

                    self.borrower = open_borrower(config, self._members, self._cohort, self.elastic)
                self._cohort.start(model)
                self.ready = self._cohort.connect()
                self._read_clocks()
                self._cohort.spares.fill(config.deadlines.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def attend(self, engine: Engine) -> None:
        """The engine that uses these pools from now on, for which memory may be borrowed."""
        if self.borrower is not None:
            self.borrower.attend(engine)

    def connect(self) -> ComputeReady:
        """Have all workers meet anew, under the next view, with all that they have loaded and stored. No step may be in
        flight. Raises WorkerError, ValueError.
        """
        if len(self._arrivals) or self._chunks:
            raise ValueError("workers cannot be connected anew while steps are in flight: wait for them first")
        with self._lock, self._or_end():
            self.ready = self._cohort.connect()
        self._expect_nothing()
        return self.ready

    def _expect_nothing(self) -> None:
        self._counters = Counters(self._members, self._clock)
        self._arrivals = Arrivals()
        self._reports, self._moved_at = 0, 0.0  # reports of memory workers that are to come, and the last one's time
        topology = self._config.topology
        self._chunks = ChunksDue(topology.prefill_groups, topology.prefill_pipeline)

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """Where a worker is lost meanwhile, nobody can do anything useful any more: end all others, and soon."""
        try:
            yield
        except LostError as e:
            words = self._supervisor.last_words(e)
            self._members.end(JOIN_AFTER_LOSS_S)
            raise WorkerError(words) from None
        except BadInputError:
            self._members.end(JOIN_S)
            raise

    @contextmanager
    def _or_note(self) -> Iterator[None]:
        """Where a loss can be made good, the next ``wait`` or ``look`` says so; else ``_or_end``."""
        with self._or_end():
            try:
                yield
            except LostError as loss:
                if not self._supervisor.may_make_good(loss):
                    raise
                self._loss = self._loss or loss

    @property
    def pids(self) -> dict[str, int]:
        """Name of each worker -> its process; without those on loan, whose processes are their hosts'."""
        return {m.label: m.handle.pid for m in self._members if m.handle.pid}

    @property
    def hosts(self) -> dict[str, str]:
        """Name of each worker -> the address of its host, by which others reach it; HERE: this one."""
        places = {m.label: m.handle.place.rpartition(":")[0].strip("[]") for m in self._members}
        return {label: place or HERE for label, place in places.items()}

    def submit(self, new: RunRound) -> None:
        """Queue a round for the compute workers. Where one is lost, ``wait`` says so."""
        self._arrivals.expect(new)
        self._expect_reports(num_reports(new) * len(self._members.memory))
        with self._or_note():
            for member in self._members.compute:
                self._members.send(member, new)

    def prefill(self, worker: int, new: RunRound) -> None:
        """Queue a chunk of a prompt, a round of one step, for a prefill worker, or all of the group of that number.
        Where one is lost, ``wait`` says so.
        """
        self._chunks.sent(worker, self._clock())
        with self._or_note():
            for member in self._chunks.of(worker, self._members.prefill):
                self._members.send(member, new)

    def _expect_reports(self, reports: int) -> None:
        if reports and not self._reports:
            self._moved_at = self._clock()
        self._reports += reports

    def wait(self) -> Done | ViewChanged:
        """The next step, transfer or score that has ended, or the loss of a worker. Raises WorkerError when one cannot
        be replaced.
        """
        start = self.tracer.recorder.now()
        done: Done | None = None
        with self._lock:
            if self._loss is None:
                self._notices.heed()
            if not self._is_to_halt():
                with self._or_note():
                    done = self._next_done()
                    if isinstance(done, StepDone):
                        self.tracer.recorder.add(Event.WAIT_DONE, start, done)
            return self._halt() if done is None else done

    def look(self) -> ViewChanged | None:
        """Whether a worker has been lost, without a wait. Raises WorkerError when one cannot be replaced."""
        with self._lock:
            if self._loss is None:
                self._tend_loans()
                with self._or_note():
                    self._members.check()
                    self._supervisor.look_round(self._owing())
                    self._notices.heed()
            return self._halt() if self._is_to_halt() else None

    def _is_to_halt(self) -> bool:
        """Whether the view is to change: behind a loss, or as workers come or go."""
        due = self._loss is not None or self.elastic.due()
        with self._or_note():
            due = due or self._cohort.absent.due()
        return due or self._loss is not None

    def resume(self, keep: Sequence[Keep]) -> ComputeReady | ViewChanged:
        """Replace who was lost, and have all meet anew with the KV of ``keep`` alone. Another ViewChanged where others
        are lost meanwhile; raises WorkerError where that cannot be.
        """
        with self._lock, self._recovery():
            with self._or_note():  # where one was noticed since, KV moves first: it is laid out so by now
                if not self.elastic.move(keep) or self._loss or not self._supervisor.rebuild(keep):
                    return self._halt()
                self._go_on(keep)
                self.elastic.end()
            return self.ready if self._loss is None else self._halt()

    def begin_era(self) -> bytes:
        """Have no page beside the pools found any more; what keys hang on from now on."""
        return self._cohort.tier.begin_era()

    def _go_on(self, keep: Sequence[Keep]) -> None:
        ready = self._supervisor.resume([structs.replace(each, was=None) for each in keep])
        if (ready.num_blocks, ready.lanes) != (self.ready.num_blocks, self.ready.lanes):
            blocks, had = ready.num_blocks, self.ready.num_blocks
            raise LostError(f"memory workers have {blocks} KV blocks in place of {had} behind a loss", [])
        self._read_clocks()
        self._expect_nothing()
        self.ready = ready

    def _halt(self) -> ViewChanged:
        """What was done before a loss, or before memory workers come or go, and what is left of the KV."""
        paused_at = self._clock()
        with self._or_end(), self._recovery():
            loss, self._loss = self._loss, None
            kept = self._supervisor.halt(loss)
            steps = list[StepDone]()
            for done in self._members.said(StepDone):
                if done.batch >= self._batches:
                    steps.append(done)
                else:
                    self._arrivals.add(done)
            while (next_done := self._arrivals.take()) is not None:
                steps.append(next_done)
            self._expect_nothing()
            capacity = None if loss or self._members.lost else self.elastic.commit(paused_at)
            if capacity is not None:
                self.ready = structs.replace(self.ready, **capacity._asdict())
        return ViewChanged(steps, kept, capacity, self.elastic.stays)

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        self.recovering = True
        try:
            self._meanwhile()  # whoever looks on is to know at once
            yield
        except (ValueError, OSError) as error:  # of a place where all went well before
            self._members.end(JOIN_AFTER_LOSS_S)
            raise self._supervisor.no_other(error) from error
        finally:
            self.recovering = False

    def _next_done(self) -> Done:
        while (done := self._arrivals.take()) is None:
            done = self._receive()
            if isinstance(done, Report):
                self._reports -= not isinstance(done, GateOpened)  # its transfer goes on
                self._moved_at = self._clock()
                return done
            if done.batch >= self._batches:  # of a prefill worker, whose only link keeps the order
                break
            self._arrivals.add(done)
        self._note(done)
        return done

    def _receive(self) -> Any:
        limit, steps = self._config.deadlines.step_timeout_s, len(self._arrivals)
        owing = self._chunks.owing(self._members.prefill)
        what = "a step" if steps else "a chunk of a prompt" if owing else "KV to be saved, loaded, scored or moved"
        if steps or not (owing or self._reports):
            owing = self._members.compute + owing
        owing = owing + (self._members.memory if self._reports else [])
        said = f"for {what} (--step-timeout-s {limit:g})"
        return self._members.wait_for(owing, Done, limit + GRACE_S, said)

    def _note(self, done: StepDone) -> None:
        """Steps of compute workers must not hide that a prefill worker hangs. One that has answered does not, however
        long the driver has not listened.
        """
        now, limit, first = self._clock(), self._config.deadlines.step_timeout_s, self._batches
        if self._reports and now - self._moved_at > limit + GRACE_S:
            silent = [m for m in self._members.memory if not self._members.has_news(m)]
            if silent:
                raise self._members.late(silent, f"to save, load, score or move KV (--step-timeout-s {limit:g})")
        if done.batch >= first:
            self._chunks.done(done.batch - first, now)
        for group in self._chunks.late(self._members.prefill, now, limit + GRACE_S):
            if not self._members.has_news(group[-1]):
                raise self._members.late(group, f"for a chunk of a prompt (--step-timeout-s {limit:g})")

    def stats(self) -> dict[str, dict[str, float]]:
        """The counters of every worker, by the names of ``pids``; of one that is lost there are none."""
        with self._lock:
            there = [m for m in self._members if m not in self._members.lost]
            for member in there:
                with self._or_note():
                    self._members.send(member, AskStats())
            counters = {member.label: self._stats_of(member) for member in there}
        return {label: values for label, values in counters.items() if values is not None}

    def _stats_of(self, member: Member) -> dict[str, float] | None:
        """None where it is lost, or late, or was stopped while it owes nothing else."""
        answers = list[dict[str, float] | None]()
        while not answers and member not in self._members.lost:
            with self._or_note():
                answers.append(self._answer_of(member))
            if self._loss is not None and member in self._loss.members:
                break
        return answers[0] if answers else None

    def _answer_of(self, member: Member) -> dict[str, float] | None:
        try:
            answer: Stats = self._members.wait_for([member], Stats, *self._counters_limit)
        except LostError as loss:
            if member not in loss.members or not member.handle.stopped:
                raise
            return None
        return answer.values

    def meanwhile(self, call: Callable[[], None]) -> None:
        """Have ``call`` called a few times a second while ``wait`` is called or waits."""
        self._meanwhile = call

    def _look_round(self) -> None:
        self._supervisor.look_round(self._owing())
        self._tend_loans()
        self._meanwhile()

    def _tend_loans(self) -> None:
        if self.borrower is not None and not self.recovering:
            self.borrower.tend()

    def _owing(self) -> list[Member]:
        """Who has something to do, or to say. All others may stand still."""
        if self.recovering:
            return list(self._members)
        steps = len(self._arrivals) > 0
        lending = self._members.prefill if self._chunks else []  # one may wait for KV of another
        computing = self._members.compute * (steps or bool(lending)) + lending  # they pass on grants
        return (self._members.memory if computing or self._reports else []) + computing + self._counters.silent

    def ask_stats(self) -> None:
        """Ask every worker for its counters, unless some have yet to answer; for the thread that calls ``wait``."""
        with self._or_note():
            if self._loss is None and not self.recovering:
                self._counters.ask()

    @property
    def awaits_stats(self) -> bool:
        """Whether some worker has yet to answer ``ask_stats``."""
        return bool(self._counters.silent)

    def take_stats(self) -> dict[str, dict[str, float]] | None:
        """The counters of all workers, once all have answered; None before that, and where nobody has asked."""
        counters = None
        with self._or_note():
            if self._loss is None and not self.recovering:
                counters = self._counters.take(*self._counters_limit)
        return counters

    @property
    def _counters_limit(self) -> tuple[float, str]:
        limit_s = self._config.deadlines.step_timeout_s
        return limit_s + GRACE_S, f"to report its counters (--step-timeout-s {limit_s:g})"

    def close(self) -> None:
        """End all workers: ask, wait, then by force. Idempotent."""
        self._members.end(JOIN_S)

    def _gather(self, limit_s: float) -> None:
        self.tracer.gather({m.label: m.link for m in self._members}, limit_s)

    def _after_end(self) -> None:
        if self.borrower is not None:
            self.borrower.close()
        self.elastic.close()
        self._cohort.close()
        self.tracer.save()

    def _read_clocks(self) -> None:
        for member in self._members if self.tracer.on else []:
            trips = []
            for _ in range(ROUND_TRIPS):
                asked = Recorder.now()
                self._members.send(member, AskClock())
                answer = self._members.wait_for([member], ClockTime, STATS_S, "to read its clock")
                trips.append((asked, answer.now, Recorder.now()))
            self.tracer.set_clock(member.label, trips)

    @property
    def closed(self) -> bool:
        """Whether the workers have been ended, by ``close`` or because one was lost."""
        return self._members.closed
