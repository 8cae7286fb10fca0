"""Both pools as the engine sees them: started together, given steps, ended together. Every wait has a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lamina.engine.wire import Clock, WorkerError
from lamina.observe.collect import ROUND_TRIPS, Tracer
from lamina.observe.trace import Event, Recorder
from lamina.protocol.control import AskClock, AskStats, ClockTime, ComputeReady, RunRound, Stats, StepDone
from lamina.protocol.options import EngineConfig

from .arrivals import Arrivals
from .cohort import Cohort
from .counters import Counters
from .members import JOIN_AFTER_LOSS_S, JOIN_S, BadInputError, LostError, Members

STATS_S = 5.0
GRACE_S = 1.0  # a worker that waits for another one in vain knows more than we do: let it speak first


class Pools:
    """Memory workers, the replicas of the model on compute workers, prefill workers, and the engine's links to them."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """``model``: path, hub id, or an nn.Module, which then runs in this process. Raises ValueError, WorkerError."""
        self._config, self._clock = config, clock
        self._members = Members(self._gather, self._after_end, clock=clock)
        self.tracer = Tracer(config.launching.trace or os.environ.get("LAMINA_TRACE", ""))
        self._cohort = Cohort(config, self._members, on_progress, trace=self.tracer.on, clock=clock)
        self._batches = config.topology.most_batches
        self._lock = threading.Lock()  # one reader of the links at a time: run or stats
        self._counters = Counters(self._members, clock)
        self._expect_nothing()
        try:
            with self._or_end():
                self._cohort.start(model)
                self.ready = self._cohort.connect()
                self._read_clocks()
        except BaseException:
            self.close()
            raise

    def connect(self) -> ComputeReady:
        """Have all workers meet anew, under the next view, with all that they have loaded and stored. No step may be in
        flight. Raises WorkerError, ValueError.
        """
        if len(self._arrivals) or any(self._chunks):
            raise ValueError("workers cannot be connected anew while steps are in flight: wait for them first")
        with self._lock, self._or_end():
            self.ready = self._cohort.connect()
        self._expect_nothing()
        return self.ready

    def _expect_nothing(self) -> None:
        self._arrivals = Arrivals()
        self._chunks = [0] * self._config.topology.prefill_workers  # in flight, by prefill worker
        self._since = [0.0 for _ in self._chunks]  # when the first of them began to be the next one that is done

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """Where a worker is lost meanwhile, nobody can do anything useful any more: end all others, and soon."""
        try:
            yield
        except LostError as e:
            self._members.end(JOIN_AFTER_LOSS_S)
            raise WorkerError(f"{e}; its pool cannot go on and was ended: start again" if e.ended else str(e)) from None
        except BadInputError:
            self._members.end(JOIN_S)
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Name of each worker -> its process."""
        return {m.label: m.handle.pid for m in self._members}

    def submit(self, new: RunRound) -> None:
        """See Wire."""
        self._arrivals.expect(new)
        with self._or_end():
            for member in self._members.compute:
                self._members.send(member, new)

    def prefill(self, worker: int, new: RunRound) -> None:
        """See Wire."""
        if not self._chunks[worker]:
            self._since[worker] = self._clock()
        self._chunks[worker] += 1
        with self._or_end():
            self._members.send(self._members.prefill[worker], new)

    def wait(self) -> StepDone:
        """See Wire."""
        start = self.tracer.recorder.now()
        with self._lock, self._or_end():
            while (done := self._arrivals.take()) is None:
                done = self._receive()
                if done.batch >= self._batches:  # of a prefill worker, whose only link keeps the order
                    break
                self._arrivals.add(done)
            self.tracer.recorder.add(Event.WAIT_DONE, start, done)
            self._note(done)
        return done

    def _receive(self) -> StepDone:
        limit, steps = self._config.deadlines.step_timeout_s, len(self._arrivals)
        owing = [member for member, chunks in zip(self._members.prefill, self._chunks, strict=True) if chunks]
        what = "a step" if steps else "a chunk of a prompt"
        if steps or not owing:
            owing = self._members.compute + owing
        done: StepDone = self._members.wait_for(
            owing, StepDone, limit + GRACE_S, f"for {what} (--step-timeout-s {limit:g})"
        )
        return done

    def _note(self, done: StepDone) -> None:
        """Steps of compute workers must not hide that a prefill worker hangs. One that has answered does not, however
        long the driver has not listened.
        """
        now, limit, first = self._clock(), self._config.deadlines.step_timeout_s, self._batches
        if done.batch >= first:
            self._chunks[done.batch - first] -= 1
            self._since[done.batch - first] = now
        for worker, member in enumerate(self._members.prefill):
            late = self._chunks[worker] and now - self._since[worker] > limit + GRACE_S
            if late and not self._members.has_news(member):
                raise self._members.late([member], f"for a chunk of a prompt (--step-timeout-s {limit:g})")

    def check(self) -> None:
        """Raises WorkerError where a worker has been lost; waits for nobody."""
        with self._lock, self._or_end():
            self._members.check()

    def stats(self) -> dict[str, dict[str, float]]:
        """The counters of every worker, by the names of ``pids``."""
        with self._lock, self._or_end():
            for member in self._members:
                self._members.send(member, AskStats())
            found = {}
            for member in self._members:
                answer = self._members.wait_for([member], Stats, *self._counters_limit)
                found[member.label] = answer.values
        return found

    def meanwhile(self, call: Callable[[], None]) -> None:
        """Have ``call`` called a few times a second while ``wait`` waits in silence."""
        self._members.meanwhile = call

    def ask_stats(self) -> None:
        """See Counters.ask; for the thread that calls ``wait``."""
        with self._or_end():
            self._counters.ask()

    def take_stats(self) -> dict[str, dict[str, float]] | None:
        """See Counters.take."""
        with self._or_end():
            return self._counters.take(*self._counters_limit)

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
