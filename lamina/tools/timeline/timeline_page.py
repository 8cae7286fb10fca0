"""A timeline as one HTML page that needs no other file: the lanes, with the report next to them."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from importlib import resources
from typing import Any

from lamina.observe.perfetto import NAMES, TRACKS, WAITING, device_order, track
from lamina.observe.trace import Event, Recording

from .analysis import Report, steps_of
from .device_states import STATES

_DATA = "/*DATA*/null"


def page(recording: Recording, report: Report, title: str) -> str:
    """Return the text of the page."""
    template = resources.files(__package__).joinpath("timeline.html").read_text()
    data = json.dumps(_data(recording, report, title), separators=(",", ":"))
    return template.replace(_DATA, data.replace("<", "\\u003c"))  # no text of the trace can end the script


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    return {
        **dataclasses.asdict(report),
        "hidden": [{**dataclasses.asdict(h), "share": h.share} for h in report.hidden],
    }


def _data(recording: Recording, report: Report, title: str) -> dict[str, Any]:
    """Return times in microseconds from the first work; a wait that began before is cut off there."""
    base = min(s.start for s in recording.spans if s.event not in WAITING)
    devices: dict[str, list[list[Any]]] = defaultdict(lambda: [[] for _ in TRACKS])
    for s in recording.spans:
        if s.end > base:
            start, end = round(max(0.0, s.start - base) * 1e6, 1), round((s.end - base) * 1e6, 1)
            row = [int(s.event), start, round(end - start, 1), s.batch, s.step, s.layer, s.peer, s.value]
            devices[s.device][track(s.event)].append(row)
    for lanes in devices.values():
        for rows in lanes:
            rows.sort(key=lambda row: row[1])
    return {
        "title": title,
        "report": report_json(report),
        "states": STATES,
        "lanes": TRACKS,
        "events": {e.value: [e.name, NAMES[e]] for e in Event},
        "devices": [{"name": d, "lanes": devices[d]} for d in sorted(devices, key=device_order)],
        "steps": [
            [s.batch, s.step, s.rows, round((s.start - base) * 1e6, 1), round(s.duration_s * 1e6, 1)]
            for s in steps_of(recording.spans)
        ],
    }
