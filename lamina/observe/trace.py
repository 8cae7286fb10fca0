"""Recording of spans, cheap enough for the hot path: one fixed-size record each, in memory allocated at the start.

A worker holds a Recorder, or NULL_RECORDER if no trace is wanted. Both are called the same way:

    start = trace.now()
    ...
    trace.add(Event.WRITE, start, plan, layer)

Times are seconds of CLOCK_MONOTONIC (read by ``time.perf_counter`` and ``time.monotonic`` on Linux), one clock for all
processes of a host. Clocks of other hosts are corrected when the spans are merged; see
``lamina.observe.trace_collection``.
"""

from __future__ import annotations

import enum
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

ENGINE = "engine"  # the driver's device name; workers are "compute-0", "memory-1"
NOTES = 1 << 14  # newest notes that a process keeps
CAPACITY = 1 << 18  # records of a process: 12 MiB, of which only used pages are touched
FLIP_BIT = 255  # never recorded, so no Event: a drill has a memory worker damage its KV
_NATIVE = struct.Struct("=qqqqqq")
_RECORD = struct.Struct("<BxxxiIiQQdd")  # event, layer, batch, peer, step, value, start, end


class Event(enum.IntEnum):
    """The kind of a span. ``layer`` counts attention calls; for SLICE it is the slice. ``peer``: the worker at the
    other end of a message. ``value``: rows of a SLICE, bytes of a message; for SCHEDULE, pairs of a row and a token
    that it sees.
    """

    SCHEDULE = 1  # engine: choose the rows of a step
    WAIT_DONE = 2  # engine: until the compute worker has drawn
    POSTPROCESS = 3  # engine: process the tokens
    WAIT_STEP = 10  # compute: until the engine names a step
    WAIT_STORED = 18  # prefill: until all memory workers have the K and V, with nothing else to do
    SLICE = 11  # compute: a slice, the messages that it sends included
    SEND_PLAN = 12
    SEND_Q = 13  # from the tensor to the signal, the wait for a slot included
    SEND_KV = 14
    WAIT_O = 15
    RECEIVE_O = 16  # from the arrival to the tensor
    SAMPLE = 17
    WAIT_PLAN = 20  # memory: until the next step begins
    PLAN = 21  # memory: apply the plan to blocks and tables
    WAIT_Q = 22
    WAIT_KV = 23
    STORED = 24  # memory: attention over stored tokens
    WRITE = 25  # memory: K and V to their blocks
    NEW = 26  # memory: attention over the step's own tokens, and the merge
    SEND_O = 27
    GRANT = 28  # memory: K and V of a prefill worker, to their blocks
    LOAD = 29  # memory: offloaded pages' K and V of some layers, of which ``layer`` is the first, to blocks
    SAVE = 34  # memory: a page's K and V, from blocks to storage
    WAIT_LAYER = 31  # memory: until stored K and V of a layer are loaded
    FETCH = 32  # prefill: until a layer of a prompt's beginning has come from another worker, and is stored
    LEND = 33  # prefill, memory: send a part of such a layer to a prefill worker, in the background
    RESERVE = 30  # any sender: until a slot of the peer's inbox is free


class StepRef(Protocol):
    """An object that names its step: a StepPlan, a MessageKey, a StepDone."""

    @property
    def batch(self) -> int: ...
    @property
    def step(self) -> int: ...


class Span(NamedTuple):
    """One activity of one device, from ``start`` to ``end`` in seconds."""

    device: str  # such as "memory-0"; "engine"
    event: Event
    batch: int
    step: int
    layer: int  # -1: none
    peer: int  # -1: none
    value: int
    start: float
    end: float


class Note(NamedTuple):
    """A decision of the engine and its time. ``fields``: numbers, texts and lists, as in JSON."""

    at: float
    name: str
    fields: dict[str, Any]


ROUNDING_S = 1e-9  # error of differences of times


@dataclass(frozen=True)
class ClockOffset:
    """The seconds by which a worker's clock is ahead of the engine's, give or take ``uncertainty_s``."""

    offset_s: float
    uncertainty_s: float

    @property
    def correction_s(self) -> float:
        """The seconds to subtract from the worker's times: 0 if the offset may be zero, as on one host."""
        return self.offset_s if abs(self.offset_s) > self.uncertainty_s + ROUNDING_S else 0.0


@dataclass(frozen=True)
class Recording:
    """The spans of all devices on the engine's clock, by their start.

    ``dropped``: device -> oldest spans that a full recorder has lost. ``span_cost_s``: seconds that recording one span
    took. ``notes``: of the engine.
    """

    spans: list[Span]
    dropped: dict[str, int]
    clocks: dict[str, ClockOffset]
    span_cost_s: float
    notes: Sequence[Note] = ()


class Recorder:
    """Keeps the newest ``capacity`` spans of one worker. Any thread may add spans, and ``take`` them."""

    now = staticmethod(time.perf_counter)

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._data = bytearray(capacity * _RECORD.size)
        self._capacity = capacity
        self._count, self._adding = 0, threading.Lock()
        self.notes: deque[Note] | None = deque(maxlen=NOTES)

    def add(self, event: Event, start: float, at: StepRef, layer: int = -1, peer: int = -1, value: int = 0) -> float:
        """Record a span from ``start`` until now. Returns now."""
        end = time.perf_counter()
        self.put(event, start, end, at, layer, peer, value)
        return end

    def put(
        self, event: Event, start: float, end: float, at: StepRef, layer: int = -1, peer: int = -1, value: int = 0
    ) -> None:
        """Record a span from ``start`` to ``end``."""
        with self._adding:
            offset = self._count % self._capacity * _RECORD.size
            _RECORD.pack_into(self._data, offset, event, layer, at.batch, peer, at.step, value, start, end)
            self._count += 1

    def note(self, name: str, fields: dict[str, Any]) -> None:
        """Keep a note of this moment. Not for events of every step."""
        if self.notes is not None:
            self.notes.append(Note(time.perf_counter(), name, fields))

    def is_due(self, event: int) -> bool:
        """Return whether a failpoint requests an action at this event that does not happen by itself."""
        return False

    def on_failpoint_passed(self, event: int) -> None:
        """Record that the action is done."""

    @property
    def native_buffer(self) -> object:
        """The buffer for native modules: None: record no spans; else empty, or a Failpoint's memory."""
        return b""

    def take(self) -> tuple[bytes, int]:
        """Return the records, oldest first, and the number of older ones that were overwritten."""
        count, size = self._count, _RECORD.size
        if count <= self._capacity:
            return bytes(self._data[: count * size]), 0
        oldest = count % self._capacity * size
        return bytes(self._data[oldest:] + self._data[:oldest]), count - self._capacity


class NullRecorder(Recorder):
    """A recorder that records nothing."""

    def __init__(self) -> None:
        super().__init__(0)
        self.notes = None

    now = staticmethod(lambda: 0.0)

    @property
    def native_buffer(self) -> object:
        return None

    def add(self, event: Event, start: float, at: StepRef, layer: int = -1, peer: int = -1, value: int = 0) -> float:
        return 0.0

    def put(
        self, event: Event, start: float, end: float, at: StepRef, layer: int = -1, peer: int = -1, value: int = 0
    ) -> None:
        pass


NULL_RECORDER = NullRecorder()


def native_spans(data: bytes) -> Iterator[tuple[int, int, int, float, float, int]]:
    """Decode a native module's spans (csrc/spans.h): event, layer, another number, start and end in seconds, value."""
    for event, layer, number, start, end, value in _NATIVE.iter_unpack(data):
        yield event, layer, number, start / 1e9, end / 1e9, value


def spans(device: str, records: bytes, offset_s: float = 0.0) -> Iterable[Span]:
    """Decode the records of ``Recorder.take``. ``offset_s``: seconds by which the device's clock is ahead.

    Raises ValueError on anything that is not a whole number of known records.
    """
    if len(records) % _RECORD.size:
        raise ValueError(f"{device}: {len(records)} bytes are not a whole number of records")
    for event, layer, batch, peer, step, value, start, end in _RECORD.iter_unpack(records):
        yield Span(device, Event(event), batch, step, layer, peer, value, start - offset_s, end - offset_s)
