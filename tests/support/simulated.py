"""Workers for tests, with their processes and control links in one process and a time of their own."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lamina.config.engine_config import EngineConfig
from lamina.config.partition import KvShards
from lamina.executor.worker_registry import Link
from lamina.protocol.control import (
    ChannelLost,
    ComputeReady,
    Connect,
    LinkClosedError,
    Loaded,
    MemoryReady,
    Progress,
    Quiesce,
    Quiesced,
    Rate,
    RateRequest,
    StartCompute,
    StartMemory,
    Stats,
    StatsRequest,
    Stop,
)
from lamina.protocol.step_plan import BindReply

NOTICED_S = 0.01  # by its peers, that a worker is gone


class World:
    """A clock, and all that will happen. Time passes only while some thread waits."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.moments = 0  # events so far
        self.before: Callable[[int], None] = lambda moment: None  # called with the number of each event, ahead of it
        self.workers: list[SimulatedWorker] = []
        self.load_s = 1.0
        self.blocks = 0  # of each memory worker; 0 = as many as tell the epoch
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._random = random.Random(seed)

    def clock(self) -> float:
        return self.now

    def later(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + delay_s + self._random.uniform(0.001, 0.01), self._count, work))

    def pass_until(self, deadline: float, reached: Callable[[], Any]) -> None:
        """Let things happen until ``reached``, or until ``deadline``."""
        while not reached() and self._due and self._due[0][0] <= deadline:
            self.now, _, work = heapq.heappop(self._due)
            self.before(self.moments)
            self.moments += 1
            work()
        if not reached():
            self.now = max(self.now, deadline)

    # Links:
    def open(self, handle: Any) -> SimulatedLink:
        return SimulatedLink(self, handle)

    def wait(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        mine: list[SimulatedLink] = list(links)  # type: ignore[arg-type]
        if any(link.closed for link in mine):
            raise ValueError("closed")
        self.pass_until(self.now + timeout_s, lambda: any(link.ready for link in mine))
        return [link for link in mine if link.ready]

    # Launcher:
    key = b"k" * 32
    restarts = True

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> SimulatedWorker:
        return self.start(role, number)

    def promote_spare(self, role: str, number: int, index: int) -> None: ...

    def avoid_host(self, role: str, index: int) -> None: ...

    def can_replace(self, lost: Any) -> bool:
        return self.restarts

    def set_capacity(self, role: str, count: int) -> bool:
        return True

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None: ...

    def thread_count(self, role: str, index: int) -> int:
        return 1

    def start(self, role: str, index: int, threads: int = 0) -> SimulatedWorker:
        self.workers.append(SimulatedWorker(self, role, index))
        return self.workers[-1]

    def close(self) -> None: ...

    def launch(self, config: EngineConfig, key: bytes, wanted: Mapping[str, int]) -> World:
        return self


class SimulatedLink:
    """The driver's end."""

    def __init__(self, world: World, worker: SimulatedWorker) -> None:
        self._world, self._worker = world, worker
        self.closed = False
        worker.inbox = self.inbox = deque[Any]()

    @property
    def ready(self) -> bool:
        return bool(self.inbox or self._worker.ended)

    def limit_sends(self, seconds: float) -> None: ...

    def send(self, message: Any) -> None:
        if self.closed or self._worker.ended:
            raise LinkClosedError("gone")
        self._world.later(lambda: self._worker.take(message))

    def recv(self, timeout_s: float | None = None) -> Any:
        assert timeout_s is not None
        self._world.pass_until(self._world.now + timeout_s, lambda: self.ready)
        if self.inbox:
            return self.inbox.popleft()
        if self._worker.ended:
            raise LinkClosedError("gone")
        raise TimeoutError

    def close(self) -> None:
        self.closed = True


class SimulatedWorker:
    """Answers as a worker does, and goes when one that it is connected to has gone. Also its handle."""

    host = ""
    sock: Any = None

    def __init__(self, world: World, role: str, index: int) -> None:
        self.role, self.index, self.pid = role, index, 100 + len(world.workers)
        self.inbox = deque[Any]()  # of the driver
        self.got: list[Any] = []
        self.ended = ""
        self.silent = self.is_stopped = False
        self.late_s = 0.0  # of its answer to the next Connect
        self.view = 0
        self.kept = dict[int, int]()  # of a memory worker, once it is asked
        self._loaded_at = 0.0  # before that it heeds nothing
        self._world = world

    @property
    def name(self) -> str:
        return f"{self.role} worker {self.index} (pid {self.pid})"

    def exit_reason(self) -> str | None:
        return self.ended or None

    def join(self, timeout_s: float) -> None:
        if not timeout_s:
            self.kill()

    def kill(self) -> None:
        if not self.ended:
            self.end("was killed by SIGKILL")

    def end(self, fate: str) -> None:
        self.ended = fate
        for other in self._world.workers:
            if self.view and other.view == self.view and other is not self:
                self._world.later(partial(other.miss, self.view), NOTICED_S)

    def miss(self, view: int) -> None:
        """A channel of an epoch has ended: it tells so, and waits. A memory worker waits for the next that come."""
        if not self.ended and self.role != "memory":
            self.inbox.append(ChannelLost(epoch=view, text="a peer is gone"))

    def take(self, message: Any) -> None:
        if self.ended:
            return
        self.got.append(message)
        match message:
            case StartMemory():
                self.say(MemoryReady(url=f"sim://{message.name}"))
            case StatsRequest():
                self.say(Stats(values={"steps": 1.0}))
            case RateRequest():
                self.say(Rate(read_bytes_s=1e9))
            case StartCompute():
                self.say(Progress(stage="loading", done=1, total=2))
                self._loaded_at = self._world.now + self._world.load_s
                self.say(Loaded(pipeline_url=f"sim://{message.name}/ring"), self._world.load_s)
            case Connect():
                self.view = message.epoch
                if self.role != "memory":
                    self.say(ready(message.epoch, self._world.blocks, prefills=self.role == "prefill"), self.late_s)
                self.late_s = 0.0
            case Quiesce():
                kept = dict(self.kept) if self.role == "memory" else {}
                self.say(
                    Quiesced(epoch=message.epoch, surviving_tokens=kept), max(0.0, self._loaded_at - self._world.now)
                )
            case Stop():
                self.end("exited with status 0")

    def say(self, message: Any, delay_s: float = 0.0) -> None:
        def arrive() -> None:
            if not self.ended and not self.silent:
                self.inbox.append(message)

        self._world.later(arrive, delay_s)


def ready(view: int, blocks: int = 0, *, prefills: bool = False) -> ComputeReady:
    """The capacity report of an epoch; each worker has its own number of ``blocks``, where none is named.

    ``prefills``: who does has a store.
    """
    store = BindReply(windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[32])
    return ComputeReady(
        epoch=view, vocab_size=97, num_layers=3, max_model_len=128, dtype="float32", eos_token_ids=[], windows=[0],
        kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[[blocks or 10 * view]], holders=[[0]], block_size=4,
        kv_bytes=[100, 200],
        summary={"attention": "sim", "heads": [(8, 4)], "weight_bytes": 1, "collective": "sim"},
        prefill_stores=[store] if prefills else [],
    )  # fmt: skip
