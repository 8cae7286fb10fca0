"""The server's process: waits for the engine, serves, and ends in order. A first signal drains it, a second one forces
the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from lamina.config.engine_config import EngineConfig
from lamina.executor.chat_renderer import ChatRenderer
from lamina.facts.report import count_text
from lamina.models.chat_template import read_template
from lamina.models.generation_defaults import FILE, default_sampling_params
from lamina.models.tokenizer import load_in_background
from lamina.observe.log_lines import set_up_server_log
from lamina.protocol.control import Progress
from lamina.utils.progress import StartupLog

from .app import make_app, with_middleware
from .call import Service
from .engine_client.engine_client import EngineClient
from .engine_client.engine_restarts import EngineRestarts
from .engine_client.engine_watchdog import EngineHandle
from .engine_client.launch import launch_engine
from .engine_client.messages import StartEngine
from .errors import ApiError
from .journal.journal import Journal
from .journal.resume import finish_all
from .metrics.http_metrics import ServerMetrics
from .metrics.status_line import log_status_forever
from .middleware.connection_limit import ConnectionLimiter, max_connections
from .middleware.http_connection import Connection
from .middleware.tls import TlsHandshake, TlsListener
from .server_config import ServerConfig

CLOSE_S = 5  # for connections to take their last bytes
UNSENT = 1 << 13  # bytes of a connection that the kernel keeps unsent: it may hold megabytes for who reads nothing
PROGRESS_S = 3.0  # the time for which clients and health checks see that the engine is lost, before the server ends
# Longer than clients keep an idle connection (httpx: 5 s; balancers: 60 s). The client should close it first, because a
# request that arrives while we close the connection fails.
KEEP_ALIVE_S = 75
logger = logging.getLogger(__name__)


async def serve(
    model: str,
    config: ServerConfig,
    engine_config: EngineConfig,
    handle: EngineHandle,
    sock: socket.socket,
    on_ready: Callable[[], None],
    journal: Journal | None,
) -> int:
    """Serve until a signal, or until the engine is lost. Returns the exit status: 0, or 1 if the engine was lost."""
    set_up_server_log(as_json=config.log_json, level=config.log_level)
    logger.info("starting %s", model)
    source = config.tokenizer or model
    remote, limit_s = engine_config.model.trust_remote_code, engine_config.deadlines.start_timeout_s
    defaults = default_sampling_params(model, config.generation_config, trust_remote_code=remote)

    def on_progress(progress: Progress) -> None:
        stages(progress.stage, progress.done, progress.total)

    with _ended_by_signals(handle), contextlib.closing(StartupLog()) as stages:
        loading = load_in_background(source, trust_remote_code=remote, here=False, limit_s=limit_s)
        start = StartEngine(
            model=model,
            tokenizer=config.tokenizer,
            config=engine_config,
            conductor_config=config.conductor_config,
            log_level=config.log_level,
        )
        names, restarts = config.names(model), EngineRestarts(start, launch_engine)
        metrics = ServerMetrics(names[0], config.conductor_config.limits)
        client = await EngineClient.connect(handle, on_progress, restarts, journal, metrics.on_step)
        stages.end()
    renderer, ends = ChatRenderer(config.template_limits), contextlib.ExitStack()
    try:
        tokenizer = await asyncio.to_thread(loading.result, limit_s)
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer: give --tokenizer")
        if defaults:
            text = ", ".join(f"{name} {value}" for name, value in defaults.items())
            logger.info("sampling defaults from %s: %s (--generation-config)", FILE, text)
        if config.chat_template:
            tokenizer.chat_template = read_template(config.chat_template)
        service = Service(config, names, model, client, metrics, tokenizer, renderer, defaults, journal)
        ends.callback(service.prompt_processor.long_texts.close)
        await HttpServer(service, on_ready).run(sock)
        return 1 if client.failure is not None else 0
    finally:
        renderer.close()
        ends.close()
        await client.close()


class HttpServer(uvicorn.Server):  # type: ignore[misc] # untyped for mypy
    """uvicorn with our order of shutdown."""

    def __init__(self, service: Service, on_ready: Callable[[], None]) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                with_middleware(make_app(service), service),
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                ssl_keyfile=config.ssl_keyfile or None,
                ssl_certfile=config.ssl_certfile or None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
                ws="none",
            )
        )
        self._service = service
        self._on_ready = on_ready
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, own = self.config, self._service.config
        budget, loop = self._service.bodies, asyncio.get_running_loop()
        limiter = ConnectionLimiter(max_connections(budget.limit, tls=config.ssl is not None))
        self.servers = list[asyncio.Server | TlsListener]()

        def connection(handshake: TlsHandshake | None = None) -> Connection:
            made = None if handshake is None else handshake.end
            state = {"config": config, "server_state": self.server_state, "app_state": {}}
            return Connection(limiter, budget, own.header_timeout_s, own.slow_reader_timeout_s, made, **state)

        for sock in sockets or []:
            if sock.family != socket.AF_UNIX:  # its connections inherit it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
            if config.ssl is None:
                self.servers.append(await loop.create_server(connection, sock=sock, backlog=config.backlog))
            else:
                sock.setblocking(False)
                sock.listen(config.backlog)
                door = TlsListener(
                    limiter, sock, connection, config.ssl, own.header_timeout_s, own.slow_reader_timeout_s
                )
                door.accept_task.add_done_callback(_log_failure)
                self.servers.append(door)
        self.started = True
        self._on_ready()  # once it listens, so that a reader of the address can connect

    async def run(self, sock: socket.socket) -> None:
        """Serve on ``sock`` until ended."""
        tasks = [asyncio.create_task(log_status_forever(self._service)), asyncio.create_task(self.end_with_engine())]
        if (journal := self._service.journal) is not None:
            tasks.append(asyncio.create_task(finish_all(self._service, journal, journal.unfinished())))
            tasks.append(asyncio.create_task(journal.retry_forever()))
        for task in tasks:
            task.add_done_callback(_log_failure)
        try:
            await self.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def end_with_engine(self) -> None:
        """Log the loss of the engine, wait ``PROGRESS_S``, then end the server. Its supervisor starts it again."""
        await self._service.client.lost.wait()
        logger.error("ending with status 1 in %g s", PROGRESS_S)
        await asyncio.sleep(PROGRESS_S)
        self._abort()  # clients that have not read their error by now get no more time
        self.should_exit = True

    def on_signal(self) -> None:
        """Drain at the first call, and end at once at the second one."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
            self._ending.add_done_callback(_log_failure)
        else:
            logger.warning("second signal: ending at once, %s", self._cut())
            self._abort()
            self._service.client.kill()
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        """Refuse new requests, let running ones finish, and end the remaining ones with an error that
        clients can read.
        """
        service, limit = self._service, self._service.config.shutdown_timeout
        service.queue_limit.is_draining = True
        more = "a second Ctrl-C or SIGTERM ends them at once"
        logger.info("draining: %s, at most %g s; %s", count_text(len(service.active_calls), "request"), limit, more)
        deadline = time.monotonic() + limit
        try:
            while service.queue_limit.completions and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            if self.should_exit:  # a second signal or the loss of the engine, which log lines of their own
                return
            if service.queue_limit.completions:
                logger.warning("ending after %g s: %s", limit, self._cut())
            else:
                logger.info("ending: all requests have their replies")
            self._abort()
        finally:
            self.should_exit = True

    def _cut(self) -> str:
        """Return the text for the log of what ends with the server, including requests resumed from an
        earlier server.
        """
        later = ", left to the next server of its journal" if self._service.journal else ""
        return count_text(self._service.queue_limit.completions, "completion is cut", "completions are cut") + later

    def _abort(self) -> None:
        later = "; the next server of its journal finishes this request" if self._service.journal else ""
        for call in list(self._service.active_calls):
            call.abort(ApiError(503, f"the server is shutting down{later}", code="shutting_down"))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has failed", task.get_coro(), exc_info=error)


@contextlib.contextmanager
def _ended_by_signals(handle: EngineHandle) -> Iterator[None]:
    """Let a signal end this process and its engine. The server installs its own handlers when it runs."""

    def end() -> None:
        handle.sock.close()
        sys.exit(130)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    yield
