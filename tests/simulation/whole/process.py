"""The processes of a simulated host, each of them the shipped worker; and the host as the driver sees it: it starts
them, and has their control links.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lamina.config.engine_config import EngineConfig
from lamina.config.resolve import max_sequence_length
from lamina.executor.worker_registry import FROM_WORKERS, Link
from lamina.observe.trace import FLIP_BIT, NullRecorder
from lamina.ops import gemm
from lamina.protocol.control import Failed, LinkClosedError, StartCompute, StartMemory
from lamina.protocol.reshard import TerminationNotice
from lamina.workers.compute.main import ComputeServer
from lamina.workers.compute.model_server import MESSAGES, CutModel, ModelServer
from lamina.workers.memory.main import FROM_DRIVER, MemoryServer
from lamina.workers.memory.memory_worker import MemoryWorker
from lamina.workers.prefill.main import PrefillServer
from lamina.workers.runtime import Runtime

from .baton import Baton, BatonCondition, BatonQueue, Slain
from .integers import BITS, IntegerModel
from .network import SimChannel, SimControl, SimFabric, SimPipe

KEY = b"k" * 32
LONGEST_S = 0.005  # that a message takes
AT_ONCE = 0.5  # of messages take no time
Place = tuple[str, int]  # role and number
DIES, STOPS, CUT = "dies", "stops", "cut"  # what may happen to a process, and to the channel of a call
HANGS, TOLD = "hangs", "told"  # one of its threads does; it is asked to end, and goes on until its KV is elsewhere
FLIPS = "flips"  # a bit of the KV that a memory worker is about to attend
# By the place, the message after which calls of its processes count, or "", and the number of the call.
Strikes = Mapping[tuple[Place, str, int], str]
GONE_S = 10.0  # for workers to follow their driver


class EngineDied(BaseException):
    """The driver's process was killed. Not an Exception, so that no handler takes it."""


class SimDriver:
    """The driver's process. While it ``counts`` the calls of its control links, it is killed at one of them."""

    def __init__(self, dies_at: int) -> None:
        """``dies_at``: the number of that call; 0 = it lives."""
        self._dies_at, self._calls, self.counts = dies_at, 0, False

    @property
    def dead(self) -> bool:
        """Returns whether it was killed."""
        return 0 < self._dies_at <= self._calls

    def act(self) -> None:
        """A call. Raises EngineDied at its last one, and at any later call."""
        self._calls += self.counts
        if self.dead:
            raise EngineDied

    def passed(self, message: object) -> None:
        """A message of its links."""


class Damaging(NullRecorder):
    """Has a memory worker damage its KV once another worker wants it."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__()
        self._process, self.wanted, self.count = process, False, 0

    def is_due(self, event: int) -> bool:
        return self.wanted and event == FLIP_BIT

    def on_failpoint_passed(self, event: int) -> None:
        """A bit of K has changed, in one block. K is the code of a position here, which is found all the same: so V of
        that block changes, too.
        """
        self.wanted, self.count = False, self.count + 1
        store = self._process.memory.store
        for kv in (piece.kv for layer in (store.layers if store else ()) for piece in layer):
            for block in {int(at[0]) for at in ((kv.k.abs() != 1.0) & (kv.k != 0.0)).nonzero()}:
                kv.v[block, 0, 0, 0] += 1.0


@dataclass(frozen=True)
class _LoadedIntegers:
    """The facts of the model, and the model, of which a stage lets go."""

    model: Any
    config: IntegerModel
    eos_token_ids: tuple[int, ...]


class _Integers(ModelServer):
    """A loader that loads nothing but the model of integers."""

    module: IntegerModel

    def load_and_cut(self) -> CutModel:
        """In slices it is already."""
        model = self.module.of_rank(self.start.rank, self.start.topology.tensor_parallel_size)
        max_len = max_sequence_length(self.start.model.max_model_len, 1 << BITS)
        partition = self._partition(model.layers, max_len)
        loaded = _LoadedIntegers(model, model, model.eos_token_ids)
        part, backend = self.own_slices(model, len(model.layers)), gemm.get("torch", 1)
        return CutModel(part, loaded, model.layers, torch.float32, max_len, partition, backend, model.recurrent)

    def compile(self, cut: CutModel, group: Any = None) -> IntegerModel:
        """Returns the program as it is, but for the other ranks that its slices meet."""
        model: IntegerModel = cut.program
        model.group = group
        return model


class IntegerComputeServer(_Integers, ComputeServer):
    """The compute worker of a simulation."""


class IntegerPrefillServer(_Integers, PrefillServer):
    """The prefill worker of a simulation."""


class SimProcess:
    """A worker's process, and its handle. Each call of the network and of the control link counts."""

    host = ""
    sock: Any = None

    def __init__(self, host: SimHost, role: str, index: int, pid: int) -> None:
        self.role, self.index, self.pid = role, index, pid
        self.sim_host, self._fate = host, ""
        self.ended = self.was_hit = self.is_stopped = self.hangs = False
        self.fabric: SimFabric | None = None
        self.server: Any = None
        self.damaging = Damaging(self)
        to, back = (SimPipe(host.baton, host.delay_s) for _ in range(2))
        messages = FROM_DRIVER if role == "memory" else MESSAGES
        self._link = SimControl(host.baton, messages, (to, back), self)
        self.control = SimControl(host.baton, FROM_WORKERS, (back, to), host.driver)  # the driver's end
        self.start(self._serve, f"{role}-{index}")

    @property
    def memory(self) -> MemoryWorker:
        """The worker that it has loaded."""
        worker: MemoryWorker = self.server.worker
        return worker

    def start(self, work: Callable[[], None], name: str) -> None:
        """One of its threads."""
        self.sim_host.baton.start(work, f"{name} of pid {self.pid}", self)

    def open(self, scheme: str, *, key: bytes, gpu: int | None = None, device: str = "") -> SimFabric:
        """Its network, whatever the scheme."""
        self.fabric = SimFabric(key, self.sim_host.baton, self.sim_host.delay_s, self)
        return self.fabric

    def act(self, channel: SimChannel | None = None) -> None:
        """A call, of ``channel`` or of the control link: its last one, perhaps."""
        if self.ended:
            raise Slain
        how = self.sim_host.hit_of(self)
        self.was_hit = self.was_hit or how in (DIES, STOPS, HANGS, TOLD, FLIPS)
        if how == CUT and channel is not None:
            self.sim_host.cuts += 1
            channel.cut()
        elif how == STOPS:
            self.is_stopped = True
            self.sim_host.baton.wait(lambda: not self.is_stopped)
        elif how == HANGS:
            self.hangs = True
            self.sim_host.baton.wait(lambda: not self.hangs)
        elif how == FLIPS:
            self.damaging.wanted = True
        elif how == TOLD and self.role == "memory":
            with suppress(LinkClosedError):
                self._link.send(TerminationNotice())
        elif how == DIES:
            self.kill()
            raise Slain

    def passed(self, message: object) -> None:
        """A message that it has, or has sent. Raises AssertionError where it has failed: another one would go on."""
        assert not isinstance(message, Failed), f"it fails: {message.text}"
        self.sim_host.passed(self, type(message).__name__)

    def exit_reason(self) -> str | None:
        return self._fate or None

    def join(self, timeout_s: float) -> None:
        if not self.sim_host.baton.wait(lambda: self.ended, timeout_s):
            self.kill()

    def kill(self) -> None:
        """Nothing that it does from here on reaches anybody."""
        self._end("was killed by SIGKILL")

    def _end_at_once(self, why: str) -> None:
        self._end("exited with status 1")
        raise Slain

    def _end(self, fate: str) -> None:
        if not self._fate:
            self._fate, self.ended = fate, True
            if self.fabric is not None:
                self.fabric.die()
            self._link.close()

    def _serve(self) -> None:
        try:
            start = self._link.recv()
        except LinkClosedError:
            self._end("exited with status 0")
            return
        baton = self.sim_host.baton
        around = Runtime(
            baton.clock, self.start, self.start, partial(BatonQueue, baton), self.open, partial(BatonCondition, baton),
            self._end_at_once,
        )  # fmt: skip
        if isinstance(start, StartMemory):
            self.server = MemoryServer(self._link, start, around)  # type: ignore[arg-type]
            self.server.trace = self.damaging
        elif isinstance(start, StartCompute):
            server = IntegerComputeServer if self.role == "compute" else IntegerPrefillServer
            self.server = server(self._link, start, self.sim_host.model, around)  # type: ignore[arg-type]
        self.server.run()
        self._end("exited with status 0")


class SimHost:
    """Launcher, and Links of the driver."""

    key = KEY

    def __init__(
        self, baton: Baton, rng: random.Random, model: IntegerModel, hits: Strikes, deaths: Sequence[int] = ()
    ) -> None:
        """``deaths``: of one driver after the other, the calls at which they are killed."""
        self.baton, self.model, self._rng, self._hits = baton, model, rng, hits
        self._deaths = deque(deaths)
        self.driver = SimDriver(self._deaths.popleft() if deaths else 0)
        self._calls = Counter[Place]()
        self._behind: dict[Place, dict[str, int]] = {}  # its calls before the first message of a name
        self._hitting = False  # as long as all have started
        self.processes: list[SimProcess] = []
        self.hits = Counter[str]()  # that came, by what happened
        self.cuts = 0  # how many of them cut channels

    @property
    def num_damaged(self) -> int:
        """Bits of KV that were changed."""
        return sum(process.damaging.count for process in self.processes)

    def begin(self) -> None:
        """From here on calls count, and processes are hit."""
        self._hitting = True
        self.driver.counts = True

    def end(self) -> None:
        """No process is hit any more, and a stopped one goes on."""
        self._hitting = False
        self.driver.counts = False
        for process in self.processes:
            process.is_stopped = process.hangs = process.damaging.wanted = False

    def bury(self) -> None:
        """The driver was killed: its links end, its workers follow, and another one begins. Raises AssertionError where
        a process stays.
        """
        self._hitting = False
        for process in self.processes:
            process.control.close()
            if process.is_stopped or process.hangs:
                process.kill()
        left = self.baton.wait(lambda: all(p.ended for p in self.processes), GONE_S)
        assert left, f"without a driver: {', '.join(p.role for p in self.processes if not p.ended)}"
        self.driver = SimDriver(self._deaths.popleft() if self._deaths else 0)
        self.driver.counts = True

    def hit_of(self, process: SimProcess) -> str:
        """Returns what happens at the call that a process makes; "" = nothing."""
        if not self._hitting:
            return ""
        place = process.role, process.index
        self._calls[place] += 1
        calls, behind = self._calls[place], {"": 0} | self._behind.get(place, {})
        how = next((h for x, n in behind.items() if (h := self._hits.get((place, x, calls - n), ""))), "")
        self.hits[how] += bool(how)
        return how

    def passed(self, process: SimProcess, name: str) -> None:
        """A control message of that name."""
        if self._hitting:
            place = process.role, process.index
            self._behind.setdefault(place, {}).setdefault(name, self._calls[place])

    def delay_s(self) -> float:
        """Draws the delay of a message, a new one each time."""
        return 0.0 if self._rng.random() < AT_ONCE else self._rng.uniform(0.0, LONGEST_S)

    # Launcher:
    def launch(self, config: EngineConfig, key: bytes, wanted: Mapping[str, int]) -> SimHost:
        return self

    def thread_count(self, role: str, index: int) -> int:
        return 0

    def start(self, role: str, index: int, threads: int = 0) -> SimProcess:
        self.processes.append(SimProcess(self, role, index, 100 + len(self.processes)))
        return self.processes[-1]

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> SimProcess:
        return self.start(role, number)

    def promote_spare(self, role: str, number: int, index: int) -> None: ...

    def avoid_host(self, role: str, index: int) -> None: ...

    def can_replace(self, lost: Any) -> bool:
        return True

    def set_capacity(self, role: str, count: int) -> bool:
        return True

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None: ...

    def close(self) -> None: ...

    # Links:
    def open(self, handle: Any) -> SimControl:
        process: SimProcess = handle
        return process.control

    def wait(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        self.driver.act()
        ends: list[Any] = list(links)
        if any(link.closed for link in ends):
            raise ValueError("a link was closed here")
        self.baton.wait(lambda: any(link.ready for link in ends), timeout_s)
        return [link for link in ends if link.ready]
