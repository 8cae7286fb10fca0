"""The report of a drill on its faults, and its exit status."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.facts.report import count_text

if TYPE_CHECKING:
    from .target import Victim

BAD = "wrong", "lost", "twice"
GOOD = "right", "edge"
SILENT = "kill-spare", "scale"  # no log line reports a loss for these
SAMPLED = "flip"  # not always noticed, if --kv-checks covers only some blocks
SLACK_S = 0.1  # for a line of the log to arrive here


class FaultResult(NamedTuple):
    """One fault that came in time, and the verdicts on the streams that were read meanwhile."""

    fault: str
    victim: Victim
    kind: str  # of the message at which it came
    noticed_s: float | None  # until the log reported it
    pause_s: float  # the longest of a stream after it
    rebuilt: int | None  # tokens whose KV was computed again; None: unknown
    verdicts: Counter[str]
    idle_s: float = 0.0  # the part of ``noticed_s`` before a process waited for the victim

    @property
    def was_idle(self) -> bool:
        """True if the victim owed nothing when it was hit."""
        return self.idle_s > SLACK_S


def report(args: argparse.Namespace, blows: Sequence[FaultResult], calm: Counter[str], left: int) -> int:
    """Print all results as ``args`` require. Returns exit status 1 if a stream was harmed, a fault was noticed too late
    or paused for too long, or something is missing or ``left``. ``calm``: verdicts of an undisturbed run.
    """
    rows = {fault: row_of([b for b in blows if b.fault == fault]) for fault in dict.fromkeys(b.fault for b in blows)}
    harmed = sum(row[name] for row in rows.values() for name in BAD)
    late = late_faults(rows, {"noticed_s": args.noticed_s, "pause_s": args.pause_s})
    bad = bool(harmed or left or late or len(blows) < args.count)
    if args.json:
        kinds = Counter(b.kind for b in blows)
        summary = {
            "kinds": dict(sorted(kinds.items())),
            "faults": rows,
            "hits": len(blows),
            "left": left,
            "late": late,
            "calm": dict(calm),
            "streams": args.streams,
        }
        print(json.dumps(summary))
        return int(bad)
    _print_table(rows)
    if other := args.streams - sum(calm[name] for name in GOOD):
        print(f"without a fault {other} of {args.streams} streams changed in a second run")
    if len(blows) < args.count:
        print(f"the server did not recover from hit {len(blows)}, of {blows[-1].victim.name}")
    print(*late, sep="\n", end="\n" if late else "")
    processes = count_text(left, "process", "processes")
    print(f"{count_text(len(blows), 'hit')}, {count_text(harmed, 'stream')} harmed, {processes} left")
    return int(bad)


def late_faults(rows: dict[str, dict[str, Any]], most_s: dict[str, float]) -> list[str]:
    """Return, by fault and in words, how many were slower than ``most_s`` allows (0: any time), by name of times."""
    late = list[str]()
    for fault, row in rows.items():
        unseen, most = row["hits"] - len(row["noticed_s"]), most_s.get("noticed_s", 0.0)
        if unseen and most > 0 and fault not in (*SILENT, SAMPLED):
            late.append(f"{fault}: {unseen} of {row['hits']} above --noticed-s {most:g}: not noticed")
        for name, most in most_s.items():
            over = [seconds for seconds in row[name] if seconds > most > 0]
            if over:
                flag = name.replace("_", "-")
                late.append(f"{fault}: {len(over)} of {row['hits']} above --{flag} {most:g}: {max(over):.2f} s at most")
    return late


def row_of(blows: Sequence[FaultResult]) -> dict[str, Any]:
    """Return the results of one kind of fault. ``noticed_s`` counts from the fault, or from when a process waited for
    the victim. ``noticed_idle_s`` counts from the fault, for victims on which no process waited.
    """
    verdicts = sum((b.verdicts for b in blows), Counter[str]())
    return {
        "hits": len(blows),
        "noticed_s": [round(b.noticed_s - b.idle_s * b.was_idle, 3) for b in blows if b.noticed_s is not None],
        "noticed_idle_s": [round(b.noticed_s, 3) for b in blows if b.noticed_s is not None and b.was_idle],
        "pause_s": [round(b.pause_s, 3) for b in blows],
        "rebuilt": [b.rebuilt for b in blows if b.rebuilt is not None],
        "victims": dict(sorted(Counter(b.victim.place for b in blows).items())),
        "kinds": dict(sorted(Counter(b.kind for b in blows).items())),
        **{name: verdicts[name] for name in (*GOOD, *BAD)},
    }


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    head = f"{'right':>7} {'edge':>5} {'wrong':>6} {'lost':>5} {'twice':>6}"
    print(f"{'fault':14} {'hits':>5} {'noticed after':>20} {'pause':>20} {'rebuilt':>8} {head}")
    for fault, row in rows.items():
        times = (_span(row["noticed_s"]), _span(row["pause_s"]))
        rebuilt = f"{median(row['rebuilt']):.0f}" if row["rebuilt"] else "-"
        counts = f"{row['right']:7} {row['edge']:5} {row['wrong']:6} {row['lost']:5} {row['twice']:6}"
        print(f"{fault:14} {row['hits']:5} {times[0]:>20} {times[1]:>20} {rebuilt:>8} {counts}")
        print(f"{'':14} of {_counts(row['victims'])}; at {_counts(row['kinds'])}")
        if idle := row["noticed_idle_s"]:
            print(f"{'':14} {len(idle)} owed nothing at first, noticed {_span(idle)} after the hit")
        if fault == "flip":
            print(f"{'':14} noticed: {len(row['noticed_s'])} of {row['hits']}")


def _span(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} to {max(seconds):.2f} s" if seconds else "-"


def _counts(of: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of.items())
