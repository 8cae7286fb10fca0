"""Ping-pong of Lamina's transports against plain sockets, gloo, ZeroMQ, Open MPI, UCX, perftest and NCCL.

Competitors take turns, several rounds over; a figure is the median over the rounds of a round's p50, one way (half a
round trip). "put": the message lies in the receiver's memory, where it can be used, and is not touched before the clock
stops. "copy": the receiver copies it into a buffer of its own, as a socket or MPI does. All but UCX compare every
payload with what was sent. ucx_perftest sends one buffer again and again and compares nothing, so it is not part of
"best" but has ratios of its own. What is not installed is named and left out.

    python perf/pingpong.py --write
    python perf/pingpong.py --figure-13 --write   # the paper's, where two GPUs and a NIC are; else what is missing
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import RESULTS, cpu_pressure, record, spread
from transports.competitors import COMPETITORS, KINDS, LIMIT_S, Competitor, Course
from transports.loglog import Curve, draw
from transports.over_nics import FIGURE_13, OVER_NICS, PAPER, lacks_for_figure

from lamina.netstack.bench.machine_facts import machine

EVERYBODY = [*COMPETITORS, *OVER_NICS]
SIZES = "8,64,256,1024,4096,16384,65536,262144,1048576,4194304,16777216"
Samples = dict[str, dict[int, list[float]]]  # competitor -> bytes -> p50 of each round, microseconds


def take_turns(course: Course, competitors: list[Competitor], rounds: int) -> tuple[Samples, Samples, list[float]]:
    """(p50, p99, CPU pressure before each turn). A competitor that fails is named; it may try again."""
    p50: Samples = defaultdict(lambda: defaultdict(list))
    p99: Samples = defaultdict(lambda: defaultdict(list))
    pressure = []
    for number in range(rounds):
        for competitor in competitors if number % 2 == 0 else reversed(competitors):
            pressure.append(cpu_pressure())
            try:
                times = competitor.run(course)
            except (RuntimeError, OSError, ValueError) as error:
                print(f"{competitor.name}: no turn: {' '.join(str(error).split())[:200]}", file=sys.stderr)
                continue
            for nbytes, (half, late) in times.items():
                p50[competitor.name][nbytes].append(half)
                p99[competitor.name][nbytes].append(late)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return p50, p99, pressure


def medians(samples: Samples) -> dict[str, dict[int, float]]:
    return {name: {n: statistics.median(v) for n, v in sizes.items()} for name, sizes in samples.items()}


def targets(mid: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Returns the aims, each with its figures; ``ratio`` at most ``aim`` is a hit."""

    def versus(subject: str, others: list[str], nbytes: int, aim: float) -> None:
        known = {o: mid[o][nbytes] for o in others if nbytes in mid.get(o, {})}
        if known and nbytes in mid.get(subject, {}):
            best = min(known, key=lambda o: known[o])
            ours = mid[subject][nbytes]
            aims[f"{subject}, {nbytes} B, against {best}"] = {
                "us": ours, "other_us": known[best], "ratio": ours / known[best], "aim": aim,
            }  # fmt: skip

    aims: dict[str, dict[str, float]] = {}
    others = [c.name for c in COMPETITORS if c.kind == "memory" and c.compares and not c.name.startswith("lamina")]
    for how in ("put", "copy"):
        versus(f"lamina shm {how}", ["Open MPI shm"], 64, 1.0)
        for nbytes in (16384, 1 << 20):
            for rivals in (others, ["UCX shm tag"], ["UCX shm put"]):
                versus(f"lamina shm {how}", rivals, nbytes, 1.0)
        for nbytes in (64, 16384):
            versus(f"lamina tcp {how}", ["TCP socket", "TCP socket, polled"], nbytes, 1.2)
            versus(f"lamina tcp {how}", ["TCP socket"], nbytes, 1.2)
            versus(f"lamina tcp {how}, Python", ["TCP socket, Python"], nbytes, 1.2)
        ours = mid.get(f"lamina shm {how}, Python", {}).get(4096)
        if ours is not None:
            name = f"lamina shm {how}, Python, 4096 B, against 3 us"
            aims[name] = {"us": ours, "other_us": 3.0, "ratio": ours / 3.0, "aim": 1.0}
    return aims


def plots(mid: dict[str, dict[int, float]], place: Path) -> None:
    for kind, title in KINDS.items():
        named = [c.name for c in EVERYBODY if c.kind == kind and c.name in mid]
        if not named:
            continue
        latency = [Curve(name, sorted(mid[name].items()), name.startswith("lamina")) for name in named]
        speed = [Curve(a.name, [(n, n / us / 1e3) for n, us in a.points], a.strong) for a in latency]
        for what, lines, unit in (("latency", latency, "microseconds, one way"), ("bandwidth", speed, "GB/s, one way")):
            (place / f"pingpong_{kind}_{what}.svg").write_text(draw(title, "bytes of a message", unit, lines))


def table(mid: dict[str, dict[int, float]], sizes: list[int]) -> str:
    head = f"{'us, one way':24}" + "".join(f"{n:>10}" for n in sizes)
    rows = [f"{name:24}" + "".join(f"{mid[name].get(n, math.nan):>10.4g}" for n in sizes) for name in mid]
    return "\n".join([head, *rows])


def chosen(parts: list[str]) -> list[Competitor]:
    wanted = [c for c in EVERYBODY if not parts or any(part in c.name for part in parts)]
    if not wanted:
        raise ValueError(f"--only {parts[0]!r} matches no competitor; there are {'; '.join(c.name for c in EVERYBODY)}")
    return wanted


def of_figure_13() -> list[Competitor]:
    """Raises ValueError, one line, for whatever of it this host lacks."""
    if missing := lacks_for_figure(EVERYBODY):
        needs = "; ".join(dict.fromkeys(need for text in missing.values() for need in text.split("; ")))
        raise ValueError(f"--figure-13 is drawn where two GPUs and a NIC are; missing here: {needs}")
    return [c for c in EVERYBODY if c.name in FIGURE_13]


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="bytes of a message, by comma")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each competitor (default: 5)")
    parser.add_argument("--count", type=int, default=5000, help="ping-pongs of a size in a turn (default: 5000)")
    parser.add_argument("--warm-up", type=int, default=300, help="ping-pongs before them (default: 300)")
    parser.add_argument("--volume", type=int, default=64 << 20, help="bytes of a size in a turn, at most (64 MiB)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"of a command in a turn (default: {LIMIT_S})")
    parser.add_argument("--cores", default="0,1", help="of the two processes (default: 0,1)")
    parser.add_argument("--only", action="append", default=[], help="those whose name contains this; may be repeated")
    parser.add_argument("--figure-13", action="store_true", help="the paper's, of kernels, NICs and NCCL alone")
    parser.add_argument("--write", action="store_true", help="append to results/pingpong.jsonl and draw the plots")
    parser.add_argument("--json", action="store_true", help="print the line that --write would append, and no table")
    parser.add_argument("--dry-run", action="store_true", help="say who would take part, and exit")
    return parser


def outcome(
    p50: Samples, p99: Samples, pressure: list[float], missing: dict[str, str], cores: tuple[int, int]
) -> dict[str, Any]:
    """Returns the record."""
    return {
        "one_way_us": {name: {str(n): spread(v) for n, v in by.items()} for name, by in p50.items()},
        "p99_us": {
            name: {str(n): statistics.median(v) for n, v in by.items() if not any(map(math.isnan, v))}
            for name, by in p99.items()
        },
        "targets": targets(medians(p50)),
        "left_out": missing,
        "machine": machine(cores),
        "cpu_pressure": spread(pressure),
    }


def main() -> int:
    args = flags().parse_args()
    try:
        competitors = of_figure_13() if args.figure_13 else chosen(args.only)
        sizes = [int(n) for n in args.sizes.split(",")]
        first, second = (int(core) for core in args.cores.split(","))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missing = {c.name: c.missing() for c in competitors if c.missing()}
    for name, what in missing.items():
        print(f"{name}: left out: needs {what}", file=sys.stderr)
    competitors = [c for c in competitors if c.name not in missing]
    if args.dry_run:
        print(*(c.name for c in competitors), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as place:
        counts = args.count, args.warm_up, args.volume
        course = Course(sizes, (first, second), *counts, Path(place), args.limit_s)
        p50, p99, pressure = take_turns(course, competitors, args.rounds)
    mid = medians(p50)
    settings = {k: v for k, v in vars(args).items() if k not in ("write", "json", "dry_run")}
    results = outcome(p50, p99, pressure, missing, (first, second)) | ({"paper": PAPER} if args.figure_13 else {})
    line = record("pingpong", settings, results, write=args.write)
    if args.write:
        plots(mid, RESULTS)
    if args.json:
        print(line)
        return 0
    print(table(mid, sizes))
    print(json.dumps(json.loads(line)["targets"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
