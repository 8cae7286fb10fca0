"""An engine process begins and ends, in this process: its message for each failure, and all that it closes."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_engine_process import PARAMS, PROMPT, SOON_S, FakeWire, Workers, continuation, until

from lamina.config.flat_options import make_config
from lamina.observe.trace import Event
from lamina.protocol.control import ControlLink, Failed, LinkClosedError, Progress, Stop
from lamina.protocol.executor import ReducedCapacityError, WorkerError
from lamina.server.engine_client import engine_process
from lamina.server.engine_client.engine_client import FROM_ENGINE
from lamina.server.engine_client.engine_process import EngineDefectError, EngineLoop, serve_engine
from lamina.server.engine_client.messages import AddPrompt, EngineDefect, EngineReady, Outputs, StartEngine

CONFIG = make_config({"transport": "loopback", "start_timeout_s": 33.0})
START = StartEngine(model="m", tokenizer="", config=CONFIG)


class Server:
    """The server's end; ``sock`` is the engine's."""

    def __init__(self, *messages: Any) -> None:
        self.sock, there = socket.socketpair()
        self.link = ControlLink(there, FROM_ENGINE)
        for message in messages:
            self.link.send(message)

    def told(self) -> list[Any]:
        found = []
        try:
            while True:
                found.append(self.link.recv(timeout_s=SOON_S))
        except LinkClosedError:
            return found


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_events_of_workers_are_logged_from_the_servers_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "serve_link", failing(OSError("no such file")))
    log = logging.getLogger("lamina.engine")
    before = log.level
    try:
        serve_engine(Server(msgspec.structs.replace(START, log_level="error")).sock)
        assert log.getEffectiveLevel() == logging.ERROR
    finally:
        log.setLevel(before)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ValueError("--kv-cache-memory-bytes is too small"),
            Failed(text="--kv-cache-memory-bytes is too small", user_error=True),
        ),
        (OSError("no such file"), Failed(text="no such file", user_error=True)),
        (ImportError("no ray"), Failed(text="no ray", user_error=True)),
        (WorkerError("memory worker 0 was killed"), Failed(text="memory worker 0 was killed")),
        (
            ReducedCapacityError("no host has room", {"prefill_workers": 0}, ["n3"]),
            Failed(text="no host has room", workers_that_fit={"prefill_workers": 0}, lost_hosts=["n3"]),
        ),
    ],
)
def test_why_an_engine_did_not_start(error: Exception, told: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "serve_link", failing(error))
    server = Server(START)
    serve_engine(server.sock)
    assert server.told() == [told]


def test_an_error_of_ours_is_told_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """And written before, once."""
    said: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: said.append(error))
    monkeypatch.setattr(engine_process, "serve_link", failing(KeyError("x")))
    server = Server(START)
    with pytest.raises(KeyError) as raised:
        serve_engine(server.sock)
    assert said == [raised.value]
    sys.excepthook(KeyError, raised.value, None)
    assert said == [raised.value], "it is written again as the process ends"
    assert server.told() == [Failed(text="engine: KeyError: 'x'")]


def test_nothing_is_started_for_a_server_that_says_anything_else_or_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "serve_link", failing(AssertionError("it was started")))
    server = Server(Stop())
    serve_engine(server.sock)
    assert server.told() == []
    gone = Server()
    gone.link.close()
    serve_engine(gone.sock)
    assert gone.sock.fileno() == -1


def test_a_server_that_goes_while_it_is_told_of_a_failure_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(START)

    def fail(*_: object) -> None:
        server.link.close()
        raise ValueError("nobody hears it")

    monkeypatch.setattr(engine_process, "serve_link", fail)
    serve_engine(server.sock)


class Noted:
    """A recorder that remembers its events."""

    native_buffer: object = b""
    notes = None

    def __init__(self) -> None:
        self.events = set[Event]()

    def now(self) -> int:
        return 0

    def add(self, event: Event, *_: object, **more: object) -> None:
        self.events.add(event)


class Executor(Workers):
    """Pools over a FakeWire, which the engine drives."""

    made: list[Executor]

    def __init__(
        self,
        model: str,
        config: Any,
        progress: Callable[[str, int, int], None],
        launch: Any,
        meanwhile: Callable[[], None],
    ) -> None:
        self.wire = FakeWire()
        super().__init__(self.wire)
        self.given = (model, config)
        self.tracer = SimpleNamespace(recorder=Noted())
        self.closed = False
        progress("load", 1, 2)
        self.meanwhile = meanwhile
        meanwhile()  # there is no loop yet
        Executor.made.append(self)

    engine_features = ()

    def submit(self, new: Any) -> None:
        self.wire.submit(new)

    def wait(self) -> Any:
        return self.wire.wait()

    def check_workers(self) -> None:
        self.wire.check_workers()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record each model that is loaded in addition, with its arguments."""
    asked: list[tuple[Any, ...]] = []

    def load_beside(source: str, **how: Any) -> Any:
        asked.append((source, how))

        def result(limit_s: float) -> None:
            asked.append((limit_s,))

        return SimpleNamespace(result=result)

    Executor.made = []
    monkeypatch.setattr(engine_process, "WorkerExecutor", Executor)
    monkeypatch.setattr(engine_process, "load_in_background", load_beside)
    return asked


def test_the_loop_reports_while_workers_are_waited_for(
    loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = list[EngineLoop]()

    def report(loop: EngineLoop) -> None:
        reports.append(loop)

    monkeypatch.setattr(EngineLoop, "report", report)
    server = Server(StartEngine(model="m", tokenizer="", config=make_config({"transport": "loopback"})), Stop())
    serve_engine(server.sock)
    own = len(reports)
    Executor.made[0].meanwhile()
    assert len(reports) == own + 1


@pytest.mark.parametrize(("transport", "here"), [("loopback", True), ("tcp", False)])
def test_a_whole_life(loaded: list[tuple[Any, ...]], transport: str, here: bool) -> None:
    config = make_config({"transport": transport, "start_timeout_s": 33.0, "trust_remote_code": True})
    server = Server(
        StartEngine(model="m", tokenizer="t" if here else "", config=config), AddPrompt(7, PROMPT, PARAMS), Stop()
    )
    serve_engine(server.sock)
    (pools,) = Executor.made
    assert pools.closed
    assert pools.given == ("m", config)
    assert loaded == [("t" if here else "m", {"trust_remote_code": True, "here": here, "limit_s": 33.0}), (33.0,)]
    first, second, *_ = server.told()
    assert first == Progress(stage="load", done=1, total=2)
    assert isinstance(second, EngineReady)


def test_the_vocabulary_is_read_after_the_engine_has_measured_itself(
    loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread that reads it takes the interpreter's lock from the steps that are measured."""
    done = list[str]()
    tokenizer = SimpleNamespace(result=lambda limit_s: SimpleNamespace())
    monkeypatch.setattr(engine_process, "load_in_background", lambda *_, **__: tokenizer)
    for name in ("tune_num_batches", "check_slo", "LowPriorityCall"):
        monkeypatch.setattr(engine_process, name, lambda *_, name=name: SimpleNamespace(result=done.append(name)))
    server = Server(msgspec.structs.replace(START, is_first=True), Stop())
    serve_engine(server.sock)
    assert done == ["tune_num_batches", "check_slo", "LowPriorityCall"]


def test_a_life_with_work(loaded: list[tuple[Any, ...]]) -> None:

    server = Server(START, AddPrompt(7, PROMPT, PARAMS))
    thread = threading.Thread(target=serve_engine, args=(server.sock,))
    thread.start()
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += [t for d in until(server.link, Outputs).deltas for t in d.token_ids]
    assert tokens == continuation(PROMPT, 5)
    server.link.send(Stop())
    thread.join(SOON_S)
    assert Executor.made[0].closed
    assert {Event.SCHEDULE, Event.POSTPROCESS} <= Executor.made[0].tracer.recorder.events


@pytest.mark.parametrize("error", [ValueError("a bad number"), WorkerError("memory worker 0 is lost")])
def test_no_user_is_to_blame_for_an_engine_that_fails_while_it_runs(
    error: Exception, loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process.EngineLoop, "run", failing(error))
    server = Server(START)
    if isinstance(error, WorkerError):
        serve_engine(server.sock)
        assert server.told()[1:] == [Failed(text="memory worker 0 is lost")]
    else:
        said: list[BaseException] = []
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: said.append(error))
        with pytest.raises(EngineDefectError, match="a bad number"):
            serve_engine(server.sock)
        assert said == [error]
        assert server.told()[1:] == [EngineDefect("engine: ValueError: a bad number")]
    assert Executor.made[0].closed
