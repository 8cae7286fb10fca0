"""Traces as files in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

One process of the file is one device, with a track each for its work, its messages and its waiting. Arrows lead from
send Q over the attention and send O to receive O of the same (batch, step, layer, memory worker).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .trace import ENGINE, ClockOffset, Event, Note, Recording, Span

FORMAT = 1
NOTE = "NOTE"  # the category of a note
TRACKS = ("work", "messages", "waiting", "pages", "saves")
MESSAGES = {Event.SEND_PLAN, Event.SEND_Q, Event.SEND_KV, Event.RECEIVE_O, Event.SEND_O}
WAITING = {
    Event.WAIT_DONE, Event.WAIT_STEP, Event.WAIT_O, Event.WAIT_PLAN, Event.WAIT_Q, Event.WAIT_KV, Event.RESERVE,
    Event.WAIT_STORED, Event.WAIT_LAYER, Event.FETCH,
}  # fmt: skip
NAMES = {
    Event.SCHEDULE: "schedule",
    Event.WAIT_DONE: "wait for tokens",
    Event.POSTPROCESS: "postprocess",
    Event.WAIT_STEP: "wait for a step",
    Event.SLICE: "slice",
    Event.SEND_PLAN: "send plan",
    Event.SEND_Q: "send Q",
    Event.SEND_KV: "send KV",
    Event.WAIT_O: "wait for O",
    Event.RECEIVE_O: "receive O",
    Event.SAMPLE: "sample",
    Event.WAIT_PLAN: "wait for a plan",
    Event.PLAN: "plan",
    Event.WAIT_Q: "wait for Q",
    Event.WAIT_KV: "wait for KV",
    Event.STORED: "stored",
    Event.WRITE: "write",
    Event.NEW: "new",
    Event.SEND_O: "send O",
    Event.WAIT_STORED: "wait until stored",
    Event.GRANT: "grant",
    Event.RESERVE: "wait for a slot",
    Event.LOAD: "load",
    Event.SAVE: "save",
    Event.WAIT_LAYER: "wait for a layer",
    Event.FETCH: "fetch a beginning",
    Event.LEND: "lend a beginning",
}
_UNITS = {Event.SLICE: "rows", Event.SCHEDULE: "pairs"}
_FLOW = {Event.SEND_Q: "s", Event.STORED: "t", Event.SEND_O: "t", Event.RECEIVE_O: "f"}


def track(event: Event) -> int:
    """Return an event's index into TRACKS."""
    if event == Event.SAVE:
        return 4
    return 3 if event in (Event.LOAD, Event.LEND) else 1 if event in MESSAGES else 2 if event in WAITING else 0


def span_name(span: Span) -> str:
    """Return the text that a viewer shows, such as "slice 3"."""
    return NAMES[span.event] + (f" {span.layer}" if span.layer >= 0 else "")


def device_order(device: str) -> tuple[int, str, int]:
    """Return a sorting key of devices: the engine, compute, memory and prefill workers, the rest; then by number."""
    role, _, number = device.partition("-")
    known = (ENGINE, "compute", "memory", "prefill")
    return known.index(role) if role in known else len(known), role, int(number) if number.isdigit() else 0


def write(path: str, recording: Recording) -> None:
    """Write a recording to a file. Raises OSError."""
    base = recording.spans[0].start if recording.spans else 0.0
    head = {
        "lamina_trace": FORMAT,
        "clock": "seconds of the engine's CLOCK_MONOTONIC; ts is in microseconds from start_s",
        "start_s": base,
        "dropped": recording.dropped,
        "clocks": {
            n: {"offset_s": c.offset_s, "uncertainty_s": c.uncertainty_s, "applied_s": c.correction_s}
            for n, c in recording.clocks.items()
        },
        "span_cost_s": recording.span_cost_s,
    }
    with open(path, "w") as f:
        f.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(head)},"traceEvents":[\n')
        f.write(",\n".join(json.dumps(e, separators=(",", ":")) for e in _trace_events(recording, base)))
        f.write("\n]}\n")


def read(path: str) -> Recording:
    """Read a file that ``write`` wrote. Raises OSError; ValueError for a file that is not such a trace."""
    try:
        data = json.loads(Path(path).read_bytes())
        head = data["otherData"]
        if head["lamina_trace"] != FORMAT:
            raise ValueError(f"{path}: trace format {head['lamina_trace']}, this version reads {FORMAT}")
        clocks = {n: ClockOffset(c["offset_s"], c["uncertainty_s"]) for n, c in head["clocks"].items()}
        spans = list(_spans(data["traceEvents"], head["start_s"]))
        notes = list(_notes(data["traceEvents"], head["start_s"]))
        return Recording(spans, head["dropped"], clocks, head["span_cost_s"], notes)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} is not a trace of lamina ({type(e).__name__}: {e}): make one with --trace") from e


def _trace_events(recording: Recording, base: float) -> Iterator[dict[str, Any]]:
    spans = recording.spans
    devices = sorted({*(s.device for s in spans), *(ENGINE for _ in recording.notes)}, key=device_order)
    pids = {device: i + 1 for i, device in enumerate(devices)}
    for device, pid in pids.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": device}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for tid, text in enumerate(TRACKS):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": text}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    sent: set[str] = set()
    for span in spans:
        place = {"pid": pids[span.device], "tid": track(span.event)}
        start, end = (span.start - base) * 1e6, (span.end - base) * 1e6
        args = {"batch": span.batch, "step": span.step}
        args |= {k: v for k, v in (("layer", span.layer), ("peer", span.peer)) if v >= 0}
        args |= {_UNITS.get(span.event, "bytes"): span.value} if span.value else {}
        yield {
            "ph": "X", "name": span_name(span), "cat": span.event.name, **place,
            "ts": round(start, 3), "dur": round(end - start, 3), "args": args,
        }  # fmt: skip
        yield from _arrow(span, place, start, sent)
    for note in recording.notes:
        at = {"pid": pids[ENGINE], "tid": track(Event.SCHEDULE), "ts": round((note.at - base) * 1e6, 3)}
        yield {"ph": "i", "s": "p", "name": note.name, "cat": NOTE, **at, "args": note.fields}


def _arrow(span: Span, place: dict[str, int], start: float, sent: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the span's part in the arrow from Q to O, if it has one. Arrows without a known start are left out.

    The arrow touches every span at its start: a message may well arrive before its sender's span ends.
    """
    phase = _FLOW.get(span.event)
    if phase is None:
        return
    worker = span.peer if span.event in (Event.SEND_Q, Event.RECEIVE_O) else device_order(span.device)[2]
    key = f"{span.batch}.{span.step}.{span.layer}.{worker}"
    if phase == "s":
        sent.add(key)
    if key in sent:
        ends = {"bp": "e"} if phase == "f" else {}  # at the span that encloses it, not at the next one
        yield {"ph": phase, "name": "Q to O", "cat": "message", "id": key, **place, "ts": round(start, 3), **ends}


def _value(args: dict[str, Any]) -> int:
    return next((args[unit] for unit in (*_UNITS.values(), "bytes") if unit in args), 0)


def _notes(events: Iterable[dict[str, Any]], base: float) -> Iterator[Note]:
    for e in events:
        if e["ph"] == "i" and e["cat"] == NOTE:
            yield Note(base + e["ts"] / 1e6, e["name"], e["args"])


def _spans(events: Iterable[dict[str, Any]], base: float) -> Iterator[Span]:
    devices = {}
    for e in events:
        if e["ph"] == "M" and e["name"] == "process_name":
            devices[e["pid"]] = e["args"]["name"]
        elif e["ph"] == "X":
            args, start = e["args"], base + e["ts"] / 1e6
            yield Span(
                devices[e["pid"]], Event[e["cat"]], args["batch"], args["step"], args.get("layer", -1),
                args.get("peer", -1), _value(args), start, start + e["dur"] / 1e6,
            )  # fmt: skip
