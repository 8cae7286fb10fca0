"""Recording: what is added comes out again, the newest survive, and the price is known.

Covers: lamina/observe/trace_collection.py, lamina/workers/control_loop.py.
"""

from __future__ import annotations

import math
import socket
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.observe.trace import NULL_RECORDER, Event, Recorder, Recording, Span, spans
from lamina.observe.trace_collection import Tracer, clock_offset, span_cost_s
from lamina.protocol.control import ClockRequest, ClockTime, ControlLink, Stop, Trace, TraceRequest
from lamina.workers.control_loop import ControlLoop

TIMEOUT_S = 10.0
AT = Span("", Event.PLAN, 7, 1 << 40, -1, -1, 0, 0.0, 0.0)  # batch 7 of a step beyond 32 bits


def test_what_is_added_comes_out() -> None:
    trace = Recorder(8)
    start = trace.now()
    end = trace.add(Event.SEND_Q, start, AT, 3, 1, 5 << 32)
    records, dropped = trace.take()
    assert list(spans("compute-0", records)) == [Span("compute-0", Event.SEND_Q, 7, 1 << 40, 3, 1, 5 << 32, start, end)]
    assert dropped == 0
    assert start <= end <= trace.now()


@settings(max_examples=40, deadline=None)
@given(capacity=st.integers(1, 9), count=st.integers(0, 40))
def test_the_newest_survive_in_order(capacity: int, count: int) -> None:
    trace = Recorder(capacity)
    for i in range(count):
        trace.add(Event.SLICE, float(i), AT, layer=i)
    records, dropped = trace.take()
    kept = [s.layer for s in spans("d", records)]
    assert kept == list(range(max(0, count - capacity), count))
    assert dropped == max(0, count - capacity)


def test_several_threads_may_add() -> None:
    """A prefill worker lends on threads of its own. No record is written over, and none is left out."""
    trace, interval, number = Recorder(1 << 12), sys.getswitchinterval(), 1 << 11

    def add(peer: int) -> None:
        for i in range(number):
            trace.add(Event.LEND, 0.0, AT, i, peer)

    threads = [threading.Thread(target=add, args=(peer,)) for peer in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    finally:
        sys.setswitchinterval(interval)
    records, dropped = trace.take()
    kept = sorted((s.peer, s.layer) for s in spans("d", records))
    assert (kept, dropped) == ([(peer, i) for peer in range(2) for i in range(number)], 0)


def test_off_keeps_nothing() -> None:
    assert NULL_RECORDER.add(Event.SLICE, NULL_RECORDER.now(), AT) == 0.0
    assert NULL_RECORDER.take() == (b"", 0)


def test_half_a_record_is_refused() -> None:
    trace = Recorder(2)
    trace.add(Event.SLICE, 0.0, AT)
    with pytest.raises(ValueError, match="memory-1"):
        list(spans("memory-1", trace.take()[0][:-1]))


def test_a_span_costs_microseconds_at_most() -> None:
    """A step of 1 ms with 60 spans stays under 3 % below 0.5 us each; the limit here leaves room for a busy machine."""
    assert 0 < span_cost_s() < 20e-6


@settings(max_examples=60, deadline=None)
@given(
    offset=st.floats(-1e4, 1e4),
    trips=st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=8),
)
def test_the_offset_lies_within_its_uncertainty(offset: float, trips: list[tuple[float, float]]) -> None:
    readings, now = [], 100.0
    for there, back in trips:
        readings.append((now, now + there + offset, now + there + back))
        now += there + back + 1.0
    found = clock_offset(readings)
    assert abs(found.offset_s - offset) <= found.uncertainty_s + 1e-9
    assert math.isclose(found.uncertainty_s, min(sum(t) for t in trips) / 2, abs_tol=1e-9)
    if offset == 0.0:
        assert found.correction_s == 0.0, "one clock stays one clock"
    if abs(offset) > 0.21:
        assert found.correction_s == found.offset_s


def test_a_worker_answers_while_it_works() -> None:
    """Its clock and its spans come from the thread that reads the link; another host's clock is set right."""
    ours, theirs = socket.socketpair()
    worker = ControlLink(theirs, ClockRequest | TraceRequest | Stop)
    driver = ControlLink(ours, ClockTime | Trace)
    trace, stopped = Recorder(4), threading.Event()
    for _ in range(6):
        trace.add(Event.WRITE, trace.now(), AT, 2)
    ControlLoop(worker, dict, lambda reason: stopped.set(), trace)
    before = trace.now()
    driver.send(ClockRequest())
    assert before <= driver.recv(TIMEOUT_S).now <= trace.now()
    driver.send(TraceRequest())
    answer = driver.recv(TIMEOUT_S)
    assert answer.dropped == 2
    (true, *_), (moved, *_) = spans("a", answer.records), spans("a", answer.records, offset_s=50.0)
    assert math.isclose(true.start - moved.start, 50.0)
    driver.send(Stop())
    assert stopped.wait(TIMEOUT_S)
    driver.close()
    worker.close()


def test_gather_takes_what_is_there(tmp_path: pytest.TempPathFactory) -> None:
    """A worker that is gone has no spans; the others' are written, corrected by their clocks."""
    path = str(tmp_path / "t.json")  # type: ignore[operator]
    tracer, ends = Tracer(path), [socket.socketpair() for _ in range(2)]
    ends[1][1].close()
    worker = ControlLink(ends[0][1], TraceRequest | Stop)
    trace = Recorder(4)
    done = trace.add(Event.WRITE, trace.now(), AT)
    ControlLoop(worker, dict, lambda reason: None, trace)
    tracer.set_clock("memory-0", [(10.0, 1010.001, 10.002)])
    links = {f"memory-{i}": ControlLink(ours, Trace) for i, (ours, _) in enumerate(ends)}
    tracer.collect(links, TIMEOUT_S)
    tracer.save()
    from lamina.observe.perfetto import read

    recording: Recording = read(path)
    assert set(recording.dropped) == {"engine", "memory-0"}
    assert math.isclose(recording.spans[0].end, done - 1000.0, abs_tol=1e-5)
    for link in [*links.values(), worker]:
        link.close()


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: pytest.TempPathFactory) -> None:
    for path in (f"{tmp_path}/no/such/folder/t.json", str(tmp_path)):
        with pytest.raises(ValueError, match="--trace"):
            Tracer(path)
    off = Tracer("")
    off.collect({}, 0.0)
    off.save()
    assert not off.is_enabled


def test_a_disk_that_is_full_at_the_end_is_told_by_the_flag() -> None:
    tracer = Tracer("/dev/full")
    tracer.recorder.add(Event.PLAN, tracer.recorder.now(), AT)
    tracer.collect({}, 1.0)
    with pytest.raises(OSError, match="--trace /dev/full cannot be written: No space left on device"):
        tracer.save()
