"""The control link of a worker process: replies to the driver during a step, and ends the worker with the driver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from lamina.observe.trace import NULL_RECORDER, Recorder
from lamina.protocol.control import (
    ClockRequest,
    ClockTime,
    ControlLink,
    Failed,
    LinkClosedError,
    Rate,
    RateRequest,
    Stats,
    StatsRequest,
    Stop,
    Trace,
    TraceRequest,
)

from .runtime import RUNTIME, Runtime


class ControlLoop:
    """Reads the control link on its own thread: replies to queries at once, and queues all else for the worker's
    thread. When the link ends or Stop arrives, calls ``abort``, which must wake the worker from any wait, and ends the
    queue.
    """

    def __init__(
        self,
        link: ControlLink,
        stats: Callable[[], dict[str, float]],
        abort: Callable[[str], None],
        trace: Recorder = NULL_RECORDER,
        rate: Callable[[], float] = lambda: 0.0,
        on_message: Callable[[Any], None] = lambda message: None,
        around: Runtime = RUNTIME,
    ) -> None:
        """``rate``: measures the bytes a second that the worker's device reads from its memory. ``on_message``: called
        for each message on the link's thread, before it is queued.
        """
        self.link = link
        self.is_stopped = threading.Event()
        self._stats = stats
        self._abort = abort
        self._trace = trace
        self._rate = rate
        self._on_message = on_message
        self._inbox = around.queue()
        around.start(self._read, "lamina-control")

    def next_message(self, *, block: bool) -> Any:
        """Return the next message for the worker; None if there is none yet (``block=False``) or after
        ``is_stopped``.
        """
        try:
            message = self._inbox.get(block)
        except queue.Empty:
            return None
        if message is None:
            self._inbox.put(None)  # later calls find the end, too
        return message

    def report_failure(self, text: str, *, user_error: bool = False, by_peer: bool = False) -> None:
        """Report to the driver why this worker ends; does nothing if the driver has ended, too."""
        try:
            self.link.send(Failed(text=text, user_error=user_error, caused_by_peer=by_peer))
        except LinkClosedError:
            self.is_stopped.set()

    def _read(self) -> None:
        reason = "stopped by the driver"
        try:
            self._read_until_stop()
        except LinkClosedError as e:
            reason = f"the driver is gone ({e})"
        finally:
            self.is_stopped.set()
            self._abort(reason)
            self._inbox.put(None)

    def _read_until_stop(self) -> None:
        while not isinstance(message := self.link.recv(), Stop):
            if isinstance(message, StatsRequest):
                self.link.send(Stats(values=self._stats()))
            elif isinstance(message, ClockRequest):
                self.link.send(ClockTime(now=Recorder.now()))
            elif isinstance(message, RateRequest):
                self.link.send(Rate(read_bytes_s=self._rate()))
            elif isinstance(message, TraceRequest):
                records, dropped = self._trace.take()
                self.link.send(Trace(records=records, dropped=dropped))
            else:
                self._on_message(message)
                self._inbox.put(message)
