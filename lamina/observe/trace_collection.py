"""The driver's side of a trace: it compares the workers' clocks with its own, gathers their spans, and
writes one file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lamina.protocol.control import LinkClosedError, Trace, TraceRequest

from .perfetto import write
from .trace import ENGINE, NULL_RECORDER, ClockOffset, Event, Recorder, Recording, Span, spans

ROUND_TRIPS = 16


class TraceLink(Protocol):
    """The part of a control link that a Tracer uses."""

    def send(self, message: Any) -> None:
        """Send a message to the worker. Raises LinkClosedError."""
        ...

    def recv(self, timeout_s: float | None = None) -> Any:
        """Return the worker's next message. Raises LinkClosedError, TimeoutError."""
        ...


class Tracer:
    """Records the engine's spans in ``recorder``, unless ``path`` is empty; ``collect`` and then ``save`` write the
    file.

    The file is written once, at the end.
    """

    def __init__(self, path: str) -> None:
        """Check the path. Raises ValueError if the file could not be written later."""
        self.path = path
        self.recorder = Recorder() if path else NULL_RECORDER
        self._clocks: dict[str, ClockOffset] = {}
        self._spans: list[Span] = []
        self._dropped: dict[str, int] = {}
        check_trace_path(path)

    @property
    def is_enabled(self) -> bool:
        """Return whether a trace was requested."""
        return bool(self.path)

    def set_clock(self, name: str, trips: Sequence[tuple[float, float, float]]) -> None:
        """Set the clock of worker ``name`` from round trips: times of the request, the worker's clock, the reply."""
        self._clocks[name] = clock_offset(trips)

    def collect(self, links: Mapping[str, TraceLink], timeout_s: float) -> None:
        """Request the workers' spans, with ``timeout_s`` for all; workers that are gone have none."""
        if not self.is_enabled or self._dropped:
            return
        deadline = time.monotonic() + timeout_s
        for link in links.values():
            with contextlib.suppress(LinkClosedError):
                link.send(TraceRequest())
        for name, link in links.items():
            with contextlib.suppress(LinkClosedError, TimeoutError, ValueError):
                self._take(name, _trace_of(link, deadline))
        records, dropped = self.recorder.take()
        self._take(ENGINE, Trace(records=records, dropped=dropped))

    def save(self) -> None:
        """Write the file, if there is anything to write. Raises OSError, which names it."""
        ordered, self._spans = sorted(self._spans, key=lambda s: s.start), []
        if ordered:
            notes = list(self.recorder.notes or ())
            try:
                write(self.path, Recording(ordered, self._dropped, self._clocks, span_cost_s(), notes))
            except OSError as error:
                raise OSError(f"--trace {self.path} cannot be written: {error.strerror or error}") from error

    def _take(self, name: str, trace: Trace) -> None:
        clock = self._clocks.get(name)
        self._spans += spans(name, trace.records, clock.correction_s if clock else 0.0)
        self._dropped[name] = trace.dropped


def check_trace_path(path: str) -> None:
    """Raise ValueError if a trace could not be written later. An empty path means no trace."""
    if not path:
        return
    existed = os.path.lexists(path)
    try:
        Path(path).open("ab").close()
        if not existed:
            os.unlink(path)
    except OSError as e:
        raise ValueError(f"--trace {path} cannot be written: {e.strerror}; name a file in a folder that exists") from e


def clock_offset(trips: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """Return the offset by round trips (time of the request, the other clock, time of the reply); the shortest one is
    the most exact.

    The other clock was read between the two times, so the middle is wrong by half a round trip at most.
    """
    asked, theirs, answered = min(trips, key=lambda t: t[2] - t[0])
    return ClockOffset(theirs - (asked + answered) / 2, (answered - asked) / 2)


def span_cost_s(count: int = 200, runs: int = 5) -> float:
    """Return the seconds that recording one span takes on this machine: the best mean of a few short runs."""
    trial, at, best = Recorder(64), Span("", Event.PLAN, 0, 0, -1, -1, 0, 0.0, 0.0), float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            trial.add(Event.PLAN, trial.now(), at)
        best = min(best, (time.perf_counter() - start) / count)
    return best


def _trace_of(link: TraceLink, deadline: float) -> Trace:
    """Return the Trace that comes over ``link``, and drop all other messages."""
    while True:
        message = link.recv(max(0.0, deadline - time.monotonic()))
        if isinstance(message, Trace):
            return message
