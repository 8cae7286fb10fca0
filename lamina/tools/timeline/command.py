"""``lamina-launch timeline TRACE``: what kept each pool from working, from a trace that a run wrote with --trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lamina.facts.report import count_text
from lamina.observe.perfetto import read
from lamina.observe.trace import Note
from lamina.scheduler.conductor.decision_log import AFTER_PREFILL, CHOICE

from .analysis import Report, analyse
from .device_states import STATES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("trace", help="a file that was written with --trace or LAMINA_TRACE")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--choices",
        action="store_true",
        help="print for each request which worker computed its prompt and why, and where it decoded",
    )
    parser.add_argument("--dry-run", action="store_true", help="check the trace, print its size, and exit")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError or OSError for bad input."""
    recording = read(args.trace)
    report = analyse(recording)
    if args.dry_run:
        print(f"{args.trace}: {len(recording.spans)} spans, {report.steps} steps; would report on them")
        return 0
    if args.json:
        choices = [{"at_s": note.at, "event": note.name, **note.fields} for note in recording.notes]
        print(json.dumps({**report_json(report), "choices": choices}, indent=2))
    else:
        print("\n".join([report_text(report), *choices_text(recording.notes, each=args.choices)]))
    return 0


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data for JSON."""
    return {
        **dataclasses.asdict(report),
        "hidden": [{**dataclasses.asdict(h), "share": h.share} for h in report.hidden],
    }


def choices_text(notes: Sequence[Note], *, each: bool) -> list[str]:
    """Return how many prompts each worker computed, and why; ``each``: with a line for each prompt."""
    whys = [(n.fields["by"], n.fields["reason"]) if n.name == CHOICE else ("refused", n.fields["limit"]) for n in notes]
    counted = Counter(whys)
    lines = ["", "prompts, by the worker that computed them and the reason:"] if counted else []
    lines += [f"  {by:<16}{why:<42}{count:>7}" for (by, why), count in sorted(counted.items())]
    return [*lines, *([""] if each else []), *(_choice(note) for note in (notes if each else ()))]


def _choice(note: Note) -> str:
    fields = note.fields
    name = f"request {fields['request']}" + (f".{fields['completion']}" if fields["completion"] else "")
    asked = f"{name}, {fields['tokens']} tokens: "
    if note.name != CHOICE:
        first = "first token" if fields["limit"].endswith(AFTER_PREFILL) else "first token foreseen"
        step = f", steps of {_ms(fields['tbt_s'])} then" if fields["tbt_s"] else ""
        return f"{asked}refused by {fields['limit']}, {first} after {_ms(fields['ttft_s'])}{step}{_prices(fields)}"
    moved = f" ({fields['moved']} tokens from {fields['source']})" if fields.get("moved") else ""
    foreseen = f", first token foreseen after {_ms(fields['ttft_s'])}" if "ttft_s" in fields else ""
    memory = ", ".join(map(str, fields["memory"]))
    return (
        f"{asked}{fields['by']}, {fields['reason']}{moved}, {fields['cached']} tokens "
        f"there{foreseen}{_prices(fields)}; batch "
        f"{fields['batch']} of {len(fields['batch_loads'])}, memory workers {memory}: {fields['lane_reason']}"
    )


def _prices(fields: dict[str, Any]) -> str:
    ways = [f"{way['by']} {way['way']} {_ms(way['ttft_s'])}" for way in fields["prices"]]
    return f"; ways: {', '.join(ways)}" if ways else ""


def report_text(report: Report) -> str:
    """Return the report as text, without a newline at the end."""
    return "\n".join([*_run(report), "", *_usage(report), "", *_events(report), *_hidden(report), *_trust(report)])


def _run(report: Report) -> list[str]:
    steps = count_text(report.steps, "step")
    median, p99 = _ms(report.step_median_s), _ms(report.step_p99_s)
    return [f"{report.window_s:.3f} s, {steps}; a step takes {median} (median), {p99} (99th percentile)"]


def _usage(report: Report) -> list[str]:
    columns = {**{f"{pool} pool": of for pool, of in report.pools.items()}, **report.devices}
    width = max(len(name) for name in columns) + 2
    lines = [f"{'share of the run':<36}" + "".join(f"{name:>{width}}" for name in columns)]
    for state, words in STATES.items():
        shares = [of[state] for of in columns.values()]
        if any(shares):
            cells = (f"{100 * x:.1f} %" if x else "-" for x in shares)
            lines.append(f"{words:<36}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _events(report: Report) -> list[str]:
    lines = [
        f"{s.device} was the last to send O in {s.last} of {s.layers} layers, then {_ms(s.late_s)} after the first"
        for s in report.stragglers
    ]
    for step in report.slow_steps:
        times = step.duration_s / report.step_median_s
        lines.append(
            f"slow: step {step.step} of batch {step.batch}, {count_text(step.rows, 'row')}: {_ms(step.duration_s)} "
            f"({times:.1f} x the median), most of it {STATES[step.cause]}"
        )
    return [*lines, ""] if lines else []


def _hidden(report: Report) -> list[str]:
    if not report.hidden:
        return []
    stored, hidden = sum(h.stored_s for h in report.hidden), sum(h.hidden_s for h in report.hidden)
    share = f" ({100 * hidden / stored:.0f} %)" if stored else ""
    least = min(report.hidden, key=lambda h: h.share)
    each = f"least in layer {least.layer}: {100 * least.share:.0f} %; --json has all layers"
    when = "attention over stored tokens before K, V began to be sent"
    return [f"{when}: {_ms(hidden)} of {_ms(stored)} a step{share}, {each}", ""]


def _trust(report: Report) -> list[str]:
    """Return the lines of a report that show how far the others can be trusted."""
    lines = [f"recording took at most {100 * report.recording_share:.2f} % of the run"]
    lines.append(f"clocks of all workers agree within {_ms(report.clock_uncertainty_s)}")
    lines += [
        f"{device} has lost its {count} oldest spans: the run is judged on the rest"
        for device, count in report.dropped.items()
        if count
    ]
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
