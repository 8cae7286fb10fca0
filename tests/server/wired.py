"""A server and its engine in this process: the real application, link and scheduler over a wire without workers.

The wire answers transfers of pages as a disk would, so that sessions can be exported and imported.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake import RENDERER, http_of
from fake_executor import FakeWire
from msgspec import structs
from running import ROOT
from shipped import MODEL

from lamina.config.flat_options import make_config
from lamina.models.tokenizer import load_tokenizer
from lamina.observe.trace import NULL_RECORDER
from lamina.protocol.control import RunStep, StepDone
from lamina.protocol.offload_messages import OffloadFacts, TransferDone
from lamina.protocol.step_plan import LoadKv, SaveKv
from lamina.server.call import Service
from lamina.server.engine_client import engine_process
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.engine_process import serve_engine
from lamina.server.engine_client.engine_restarts import EngineRestarts
from lamina.server.engine_client.messages import StartEngine
from lamina.server.journal.journal import Journal
from lamina.server.metrics.http_metrics import ServerMetrics
from lamina.server.server_config import ServerConfig

VOCAB, BLOCK = 2048, 4
ADMIN_KEY = "operator"
FATAL = 2000
SOON_S = 20.0


class StoringWire(FakeWire):
    """Reports each save as done, and each load as of nothing. Draws have log-probabilities. A sequence with the token
    FATAL + n makes it fail by a defect once n tokens follow that.
    """

    def __init__(self) -> None:
        super().__init__(num_blocks=256)
        tier = OffloadFacts(secret=b"s" * 32, identity=b"i" * 32, page_size=BLOCK, pages=[[]], backend="file")
        self.ready = structs.replace(self.ready, vocab_size=VOCAB, storage=tier)
        self.reports = deque[TransferDone]()

    def wait(self) -> Any:
        if not (self.done or self.flight):
            return self.reports.popleft()
        return super().wait()

    def execute(self, step: RunStep) -> StepDone:
        for op in step.plan.ops:
            if isinstance(op, SaveKv | LoadKv):
                pages = len(op.keys) if isinstance(op, SaveKv) else 0
                error = "" if isinstance(op, SaveKv) else "no such page"
                self.reports.append(TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=pages, error=error))
        done = super().execute(step)
        for tokens in self.stored.values():
            if any(t >= FATAL and len(tokens) - at > t - FATAL for at, t in enumerate(tokens)):
                raise KeyError("a defect of the engine")
        scores = [[(d.token_id, -0.5, 1), *[(0, -1.0, 1)] * max(0, min(draw.logprobs, 5))] if draw.logprobs >= 0 else []
                  for d, draw in zip(done.sampled_tokens, step.sampling_requests, strict=True)]  # fmt: skip
        drawn = [structs.replace(d, logprobs=s) for d, s in zip(done.sampled_tokens, scores, strict=True)]
        return structs.replace(done, sampled_tokens=drawn)


class WireExecutor:
    """The part of WorkerExecutor that an engine process uses."""

    is_recovering, borrower, has_pending_stats = False, None, False

    def __init__(self, model: str, config: Any, progress: Any, launch: Any, meanwhile: Any) -> None:
        self.wire = StoringWire()
        self.ready = self.wire.ready
        self.pids, self.hosts = {"memory-0": 0, "compute-0": 0}, {"memory-0": "localhost", "compute-0": "localhost"}
        self.tracer = SimpleNamespace(recorder=NULL_RECORDER)
        self.resizer = SimpleNamespace(take_outcome=lambda: None, moved_bytes={}, plan=self._none, begin=self._none)
        self._stats: dict[str, dict[str, float]] | None = None

    @staticmethod
    def _none(*_: Any, **__: Any) -> None:
        raise ValueError("workers of a test do not come or go")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    engine_features = ()

    def request_stats(self) -> None:
        self._stats = {"memory-0": {"steps": 1.0}}

    def collect_stats(self) -> Any:
        found, self._stats = self._stats, None
        return found


class ThreadEngine:
    """An engine on a thread, and the handle of it."""

    role, index, pid, host, is_stopped = "engine", 0, 0, "", False

    def __init__(self, start: StartEngine) -> None:
        self.sock, self._theirs = socket.socketpair()
        self.error: BaseException | None = None

        def serve() -> None:
            try:
                serve_engine(self._theirs)
            except BaseException as error:  # noqa: BLE001 - what the test is about
                self.error = error

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        engine_process.ControlLink(self.sock, StartEngine).send(start)

    def kill(self) -> None:
        """Ends it, without a word to its server."""
        with suppress(OSError):  # it has ended
            self._theirs.shutdown(socket.SHUT_RDWR)

    def exit_reason(self) -> str | None:
        return None if self.thread.is_alive() else "exited with status 1"

    @property
    def status(self) -> int | None:
        return None if self.thread.is_alive() else 1

    def join(self, timeout_s: float) -> None:
        self.thread.join(timeout_s)
        self.kill()
        self.thread.join(SOON_S)


class WiredServer:
    """``engines``: all that were started, the first one included. ``folder``: of its journal."""

    def __init__(self, folder: Path, *, max_recoveries: int = 5, **options: Any) -> None:
        config = {"transport": "shm", "enable_prefix_caching": True, "scheduling_policy": "priority", "max_num_seqs": 8}
        config["max_recoveries"] = max_recoveries
        self.start = StartEngine(model=str(ROOT / MODEL), tokenizer="", config=make_config(config))
        self.engines = list[ThreadEngine]()
        self._folder, self._options = folder, options

    def launch(self, start: StartEngine) -> ThreadEngine:
        """Raises ValueError for other workers than those of the first engine: the wire has these alone."""
        if start.config.topology != self.start.config.topology:
            raise ValueError("a test has the workers that it has")
        self.engines.append(ThreadEngine(start))
        return self.engines[-1]

    async def open(self) -> None:
        config = ServerConfig(
            journal=str(self._folder / "journal"), admin_key=ADMIN_KEY, max_num_queued_reqs=64, **self._options
        )
        self.journal = Journal(config.journal, self.start.model, config.journal_bytes)
        restarts, first = EngineRestarts(self.start, self.launch), self.launch(self.start)
        metrics = ServerMetrics("tiny", config.conductor_config.limits)
        self.client = await EngineClient.connect(first, lambda progress: None, restarts, self.journal, metrics.on_step)
        tokenizer = load_tokenizer(self.start.model)
        self.service = Service(
            config, ["tiny"], self.start.model, self.client, metrics, tokenizer, RENDERER, journal=self.journal
        )
        self.http = http_of(self.service)

    async def close(self) -> None:
        await self.http.aclose()
        await self.client.close()
        self.journal.close()


@contextmanager
def over_a_wire() -> Iterator[None]:
    """Engines of this process have wires in place of workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "WorkerExecutor", WireExecutor)
        yield
