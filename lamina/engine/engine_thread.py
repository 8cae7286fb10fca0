"""An engine on a thread of its own: requests come from any thread and go on together."""

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
IDLE_S = 1.0  # how often an idle engine looks whether its workers live
WAIT_S = 0.01  # the same, where requests wait for room
JOIN_S = 5.0  # for a step to end, once nobody wants it


class WorkerOwner(Protocol):
    """The part of the pools that the thread needs."""

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


class _Command(NamedTuple):
    """``asked`` None: no more of ``feed``, whose reader has gone or, with ``tell``, gets what there is. ``feed`` None:
    kept prefixes are forgotten.
    """

    feed: RequestOutputCollector | None
    asked: EngineRequest | None = None
    tell: bool = False


class EngineThread:
    """Steps the engine while there is work. All methods are safe from any thread, and wait for no step but ``stop``."""

    def __init__(
        self,
        streams: RequestStreams,
        workers: WorkerOwner,
        wake: Callable[[list[RequestOutputCollector]], None],
        closed: Callable[[], Exception],
    ) -> None:
        """``wake``: called on this thread with the feeds that have got something. ``closed``: what readers get after
        ``stop``.
        """
        self.error: WorkerError | None = None  # why the engine has ended; None while it runs, and after ``stop``
        self._streams, self._workers, self._wake, self._closed = streams, workers, wake, closed
        self._engine = streams.engine
        self._orders: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: nothing, but look up
        self._stopping = False
        self._open = True
        self._lock = threading.RLock()  # between the last orders and the end; a garbage collector may order, too
        self.thread = threading.Thread(target=self._run, name="lamina-engine", daemon=True)
        self.thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return self._open

    def add(self, asked: EngineRequest, feed: RequestOutputCollector) -> None:
        """Queue a request. ``feed`` is told where it cannot be served, by a ValueError, and of the engine's end."""
        self._order(_Command(feed, asked))

    def drop(self, feed: RequestOutputCollector) -> None:
        """Cancel what is unfinished of a feed that nobody reads any more. Idempotent."""
        feed.dropped = True
        self._order(_Command(feed))

    def abort(self, feed: RequestOutputCollector) -> None:
        """End the unfinished requests of a feed, behind an ``add`` of it; its reader gets the tokens that exist."""
        self._order(_Command(feed, tell=True))

    def reset_prefix_cache(self) -> None:
        """Find no KV of finished requests any more, before whatever is added behind this call."""
        self._order(_Command(None))

    def stop(self) -> None:
        """End the engine and its workers; every reader is told. Idempotent."""
        self._stopping = True
        self._orders.put(None)
        if threading.current_thread() is self.thread:
            return  # a garbage collector came by: the thread ends behind this step
        self.thread.join(JOIN_S)
        self._workers.close()  # ends the wait for a step that takes longer
        self.thread.join(JOIN_S)

    def _order(self, order: _Command) -> None:
        with self._lock:
            if self._open:
                self._orders.put(order)
                return
        self._tell_end([order.feed] if order.feed is not None else [])

    def _run(self) -> None:
        try:
            while not self._stopping:
                if (order := self._next_order()) is not None:
                    self._obey(order)
                elif self._engine.has_work:
                    self._wake(self._streams.step())
        except Exception as error:  # any error: else readers wait for ever
            if not self._stopping:
                known = isinstance(error, WorkerError)
                self.error = WorkerError(str(error) if known else f"the engine: {type(error).__name__}: {error}")
                log.error("%s", self.error, exc_info=not known)
        finally:
            self._end()

    def _next_order(self) -> _Command | None:
        """The next order, or None. Waits for one, a little, where the engine has no work."""
        with suppress(queue.Empty):
            return self._orders.get_nowait()
        if self._engine.has_work and self._engine.idle:
            with suppress(queue.Empty):
                return self._orders.get(timeout=WAIT_S)
        elif not self._engine.has_work:
            self._engine.release_idle_blocks()
            try:
                return self._orders.get(timeout=IDLE_S)
            except queue.Empty:
                self._engine.check_workers()
        return None

    def _obey(self, order: _Command) -> None:
        feed = order.feed
        if feed is None:
            self._engine.reset_prefix_cache()
        elif order.asked is not None and not feed.dropped:
            try:
                self._streams.add([order.asked], feed)
            except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes: of this request, not of all
                feed.fail(error)
                self._wake([feed])
        elif order.tell:
            self._streams.abort(feed)
            self._wake([feed])
        else:
            self._streams.drop(feed)

    def _end(self) -> None:
        try:
            self._workers.close()
        finally:
            with self._lock:
                self._open = False
            left = self._streams.pop_collectors()
            while not self._orders.empty():
                if (order := self._orders.get()) is not None and order.feed is not None:
                    left.append(order.feed)
            self._tell_end(left)

    def _tell_end(self, feeds: list[RequestOutputCollector]) -> None:
        for feed in feeds:
            feed.fail(self._closed() if self.error is None else WorkerError(str(self.error)))
        self._wake(feeds)
