"""The driver's side of a trace: sets the workers' clocks beside its own, gathers their spans, writes one file."""

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
    """The part of a control link that is needed here."""

    def send(self, message: Any) -> None:
        """Send a message to the worker. Raises LinkClosedError."""
        ...

    def recv(self, timeout_s: float | None = None) -> Any:
        """The worker's next message. Raises LinkClosedError, TimeoutError."""
        ...


class Tracer:
    """Where ``path`` is not empty, ``recorder`` records the engine's spans, and ``collect`` then ``save`` make the
    file.

    The file is written once, at the end.
    """

    def __init__(self, path: str) -> None:
        """Raises ValueError where the file could not be written later."""
        self.path = path
        self.recorder = Recorder() if path else NULL_RECORDER
        self._clocks: dict[str, ClockOffset] = {}
        self._spans: list[Span] = []
        self._dropped: dict[str, int] = {}
        check_trace_path(path)

    @property
    def is_enabled(self) -> bool:
        """Whether a trace was asked for."""
        return bool(self.path)

    def set_clock(self, name: str, trips: Sequence[tuple[float, float, float]]) -> None:
        """Take in round trips (asked, the worker's clock, answered) to worker ``name``."""
        self._clocks[name] = clock_offset(trips)

    def collect(self, links: Mapping[str, TraceLink], timeout_s: float) -> None:
        """Ask the workers for their spans, within ``timeout_s`` for all; those that are gone have none."""
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
        """Write the file, if there is anything to write. Raises OSError."""
        ordered, self._spans = sorted(self._spans, key=lambda s: s.start), []
        if ordered:
            notes = list(self.recorder.notes or ())
            write(self.path, Recording(ordered, self._dropped, self._clocks, span_cost_s(), notes))

    def _take(self, name: str, trace: Trace) -> None:
        clock = self._clocks.get(name)
        self._spans += spans(name, trace.records, clock.correction_s if clock else 0.0)
        self._dropped[name] = trace.dropped


def check_trace_path(path: str) -> None:
    """Raises ValueError where a trace could not be written later. Empty = none is wanted."""
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
    """From round trips (asked, the other clock, answered): the shortest one says most.

    The other clock was read somewhere between the two, so the middle is wrong by half a round trip at most.
    """
    asked, theirs, answered = min(trips, key=lambda t: t[2] - t[0])
    return ClockOffset(theirs - (asked + answered) / 2, (answered - asked) / 2)


def span_cost_s(count: int = 200, runs: int = 5) -> float:
    """Seconds that recording one span takes on this machine: the best mean of a few short runs."""
    trial, at, best = Recorder(64), Span("", Event.PLAN, 0, 0, -1, -1, 0, 0.0, 0.0), float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            trial.add(Event.PLAN, trial.now(), at)
        best = min(best, (time.perf_counter() - start) / count)
    return best


def _trace_of(link: TraceLink, deadline: float) -> Trace:
    """Whatever else still comes is of no use any more."""
    while True:
        message = link.recv(max(0.0, deadline - time.monotonic()))
        if isinstance(message, Trace):
            return message
