"""Both pools as the engine sees them: started together, given steps, ended together. Every wait has a deadline."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from lamina import netstack
from lamina.config import weights_of
from lamina.env import cluster_key
from lamina.observe.collect import ROUND_TRIPS, Tracer
from lamina.observe.trace import Event, Recorder
from lamina.protocol.control import (
    AskClock,
    AskRate,
    AskStats,
    ClockTime,
    ComputeReady,
    Connect,
    MemoryReady,
    Progress,
    RankUrl,
    RankUrls,
    Rate,
    RingPeer,
    RingUrl,
    RunRound,
    StartCompute,
    StartMemory,
    Stats,
    StepDone,
)
from lamina.protocol.declare import MEASURED
from lamina.protocol.groups import Capacity, of_all_ranks
from lamina.protocol.options import EngineConfig, TopologyOptions

from .arrivals import Arrivals
from .counters import Counters
from .launcher import Launcher, WorkerHandle, open_launcher
from .local import ThreadWorker
from .members import Member, Members
from .same_model import check_alike

log = logging.getLogger(__name__)
STATS_S = 5.0
GRACE_S = 1.0  # a worker that waits for another one in vain knows more than we do: let it speak first


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
        self._members = Members(self._gather, self._after_end)
        self._incarnation = secrets.token_hex(8)  # part of all workers' names: no other engine's has it
        self._launcher: Launcher | None = None
        self._arrivals = Arrivals()
        self._batches = config.topology.most_batches
        self._chunks = [0] * config.topology.prefill_workers  # in flight, by prefill worker
        self._since = [0.0 for _ in self._chunks]  # when the first of them began to be the next one that is done
        self._lock = threading.Lock()  # one reader of the links at a time: run or stats
        self._counters = Counters(self._members)
        self._starting = f"to start (--start-timeout-s {config.deadlines.start_timeout_s:g})"
        self.tracer = Tracer(config.launching.trace or os.environ.get("LAMINA_TRACE", ""))
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
        self._arrivals.expect(new)
        for member in self._compute:
            self._members.send(member, new)

    def prefill(self, worker: int, new: RunRound) -> None:
        """See Wire."""
        if not self._chunks[worker]:
            self._since[worker] = time.monotonic()
        self._chunks[worker] += 1
        self._members.send(self._prefill[worker], new)

    def wait(self) -> StepDone:
        """See Wire."""
        start = self.tracer.recorder.now()
        with self._lock:
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
        owing = [member for member, chunks in zip(self._prefill, self._chunks, strict=True) if chunks]
        what = "a step" if steps else "a chunk of a prompt"
        if steps or not owing:
            owing = self._compute + owing
        done: StepDone = self._members.wait_for(
            owing, StepDone, limit + GRACE_S, f"for {what} (--step-timeout-s {limit:g})"
        )
        return done

    def _note(self, done: StepDone) -> None:
        """Steps of compute workers must not hide that a prefill worker hangs. One that has answered does not, however
        long the driver has not listened.
        """
        now, limit, first = time.monotonic(), self._config.deadlines.step_timeout_s, self._batches
        if done.batch >= first:
            self._chunks[done.batch - first] -= 1
            self._since[done.batch - first] = now
        for worker, member in enumerate(self._prefill):
            if self._chunks[worker] and now - self._since[worker] > limit + GRACE_S and not member.has_news:
                raise self._members.fail(
                    f"{member.name} took too long for a chunk of a prompt (--step-timeout-s {limit:g})"
                )

    def check(self) -> None:
        """Raises WorkerError where a worker has been lost; waits for nobody."""
        with self._lock:
            self._members.check()

    def stats(self) -> dict[str, dict[str, float]]:
        """The counters of every worker, by the names of ``pids``."""
        with self._lock:
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
        self._counters.ask()

    def take_stats(self) -> dict[str, dict[str, float]] | None:
        """See Counters.take."""
        return self._counters.take(*self._counters_limit)

    @property
    def _counters_limit(self) -> tuple[float, str]:
        limit_s = self._config.deadlines.step_timeout_s
        return limit_s + GRACE_S, f"to report its counters (--step-timeout-s {limit_s:g})"

    def close(self) -> None:
        """End all workers: ask, wait, then by force. Idempotent."""
        self._members.close()

    def _gather(self, limit_s: float) -> None:
        self.tracer.gather({m.label: m.link for m in self._members}, limit_s)

    def _after_end(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
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

    @property
    def _compute(self) -> list[Member]:
        return self._members.role("compute")

    @property
    def _prefill(self) -> list[Member]:
        return self._members.role("prefill")

    def _start(self, model: Any, on_progress: Callable[[str, int, int], None]) -> ComputeReady:
        config, key = self._config, cluster_key()
        module = None if isinstance(model, str) else model  # an nn.Module: LLM has checked
        one_process = netstack.in_process(config.launching.scheme)
        here = one_process or module is not None
        counts = config.topology.counts
        threaded = {"memory": one_process, "compute": here, "prefill": here}
        wanted = {role: 0 if threaded[role] else count for role, count in counts.items()}
        self._launcher = launcher = open_launcher(config, key, wanted)
        for role, count in counts.items():
            for index in range(count):
                extra = (module,) if module is not None and role != "memory" else ()
                threads = self._threads(role, index, one_process=one_process)
                worker = ThreadWorker(role, index, *extra) if threaded[role] else launcher.start(role, index, threads)
                self._members.add(worker)
        deadline = time.monotonic() + config.deadlines.start_timeout_s
        urls = self._start_memory(one_process=one_process, deadline=deadline)
        topology = self._weigh(deadline)
        path, own_key = model if module is None else "", key if here else launcher.key
        for member in self._compute + self._prefill:
            threads = self._threads(member.handle.role, member.handle.index, one_process=one_process)
            self._members.send(member, self._start_compute(path, own_key, urls, topology, threads, member.handle))
        self._introduce_ranks(deadline)
        self._close_ring(deadline)
        on_progress("starting workers", 1, 1)
        readies = {m.label: self._await_compute(m, deadline, on_progress) for m in self._compute}
        for member in self._prefill:  # one after the other: they join the memory workers in this order
            self._members.send(member, Connect())
            readies[member.label] = self._await_compute(member, deadline, on_progress)
        check_alike(readies)
        return self._together(list(readies.values())[: config.topology.tensor_parallel_size])

    def _threads(self, role: str, index: int, *, one_process: bool) -> int:
        """Memory workers of one host run at the same time, the compute worker while they rest; its ranks, if it has
        several, at the same time too. In one process all share torch's threads: those are left as they are. 0 = all
        cores.
        """
        config, launcher = self._config, self._launcher
        if role != "memory" and (config.devices.compute_threads or config.topology.tensor_parallel_size == 1):
            return config.devices.compute_threads
        chosen = config.devices.memory_threads if role == "memory" else 0
        return chosen or (0 if one_process or launcher is None else launcher.share(role, index))

    def _start_memory(self, *, one_process: bool, deadline: float) -> list[str]:
        """Where they listen."""
        config, launcher, memory, urls = self._config, self._launcher, self._members.role("memory"), list[str]()
        for member, address in zip(memory, config.addresses, strict=True):
            start = StartMemory(
                scheme=config.launching.scheme,
                address=address or member.handle.place,
                name=self._name("memory", member.handle.index),
                key=launcher.key if launcher else b"",
                threads=self._threads("memory", member.handle.index, one_process=one_process),
                devices=config.devices,
                device_number=self._gpu_number(member.handle),
                device_users=1 if member.handle.place else config.gpu_number("memory", config.topology.memory_workers),
                trace=self.tracer.on,
            )
            self._members.send(member, start)
        try:
            for member in memory:
                left = deadline - time.monotonic()
                urls.append(self._members.wait_for([member], MemoryReady, left, self._starting).url)
        except ValueError as e:
            raise ValueError(f"--memory-addresses: {e}" if config.launching.memory_addresses else str(e)) from None
        return urls

    def _introduce_ranks(self, deadline: float) -> None:
        """Tell the ranks of every replica where they are."""
        size = self._config.topology.tensor_parallel_size
        for first in range(0, len(self._compute) if size > 1 else 0, size):
            ranks = self._compute[first : first + size]
            urls = self._urls(ranks, RankUrl, deadline)
            for member in ranks:
                self._members.send(member, RankUrls(urls=urls, names=self._names(ranks)))

    def _close_ring(self, deadline: float) -> None:
        """Tell every replica where the next one is, each rank for itself."""
        size = self._config.topology.tensor_parallel_size
        for rank in range(size if self._config.topology.replicas > 1 else 0):
            replicas = self._compute[rank::size]
            urls = self._urls(replicas, RingUrl, deadline)
            names, last = self._names(replicas), len(replicas) - 1
            for i, member in enumerate(replicas):
                behind = 0 if i == last else i + 1
                self._members.send(member, RingPeer(url=urls[behind], name=names[behind], before=names[i - 1]))

    def _name(self, role: str, index: int) -> str:
        """Which a worker proves to its peers."""
        return f"{role}-{index}-{self._incarnation}"

    def _names(self, members: list[Member]) -> list[str]:
        return [self._name(m.handle.role, m.handle.index) for m in members]

    def _urls(self, members: list[Member], kind: Any, deadline: float) -> list[str]:
        """What each of ``members`` says in a message of ``kind``."""
        return [self._members.wait_for([m], kind, deadline - time.monotonic(), self._starting).url for m in members]

    def _together(self, ranks: list[ComputeReady]) -> ComputeReady:
        """What all ranks of a replica have said, as one."""
        for rank, ready in enumerate(ranks if len(ranks) > 1 else []):
            (q_heads, kv_heads), size = ready.summary["heads"][0], ready.summary["weight_bytes"]
            own = [f"{rank * n}..{(rank + 1) * n - 1}" for n in (q_heads, kv_heads)]
            holders = ", ".join(str(w) for w in sorted({w for of in ready.holders for w in of}))
            log.info(
                "rank %d: query heads %s, KV heads %s of layer 0 on memory worker %s, %.1f MB of weights",
                rank, *own, holders, size / 1e6,
            )  # fmt: skip
        if len(ranks) > 1:
            log.info("--collective %s: %s", self._config.topology.collective, ranks[0].summary["collective"])
        capacities = [Capacity(r.windows, r.lanes, r.stripe, r.num_blocks, r.holders) for r in ranks]
        return msgspec.structs.replace(ranks[0], **of_all_ranks(capacities)._asdict())

    def _weigh(self, deadline: float) -> TopologyOptions:
        """With the memory workers' parts of the work. All measure at once, as they will read at once."""
        config, memory = self._config, self._members.role("memory")
        topology = config.topology
        if topology.memory_weights != MEASURED:
            return topology
        for member in memory:
            self._members.send(member, AskRate())
        answers = [self._members.wait_for([m], Rate, deadline - time.monotonic(), self._starting) for m in memory]
        size, rates = topology.tensor_parallel_size, [a.read_bytes_s for a in answers]
        rates = [min(rates[w - w % size :][:size]) for w in range(len(rates))]  # the same for every rank
        weights = weights_of(rates)
        texts = [f"{w:g} ({r / 1e9:.1f} GB/s)" for w, r in zip(weights, rates, strict=True)]
        log.info("--memory-weights measured: %s", ", ".join(texts))
        return msgspec.structs.replace(topology, memory_weights=tuple(weights))

    def _start_compute(
        self, path: str, key: bytes, urls: list[str], topology: TopologyOptions, threads: int, handle: WorkerHandle
    ) -> StartCompute:
        config, rank = self._config, handle.index % topology.tensor_parallel_size
        return StartCompute(
            path=path,
            model=config.model,
            kv=config.kv,
            batching=config.batching,
            topology=topology,
            devices=config.devices,
            deadlines=config.deadlines,
            number=handle.index // topology.tensor_parallel_size,
            rank=rank,
            copies=self._copies(handle),
            device_number=self._gpu_number(handle),
            threads=threads,
            scheme=config.launching.scheme,
            address=handle.place,
            name=self._name(handle.role, handle.index),
            key=key,
            memory_urls=topology.of_rank(urls, rank),
            memory_names=topology.of_rank(self._names(self._members.role("memory")), rank),
            joining=self._names(self._compute[rank :: topology.tensor_parallel_size] + self._prefill),
            trace=self.tracer.on,
        )

    def _gpu_number(self, handle: WorkerHandle) -> int:
        """See EngineConfig.gpu_number. On other hosts the launcher gives each worker GPUs of its own."""
        return 0 if handle.place else self._config.gpu_number(handle.role, handle.index)

    def _copies(self, handle: WorkerHandle) -> int:
        """Of the weights on a worker's host, if it is the first one there that has them."""
        here = [m.handle for m in self._compute + self._prefill if m.handle.place == handle.place]
        return -(-len(here) // self._config.topology.tensor_parallel_size) if here[0] is handle else 0

    def _await_compute(
        self, member: Member, deadline: float, on_progress: Callable[[str, int, int], None]
    ) -> ComputeReady:
        while True:
            left = deadline - time.monotonic()
            message = self._members.wait_for([member], Progress | ComputeReady, left, self._starting)
            if isinstance(message, ComputeReady):
                return message
            if member is self._compute[0]:  # they all do the same
                on_progress(message.stage, message.done, message.total)
