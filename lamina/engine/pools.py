"""Both pools as the engine sees them: started together, given steps, ended together. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lamina import netstack
from lamina.cluster.launcher import Launcher, WorkerHandle, open_launcher
from lamina.cluster.local import ThreadWorker
from lamina.config import MEASURED, EngineConfig, weights_of
from lamina.env import cluster_key
from lamina.observe.collect import ROUND_TRIPS, Tracer
from lamina.observe.trace import Event, Recorder
from lamina.workers.control import (
    AskClock,
    AskRate,
    AskStats,
    ClockTime,
    ComputeReady,
    Connect,
    ControlLink,
    Failed,
    LinkClosedError,
    MemoryReady,
    Progress,
    Rate,
    RingPeer,
    RingUrl,
    RunRound,
    StartCompute,
    StartMemory,
    Stats,
    StepDone,
    Stop,
    Trace,
)

log = logging.getLogger(__name__)
FROM_WORKERS = MemoryReady | RingUrl | ComputeReady | Progress | StepDone | Stats | ClockTime | Rate | Trace | Failed
JOIN_S = 5.0
JOIN_AFTER_LOSS_S = 0.5
STATS_S = 5.0
CAUSE_S = 0.3  # for a worker to say that it has failed, once its peer has
GRACE_S = 1.0  # a worker that waits for another one in vain knows more than we do: let it speak first


class WorkerError(RuntimeError):
    """A worker died, hung or failed; the text says which and how. The pools have been ended."""


class _Member:
    def __init__(self, handle: WorkerHandle) -> None:
        self.handle = handle
        self.link = ControlLink(handle.sock, FROM_WORKERS)
        self.inbox: deque[Any] = deque()  # messages that came while another one was awaited
        self.chunks = 0  # of prompts, in flight on a prefill worker
        self.since = 0.0  # when the first of them began to be the next one that is done

    @property
    def label(self) -> str:
        return f"{self.handle.role}-{self.handle.index}"

    @property
    def name(self) -> str:
        return f"{self.handle.role} worker {self.handle.index} (pid {self.handle.pid})"


class Pools:
    """Memory workers, the replicas of the model on compute workers, prefill workers, and the engine's links to them."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        """``model``: path, hub id, or an nn.Module, which then runs in this process. Raises ValueError, WorkerError."""
        self._config = config
        self._members: list[_Member] = []
        self._launcher: Launcher | None = None
        self._lock = threading.Lock()  # one reader of the links at a time: run or stats
        self._closed = False
        self.tracer = Tracer(config.trace or os.environ.get("LAMINA_TRACE", ""))
        try:
            self.ready = self._start(model, on_progress)
            self._read_clocks()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Name of each worker -> its process."""
        return {m.label: m.handle.pid for m in self._members}

    def submit(self, new: RunRound) -> None:
        """See Wire."""
        for member in self._compute:
            self._send(member, new)

    def prefill(self, worker: int, new: RunRound) -> None:
        """See Wire."""
        member = self._prefill[worker]
        if not member.chunks:
            member.since = time.monotonic()
        member.chunks += 1
        self._send(member, new)

    def wait(self) -> StepDone:
        """See Wire."""
        limit, start = self._config.step_timeout_s, self.tracer.recorder.now()
        with self._lock:
            done: StepDone = self._await(
                self._compute + self._prefill, StepDone, limit + GRACE_S, f"for a step (--step-timeout-s {limit:g})"
            )
        self.tracer.recorder.add(Event.WAIT_DONE, start, done)
        self._note(done)
        return done

    def _note(self, done: StepDone) -> None:
        """Steps of compute workers must not hide that a prefill worker hangs."""
        now, limit = time.monotonic(), self._config.step_timeout_s
        if done.batch >= self._config.most_batches:
            member = self._prefill[done.batch - self._config.most_batches]
            member.chunks, member.since = member.chunks - 1, now
        for member in self._prefill:
            if member.chunks and now - member.since > limit + GRACE_S:
                self.fail()
                raise WorkerError(f"{member.name} took too long for a chunk of a prompt (--step-timeout-s {limit:g})")

    def stats(self) -> dict[str, dict[str, float]]:
        """The counters of every worker, by the names of ``pids``."""
        with self._lock:
            for member in self._members:
                self._send(member, AskStats())
            found = {}
            for member in self._members:
                answer = self._await([member], Stats, STATS_S, "to report its counters")
                found[member.label] = answer.values
        return found

    def close(self) -> None:
        """End all workers: ask, wait, then by force. Idempotent."""
        if self._closed:
            return
        try:
            self._end()
        finally:
            self._closed = True

    def fail(self) -> None:
        """End what is left after a loss: nobody can do anything useful any more, so by force and soon."""
        try:
            self._end(JOIN_AFTER_LOSS_S)
        finally:
            self._closed = True

    def _end(self, join_s: float = JOIN_S) -> None:
        self.tracer.gather({m.label: m.link for m in self._members}, join_s)
        for member in self._members:
            with contextlib.suppress(LinkClosedError):
                member.link.send(Stop())
        for member in self._members:
            member.link.close()
        deadline = time.monotonic() + join_s
        for member in self._members:
            member.handle.join(max(0.0, deadline - time.monotonic()))
        if self._launcher is not None:
            self._launcher.close()
        self.tracer.save()

    def _read_clocks(self) -> None:
        for member in self._members if self.tracer.on else []:
            trips = []
            for _ in range(ROUND_TRIPS):
                asked = Recorder.now()
                self._send(member, AskClock())
                answer = self._await([member], ClockTime, STATS_S, "to read its clock")
                trips.append((asked, answer.now, Recorder.now()))
            self.tracer.set_clock(member.label, trips)

    @property
    def _start_limit(self) -> str:
        return f"to start (--start-timeout-s {self._config.start_timeout_s:g})"

    @property
    def closed(self) -> bool:
        """Whether the workers have been ended, by ``close`` or because one was lost."""
        return self._closed

    @property
    def _compute(self) -> list[_Member]:
        first = self._config.memory_workers
        return self._members[first : first + self._config.replicas]

    @property
    def _prefill(self) -> list[_Member]:
        return self._members[self._config.memory_workers + self._config.replicas :]

    def _start(self, model: Any, on_progress: Callable[[str, int, int], None]) -> ComputeReady:
        config, key = self._config, cluster_key()
        with_module = not isinstance(model, str)  # an nn.Module: LLM has checked
        one_process = netstack.open(config.scheme, key=key).in_process
        here = one_process or with_module
        wanted = {
            "compute": 0 if here else config.replicas,
            "prefill": 0 if here else config.prefill_workers,
            "memory": 0 if one_process else config.memory_workers,
        }
        self._launcher = launcher = open_launcher(config, key, wanted)
        # Memory workers of one host run at the same time, the compute worker while they rest. In one process all share
        # torch's threads: those are left as they are.
        threads = [
            config.memory_threads or (0 if one_process else launcher.share("memory", index))
            for index in range(config.memory_workers)
        ]
        for index in range(config.memory_workers):
            worker = ThreadWorker("memory", index) if one_process else launcher.start("memory", index, threads[index])
            self._members.append(_Member(worker))
        extra = (model,) if with_module else ()
        cores = config.compute_threads
        for role, count in (("compute", config.replicas), ("prefill", config.prefill_workers)):
            for index in range(count):
                worker = ThreadWorker(role, index, *extra) if here else launcher.start(role, index, cores)
                self._members.append(_Member(worker))
        for member, address in zip(self._members, config.addresses, strict=False):
            start = StartMemory(
                scheme=config.scheme,
                address=address or member.handle.place,
                key=launcher.key,
                threads=threads[member.handle.index],
                trace=self.tracer.on,
            )
            self._send(member, start)
        deadline = time.monotonic() + config.start_timeout_s
        urls = []
        for member in self._members[: config.memory_workers]:
            ready = self._await([member], MemoryReady, deadline - time.monotonic(), self._start_limit)
            urls.append(ready.url)
        weights = self._weigh(deadline)
        for member in self._compute + self._prefill:
            own_key = key if here else launcher.key
            self._send(member, self._start_compute("" if with_module else model, own_key, urls, weights, member.handle))
        self._close_ring(deadline)
        on_progress("starting workers", 1, 1)
        first, *_ = [self._await_compute(m, deadline, on_progress) for m in self._compute]
        for member in self._prefill:  # one after the other: they join the memory workers in this order
            self._send(member, Connect())
            self._await_compute(member, deadline, on_progress)
        return first

    def _close_ring(self, deadline: float) -> None:
        """Tell every replica where the next one is."""
        replicas = self._compute if len(self._compute) > 1 else []
        urls = [self._await([m], RingUrl, deadline - time.monotonic(), self._start_limit).url for m in replicas]
        for member, url in zip(replicas, urls[1:] + urls[:1], strict=True):
            self._send(member, RingPeer(url=url))

    def _weigh(self, deadline: float) -> list[float]:
        """The memory workers' parts of the work. All measure at once, as they will read at once."""
        config, memory = self._config, self._members[: self._config.memory_workers]
        if config.memory_weights != MEASURED:
            return config.weights
        for member in memory:
            self._send(member, AskRate())
        answers = [self._await([m], Rate, deadline - time.monotonic(), self._start_limit) for m in memory]
        rates = [a.read_bytes_s for a in answers]
        weights = weights_of(rates)
        texts = [f"{w:g} ({r / 1e9:.1f} GB/s)" for w, r in zip(weights, rates, strict=True)]
        log.info("--memory-weights measured: %s", ", ".join(texts))
        return weights

    def _start_compute(
        self, model: str, key: bytes, urls: list[str], weights: list[float], handle: WorkerHandle
    ) -> StartCompute:
        c = self._config
        return StartCompute(
            model=model,
            dtype=c.dtype,
            trust_remote_code=c.trust_remote_code,
            max_model_len=c.max_model_len,
            max_rows=c.max_rows,
            max_num_seqs=c.max_num_seqs,
            num_batches=c.most_batches,
            replica=handle.index,
            replicas=c.replicas,
            prefill_workers=c.prefill_workers,
            block_size=c.block_size,
            kv_bytes=c.kv_bytes(),
            overlap=c.overlap,
            deterministic=c.deterministic,
            backend=c.attention,
            gemm=c.gemm,
            threads=c.compute_threads,
            scheme=c.scheme,
            address=handle.place,
            key=key,
            memory_urls=urls,
            memory_weights=weights,
            partition=c.partition,
            start_timeout_s=c.start_timeout_s,
            step_timeout_s=c.step_timeout_s,
            trace=self.tracer.on,
        )

    def _await_compute(
        self, member: _Member, deadline: float, on_progress: Callable[[str, int, int], None]
    ) -> ComputeReady:
        while True:
            left = deadline - time.monotonic()
            message = self._await([member], Progress | ComputeReady, left, self._start_limit)
            if isinstance(message, ComputeReady):
                return message
            if member is self._compute[0]:  # they all do the same
                on_progress(message.stage, message.done, message.total)

    def _send(self, member: _Member, message: Any) -> None:
        try:
            member.link.send(message)
        except LinkClosedError:
            raise self._lost(member) from None

    def _await(self, wanted: list[_Member], kind: Any, timeout_s: float, what: str) -> Any:
        """The next ``kind`` from any of ``wanted``. A death or failure of any worker meanwhile ends the pools."""
        deadline = time.monotonic() + timeout_s
        while True:
            for member in wanted:
                for message in member.inbox:
                    if isinstance(message, kind):
                        member.inbox.remove(message)
                        return message
            poller = select.poll()
            for member in self._members:
                poller.register(member.link, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready:
                self.fail()
                raise WorkerError(f"{', '.join(m.name for m in wanted)} took too long {what}")
            for member in self._members:
                if member.link.fileno() in ready:
                    member.inbox.append(self._receive(member))

    def _receive(self, member: _Member) -> Any:
        try:
            message = member.link.recv(timeout_s=STATS_S)
        except LinkClosedError:
            raise self._lost(member) from None
        if isinstance(message, Failed):
            raise self._failed(member, message)
        return message

    def _failed(self, member: _Member, message: Failed) -> Exception:
        if message.user_error:
            self.close()
            where = "--memory-addresses: " if member not in self._compute and self._config.memory_addresses else ""
            return ValueError(where + message.text)
        # A worker often fails because another one died or failed: then that one is the news.
        others = sorted((m for m in self._members if m is not member), key=lambda m: m.handle.fate() is None)
        deadline = time.monotonic() + CAUSE_S
        for other in others:
            if message.by_peer or other.handle.fate() is not None:
                if (cause := self._cause(other, deadline)) is not None:
                    message = cause
                elif other.handle.fate() is not None:
                    return self._lost(other)
        self.fail()
        return WorkerError(message.text)

    def _cause(self, member: _Member, deadline: float) -> Failed | None:
        """What ``member`` says about a failure of its own, if it is about to."""
        while True:
            try:
                message = member.link.recv(timeout_s=max(0.0, deadline - time.monotonic()))
            except (LinkClosedError, TimeoutError):
                return None
            if isinstance(message, Failed):
                return None if message.by_peer else message

    def _lost(self, member: _Member) -> WorkerError:
        deadline = time.monotonic() + 1.0
        while member.handle.fate() is None and time.monotonic() < deadline:
            threading.Event().wait(0.01)  # the link ends a moment before the process can be waited for
        fate = member.handle.fate() or "closed its control link"
        self.fail()
        return WorkerError(f"{member.name} {fate}; its pool cannot go on: create the engine again")
