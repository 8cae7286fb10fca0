"""An engine on its own thread, which takes requests from any thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from lamina.protocol.executor import WorkerError

from .streams import EngineRequest, RequestOutputCollector, RequestStreams

log = logging.getLogger(__name__)
IDLE_S = 1.0  # how often an idle engine checks its workers
WAIT_S = 0.01  # how often, while requests wait for KV blocks
JOIN_S = 5.0  # for a step to end, once the engine is closed


class WorkerOwner(Protocol):
    """The part of the pools that the thread needs."""

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


class _Command(NamedTuple):
    """An order to the engine's thread.

    With ``request``: add it. Without: end the requests of ``collector``, which gets their outputs if ``keep_outputs``.
    Without ``collector``: reset the prefix cache.
    """

    collector: RequestOutputCollector | None
    request: EngineRequest | None = None
    keep_outputs: bool = False


class EngineThread:
    """Steps the engine while it has work. All methods are thread-safe; only ``stop`` waits for a step."""

    def __init__(
        self,
        streams: RequestStreams,
        workers: WorkerOwner,
        wake: Callable[[list[RequestOutputCollector]], None],
        closed: Callable[[], Exception],
    ) -> None:
        """``wake``: called on the engine's thread with the collectors that have new outputs.

        ``closed``: makes the error that readers get after ``stop``.
        """
        self.error: WorkerError | None = None  # why the engine has ended; None while it runs, and after ``stop``
        self._streams, self._workers, self._wake, self._closed = streams, workers, wake, closed
        self._engine = streams.engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: nothing, but look up
        self._stopping = False
        self._open = True
        self._lock = threading.RLock()  # orders the last commands and the end; a finalizer may send a command, too
        self.thread = threading.Thread(target=self._run, name="lamina-engine", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        """True while the engine takes requests."""
        return self._open

    def add(self, request: EngineRequest, collector: RequestOutputCollector) -> None:
        """Queue a request. ``collector`` fails with ValueError if it cannot be served, and when the engine ends."""
        self._send(_Command(collector, request))

    def drop(self, collector: RequestOutputCollector) -> None:
        """Cancel the unfinished requests of a collector that has no reader any more. Idempotent."""
        collector.dropped = True
        self._send(_Command(collector))

    def abort(self, collector: RequestOutputCollector) -> None:
        """End the unfinished requests of a collector, after any ``add`` of it. Its reader gets the tokens so far."""
        self._send(_Command(collector, keep_outputs=True))

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache before any request that is added after this call."""
        self._send(_Command(None))

    def stop(self) -> None:
        """End the engine and its workers. Collectors of unfinished requests fail. Idempotent."""
        self._stopping = True
        self._commands.put(None)
        if threading.current_thread() is self.thread:
            return  # called by a finalizer: the thread ends after this step
        self.thread.join(JOIN_S)
        self._workers.close()  # ends the wait for a step that takes longer
        self.thread.join(JOIN_S)

    def _send(self, command: _Command) -> None:
        with self._lock:
            if self._open:
                self._commands.put(command)
                return
        self._fail_all([command.collector] if command.collector is not None else [])

    def _run(self) -> None:
        try:
            while not self._stopping:
                if (command := self._next_command()) is not None:
                    self._execute(command)
                elif self._engine.has_work:
                    self._wake(self._streams.step())
        except Exception as error:  # any error: else readers wait for ever
            if not self._stopping:
                known = isinstance(error, WorkerError)
                self.error = WorkerError(str(error) if known else f"the engine: {type(error).__name__}: {error}")
                log.error("%s", self.error, exc_info=not known)
        finally:
            self._end()

    def _next_command(self) -> _Command | None:
        """The next command, or None. Waits a little for one if the engine has no work."""
        with suppress(queue.Empty):
            return self._commands.get_nowait()
        if self._engine.has_work and self._engine.idle:
            with suppress(queue.Empty):
                return self._commands.get(timeout=WAIT_S)
        elif not self._engine.has_work:
            self._engine.release_idle_blocks()
            try:
                return self._commands.get(timeout=IDLE_S)
            except queue.Empty:
                self._engine.check_workers()
        return None

    def _execute(self, command: _Command) -> None:
        collector = command.collector
        if collector is None:
            self._engine.reset_prefix_cache()
        elif command.request is not None and not collector.dropped:
            try:
                self._streams.add([command.request], collector)
            except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes: of this request, not of all
                collector.fail(error)
                self._wake([collector])
        elif command.keep_outputs:
            self._streams.abort(collector)
            self._wake([collector])
        else:
            self._streams.drop(collector)

    def _end(self) -> None:
        try:
            self._workers.close()
        finally:
            with self._lock:
                self._open = False
            left = self._streams.pop_collectors()
            while not self._commands.empty():
                if (command := self._commands.get()) is not None and command.collector is not None:
                    left.append(command.collector)
            self._fail_all(left)

    def _fail_all(self, collectors: list[RequestOutputCollector]) -> None:
        for collector in collectors:
            collector.fail(self._closed() if self.error is None else WorkerError(str(self.error)))
        self._wake(collectors)
