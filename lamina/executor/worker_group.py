"""The workers of one engine: started and loaded once, connected as often as needed.

Each Connect begins an epoch. WorkerRegistry reports workers that are lost meanwhile. The other workers keep their
state, and may be connected again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from lamina import netstack
from lamina.config.conflicts import NN_MODULE, conflict_text
from lamina.config.engine_config import EngineConfig
from lamina.config.topology import TopologyOptions
from lamina.env import cluster_key
from lamina.protocol.control import (
    Address,
    ComputeReady,
    Connect,
    LinkClosedError,
    Loaded,
    MemoryReady,
    Progress,
    Rate,
    RateRequest,
    StartCompute,
    StartMemory,
    TransferPeer,
)
from lamina.protocol.executor import Clock
from lamina.protocol.offload_messages import StoredPages
from lamina.protocol.prefix_fetch import can_fetch_prefixes, stored_prefix_reader
from lamina.protocol.step_plan import BindRequest, SurvivingKv
from lamina.utils.state_machine import StateMachine

from .degraded_replicas import DegradedReplicas
from .kv_parity import parity_peers
from .kv_storage import KvStorage
from .launchers import Launcher, WorkerHandle, open_launcher
from .launchers.local import ThreadWorker
from .load_balance import weights_across_ranks
from .memory_worker_slots import MAX_MIGRATION_WORKERS, transfer_peers
from .rendezvous import RendezvousState, check_same_model, merged_ready, num_weight_copies, prefill_connections
from .spare_workers import SpareWorkers
from .states import GROUP_TRANSITIONS, GroupState
from .worker_registry import RegisteredWorker, WorkerRegistry

log = logging.getLogger(__name__)


class WorkerGroup:
    """All workers of one engine. Call ``start`` once, ``connect`` for every epoch. Waits end by --start-timeout-s."""

    def __init__(
        self,
        config: EngineConfig,
        registry: WorkerRegistry,
        on_progress: Callable[[str, int, int], None],
        *,
        trace: bool = False,
        clock: Clock = time.monotonic,
        launch: Callable[..., Launcher] = open_launcher,
    ) -> None:
        """``registry``: empty so far. ``trace``: whether workers record spans; ``launch``: see open_launcher."""
        self._config, self._registry, self._on_progress = config, registry, on_progress
        self._trace, self._clock, self._launch_by = trace, clock, launch
        self._incarnation = secrets.token_hex(8)  # part of all workers' names; unique to this engine
        self._one_process = netstack.in_process(config.launch.scheme)
        self._starting = f"to start (--start-timeout-s {config.deadlines.start_timeout_s:g})"
        self._deadline = 0.0
        self.launcher: Launcher | None = None
        self._compute_key = b""
        self._model: Any = None
        self.topology = config.topology  # with memory workers' weights, once they are measured
        self._urls = WeakKeyDictionary[RegisteredWorker, str]()  # of memory workers
        self._loaded = WeakKeyDictionary[RegisteredWorker, Loaded]()  # of compute and prefill workers
        self._state = StateMachine(GroupState.CREATED, GROUP_TRANSITIONS)
        self._started: dict[tuple[str, int], int] = {}  # role and index -> workers started for the place, less one
        self._size = config.topology.tensor_parallel_size  # ranks of a replica
        self._names = registry.worker_names
        self._keys = WeakKeyDictionary[WorkerHandle, bytes]()  # memory workers on loan have keys of their own
        self.storage = KvStorage(config, self._incarnation)
        self.spare_workers = SpareWorkers(self, registry, config.launch.num_spares)
        self.degraded = DegradedReplicas(config, registry, self.start_extra, clock)
        # Known after the first ``connect``: by rank, KV memory of its memory workers and the BindRequest of the first
        # one. And the memory workers' attention backend.
        self.kv_bytes: list[list[int]] = []
        self.memory_binds: list[BindRequest] = []
        self.backend = ""
        self.epoch = 0

    def start(self, model: Any) -> None:
        """Start all workers, and have them load ``model``: path, hub id, or an nn.Module, which then runs in this
        process.

        Raises WorkersLostError, and ValueError for what a user can correct.
        """
        if self._config.launch.spare_compute and not isinstance(model, str):
            raise ValueError(conflict_text("--spare-compute", NN_MODULE))
        self._model = model
        self._state.enter(GroupState.OPENING)
        self._begin()
        self._on_progress("starting workers", 0, 1)
        for phase in (self._launch, self._open_memory, self._measure_memory_rates, self._load):
            phase()

    def connect(self, keep: Sequence[SurvivingKv] | None = None, *, copies_kv: bool = False) -> ComputeReady:
        """Connect all workers under a new epoch. No step may be in flight. ``keep``: the KV that stays; None: all.
        ``copies_kv``: connect memory workers to each other, also if none migrates otherwise. Returns the merged replies
        of compute and prefill workers.

        Raises WorkersLostError, and ValueError for what a user can correct.
        """
        self._state.enter(GroupState.CONNECTING)
        self._registry.begin_epoch(self.next_epoch())
        self._begin()
        readies: dict[str, ComputeReady] = {}
        self._connect_memory(keep, copies_kv=copies_kv or self._config.migrates_stripes)
        self._connect_compute(readies)
        self._connect_prefill(readies, None if keep is None else [])  # unfinished prompts begin anew
        stored = [self._answer(m, StoredPages) for m in self._registry.memory if self.storage.is_enabled]
        check_same_model(readies)
        ranks = list(readies.values())[: self._size]
        self.kv_bytes, self.backend = [ready.kv_bytes for ready in ranks], ranks[0].summary.get("attention", "")
        self.memory_binds = [ready.bind for ready in ranks if ready.bind is not None]
        log.info(
            "epoch %d: %s", self.epoch, ", ".join(f"{m.label} is pid {m.handle.pid or '?'}" for m in self._registry)
        )
        self._state.enter(GroupState.CONNECTED)
        ready = merged_ready([*readies.values()], self.topology)
        ready = msgspec.structs.replace(ready, replicas=self._rendezvous_state.replicas)
        return self.storage.complete_facts(ready, self.identity, stored)

    def next_epoch(self) -> int:
        """Increase the epoch and return its number."""
        self.epoch += 1
        return self.epoch

    def can_replace(self, worker: RegisteredWorker) -> bool:
        """Return whether another worker can be started in its place. A thread cannot: it might continue to run."""
        launcher = self.launcher
        return not (launcher is None or isinstance(worker.handle, ThreadWorker)) and launcher.can_replace(worker.handle)

    def has_answered(self, worker: RegisteredWorker) -> bool:
        """Return whether the worker has replied to its first message."""
        return worker in self._urls or worker in self._loaded

    def replace(self) -> None:
        """Start and load workers in the places of lost, fenced ones, except replicas without which decoding continues:
        these load without a wait. May be called again after an exception. Raises as ``start`` does.
        """
        self._state.enter(GroupState.REPLACING)
        self._begin()
        self._on_progress = lambda stage, done, total: None  # the progress of a start is no longer shown
        self._loaded.update(self.degraded.rejoin())
        for lost in [m for m in self._registry if m in self._registry.lost_workers]:
            if lost.unreachable_peer and self.launcher is not None:
                self.launcher.avoid_host(lost.handle.role, lost.handle.index)
            spare = self.spare_workers.take_for(lost, self._size)
            if spare is None and self.degraded.drop_replica(lost):
                continue
            spare = spare or self.spare_workers.take_for(lost, self._size, self._deadline - self._clock())
            member = spare or self._registry.prepare(
                self._worker_name(self._start_one(lost.handle.role, lost.handle.index))
            )
            self._registry.replace(lost, member)
            if spare is None:
                self._send_start(member)
        self._await_starts()

    def plan_resize(self, count: int, stay: Sequence[int] = ()) -> bool:
        """Prepare the launcher for ``count`` memory workers, and return whether they can serve. ``stay``: the staying
        ones' numbers, in order.
        """
        launcher = None if self._one_process or self._config.topology.may_borrow else self.launcher
        if launcher is not None and stay:
            launcher.keep_workers("memory", stay)
        return launcher is None or launcher.set_capacity("memory", count)

    def set_topology(
        self, topology: TopologyOptions, kv_bytes: list[list[int]], coming: Mapping[RegisteredWorker, str]
    ) -> None:
        """Use another set of memory workers, with the URLs of ``coming`` ones. The next ``connect`` sends it to all."""
        self.topology, self.kv_bytes = topology, kv_bytes
        self._urls.update(coming)
        self._config = msgspec.structs.replace(self._config, topology=topology)

    def address_of(self, worker: RegisteredWorker) -> Address:
        """Return the address of a memory worker."""
        return Address(self._urls[worker], self._name(worker.handle), self._keys.get(worker.handle, b""))

    def start_borrowed(self, handle: WorkerHandle, key: bytes) -> StartMemory:
        """Return the first message to a memory worker on loan, whose peers reach it by ``key``."""
        self._keys[handle], self._names[handle] = key, f"guest-{secrets.token_hex(4)}-{self._incarnation}"
        return self._start_memory(handle)

    def close(self) -> None:
        """End the spare workers, and release what the launcher holds. Idempotent."""
        self.spare_workers.close()
        self.degraded.close()
        if self.launcher is not None:
            self.launcher.close()

    def start_extra(self, role: str, index: int) -> RegisteredWorker:
        """Start a worker that is not yet a member, and have it load. Raises OSError, ValueError."""
        return self.prepare_extra(self._start_one(role, index))

    def prepare_extra(self, handle: WorkerHandle) -> RegisteredWorker:
        """Send a started worker that is no member the order to load."""
        spare = self._registry.prepare(self._worker_name(handle))
        first = self._first_message(spare)
        if isinstance(first, StartCompute):  # its link is not read for now, and Progress must not block it
            first = msgspec.structs.replace(first, progress=False)
        with suppress(LinkClosedError):  # its end is noticed when it is to take a place
            spare.link.send(first)
        return spare

    def _begin(self) -> None:
        self._deadline = self._clock() + self._config.deadlines.start_timeout_s

    def _launch(self) -> None:
        config, counts = self._config, self._config.topology.num_workers
        module = None if isinstance(self._model, str) else self._model  # checked by LLM
        here = self._one_process or module is not None
        threaded = {"memory": self._one_process, "compute": here, "prefill": here}
        wanted = {role: 0 if threaded[role] else count for role, count in counts.items()}
        self.launcher = launcher = self._launch_by(config, key := cluster_key(), wanted)
        self._compute_key = key if here else launcher.key
        for role, count in counts.items():
            for index in range(count):
                extra = (module,) if module is not None and role != "memory" else ()
                self._started[role, index] = int(threaded[role]) - 1
                thread = ThreadWorker(role, index, *extra) if threaded[role] else None
                self._registry.add(thread or self._worker_name(self._start_one(role, index)))

    def _start_one(self, role: str, index: int) -> WorkerHandle:
        if self._one_process:
            return ThreadWorker(role, index)
        assert self.launcher is not None
        return self.launcher.start(role, index, threads=self.threads(role, index))

    def _worker_name(self, handle: WorkerHandle) -> WorkerHandle:
        place = handle.role, handle.index
        self._started[place] = before = self._started.get(place, -1) + 1
        self._names[handle] = f"{place[0]}-{place[1]}-{self._incarnation}" + f"-{before}" * bool(before)
        return handle

    def _open_memory(self) -> None:
        """Send memory workers the order to listen, and wait for them."""
        for member in self._registry.memory:
            self._send_start(member)
        try:
            self._await_starts()
        except ValueError as e:
            named = self._config.launch.memory_addresses
            raise type(e)(f"--memory-addresses: {e}" if named else str(e)) from None

    def _measure_memory_rates(self) -> None:
        """Measure the memory workers' weights, if configured. All measure at once, as they will later read.

        With KV sparsity they stay equal, since each worker needs whole heads.
        """
        if not self.topology.measures_weights or self._config.kv.is_sparse:
            return
        for member in self._registry.memory:
            self._registry.send(member, RateRequest())
        size, rates = self._size, [self._answer(member, Rate).read_bytes_s for member in self._registry.memory]
        weights = tuple(weights_across_ranks(rates, size))
        self.topology = msgspec.structs.replace(self.topology, memory_weights=weights)

    def _load(self) -> None:
        """Load the model on all compute and prefill workers at the same time."""
        self._state.enter(GroupState.LOADING)
        for member in self._registry.compute + self._registry.prefill:
            self._send_start(member)
        self._on_progress("starting workers", 1, 1)
        self._await_starts()

    def _send_start(self, worker: RegisteredWorker) -> None:
        self._registry.send(worker, self._first_message(worker))

    def _first_message(self, worker: RegisteredWorker) -> StartMemory | StartCompute:
        path, handle = self._model if isinstance(self._model, str) else "", worker.handle
        return self._start_memory(handle) if handle.role == "memory" else self._start_compute(path, handle)

    def _await_starts(self) -> None:
        """Wait for the replies of all workers that have not yet replied to their first message."""
        for member in self._registry.memory:
            if member not in self._urls:
                self._urls[member] = self._answer(member, MemoryReady).url
        if self._state.state is GroupState.OPENING:  # the other workers have no first message yet
            return
        for member in self._registry.compute + self._registry.prefill:
            if member not in self._loaded:
                self._loaded[member] = self._answer(member, Loaded)

    def _connect_memory(self, keep: Sequence[SurvivingKv] | None, *, copies_kv: bool) -> None:
        """Send memory workers the order to close old channels, and to wait for the peers of this epoch."""
        left, memory = None if keep is None else list(keep), self._registry.memory
        attending = self._attending
        fetch = self._registry.prefill if self._config.fetches_stored_kv else []
        readers = [stored_prefix_reader(self._name(m.handle)) for m in fetch]
        for member in memory:
            rank = member.handle.index % self._size
            joining = [
                self._name(m.handle) for m in self._registry.compute[rank :: self._size] + self._registry.prefill
            ]
            place = self.storage.config_for(member.handle.index, len(attending), self.identity)
            peers, own = list[TransferPeer](), self.address_of(member)
            if self.storage.is_per_host:
                peers = transfer_peers([self.address_of(m) for m in memory], own, len(memory))
            elif copies_kv:
                peers = transfer_peers(self._memory_of(rank), own, MAX_MIGRATION_WORKERS)
            message = Connect(
                epoch=self.epoch,
                joining_names=joining,
                surviving=left,
                storage=place,
                peers=peers,
                prefix_readers=readers if member in attending else [],
                parity_peers=parity_peers(self._memory_of(rank), own) if place and self.topology.kv_parity else [],
                start_timeout_s=self._config.deadlines.start_timeout_s,
            )
            self._registry.send(member, message)

    @property
    def identity(self) -> bytes:
        """The identity of the model; see kv.page_keys."""
        return self._loaded[self._registry.compute[0]].identity

    def _connect_compute(self, readies: dict[str, ComputeReady]) -> None:
        """Connect ranks, the ring of replicas, and replicas to the memory workers, one replica after the other."""
        for place, member in enumerate(self._registry.compute):
            rank = place % self._size
            own = self.kv_bytes[rank] if self.kv_bytes else []
            self._registry.send(
                member, self._rendezvous_state.connect_message(self.epoch, place, self._memory_of(rank), own)
            )
        for member in self._registry.compute:
            readies[member.label] = self._answer(member, ComputeReady)

    def _connect_prefill(self, readies: dict[str, ComputeReady], keep: list[SurvivingKv] | None) -> None:
        """Connect prefill workers after the replicas, one at a time."""
        for member in self._registry.prefill:
            meeting = Connect(
                epoch=self.epoch,
                replicas=self._rendezvous_state.replicas,
                memory_addresses=[self.address_of(m) for m in self._registry.memory],
                topology=self._prefill_topology,
                surviving=keep,
            )
            self._registry.send(member, meeting)
            readies[member.label] = self._answer(member, ComputeReady)
        there, topology, config = self._registry.prefill, self.topology, self._config
        ready, names = [readies[m.label] for m in there], [self._name(m.handle) for m in there]
        fetches = config.caches_prefixes and can_fetch_prefixes(ready, config.batching, topology.prefill_groups)
        memory = [self.address_of(m) for m in self._attending] if config.fetches_stored_kv else []
        loaded = [self._loaded[m] for m in there]
        for place, order in prefill_connections(topology, names, loaded, memory, fetches=fetches):
            self._registry.send(there[place], order)

    @property
    def _prefill_topology(self) -> TopologyOptions:
        """The topology as prefill workers have it, none of which is a rank."""
        return msgspec.structs.replace(self.topology, tensor_parallel_size=1)

    @property
    def _rendezvous_state(self) -> RendezvousState:
        there = self._registry.compute
        return RendezvousState(self.topology, [self._name(m.handle) for m in there], [self._loaded[m] for m in there])

    @property
    def _attending(self) -> list[RegisteredWorker]:
        """All memory workers but those that keep the parity of others."""
        memory = self._registry.memory
        return memory[: len(memory) - self.topology.num_parity]

    def _memory_of(self, rank: int) -> list[Address]:
        return self.topology.of_rank([self.address_of(m) for m in self._registry.memory], rank)

    def _answer(self, worker: RegisteredWorker, kind: Any) -> Any:
        """Wait for the message of ``kind`` that ``worker`` owes, and return it."""
        while True:
            left = self._deadline - self._clock()
            message = self._registry.wait_for([worker], Progress | kind, left, self._starting)
            if isinstance(message, kind):
                return message
            if worker is self._registry.compute[0]:  # all compute workers report the same stages
                self._on_progress(message.stage, message.done, message.total)

    def threads(self, role: str, index: int) -> int:
        """Return the number of threads of a worker; 0: all cores. Memory workers of one host run at the same time, the
        compute worker while they wait; several ranks also run at the same time. One process shares torch's threads,
        whose number is left as it is.
        """
        config, launcher = self._config, self.launcher
        if role != "memory" and (config.devices.compute_threads or self._size == 1):
            return config.devices.compute_threads
        chosen = config.devices.memory_threads if role == "memory" else 0
        return chosen or (0 if self._one_process or launcher is None else launcher.thread_count(role, index))

    def _start_memory(self, handle: WorkerHandle) -> StartMemory:
        config, index, own = self._config, handle.index, self._keys.get(handle, b"")
        named = config.launch.memory_addresses
        return StartMemory(
            scheme=config.launch.scheme,
            address=named[index] if named else handle.host,
            name=self._name(handle),
            key=own or (self.launcher.key if self.launcher else b""),
            threads=0 if own else self.threads("memory", index),
            devices=config.devices,
            device_number=self._gpu_number(handle),
            device_users=1 if handle.host else config.gpu_index("memory", self.topology.memory_workers),
            trace=self._trace,
        )

    def _start_compute(self, path: str, handle: WorkerHandle) -> StartCompute:
        config, prefill = self._config, handle.role == "prefill"
        ranks = 1 if prefill else self._size
        return StartCompute(
            path=path,
            model=config.model,
            kv=config.kv,
            batching=config.batching,
            topology=self._prefill_topology if prefill else self.topology,
            devices=config.devices,
            deadlines=config.deadlines,
            replica=handle.index // ranks,
            memory_ranks=self._size if prefill else 1,
            rank=handle.index % ranks,
            weight_copies=self._copies(handle),
            device_number=self._gpu_number(handle),
            threads=self.threads(handle.role, handle.index),
            scheme=config.launch.scheme,
            address=handle.host,
            name=self._name(handle),
            key=self._compute_key,
            trace=self._trace,
            needs_identity=self.storage.is_enabled,
            rotates_keys=self._config.overflow.truncates_context,
        )

    def _gpu_number(self, handle: WorkerHandle) -> int:
        """Return the GPU of a worker on this host. On other hosts the launcher gives each worker GPUs of its own."""
        return 0 if handle.host else self._config.gpu_index(handle.role, handle.index)

    def _copies(self, handle: WorkerHandle) -> int:
        """Return the number of weight copies on a worker's host, for the first worker there; else 0. It is 0 after a
        loss, too, as the other workers have theirs already.
        """
        if self._state.state is not GroupState.LOADING:
            return 0
        here = [m.handle for m in self._registry.compute + self._registry.prefill if m.handle.host == handle.host]
        return num_weight_copies([h.role for h in here], self.topology) if here[0] is handle else 0

    def _name(self, handle: WorkerHandle) -> str:
        """Return the name that a worker proves to its peers. No other worker ever has the same name."""
        return self._names.setdefault(handle, f"{handle.role}-{handle.index}-{self._incarnation}")
