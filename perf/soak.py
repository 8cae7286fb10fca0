"""A server under load for minutes or hours, one of its processes killed now and then: does it grow, or grow slow?

Streams of all kinds of a drill are read round after round. Between two rounds, a few times a minute, memory,
descriptors and threads of all processes of the server are read from /proc. Each process's memory is its share of what
is shared (PSS). Slopes are those of straight lines through the samples after the first quarter: they say what an hour
would add. It also prints how many streams failed. The p99 of the time between two events of a stream is that of rounds
without a kill, of the first and the last third. Prints a table and a JSON line; --write appends that to
perf/results/soak.jsonl.

    python perf/soak.py examples/tiny_lm/model --minutes 20 --write
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common import cpu_pressure, parser_of, record

from lamina.tools.drill import FLAGS
from lamina.tools.drill.client_streams import StreamRecord, bodies_of, read_all
from lamina.tools.drill.target import Target

VICTIMS = "compute", "memory", "prefill", "engine"
WELL_S = 120.0
TIMEOUT_S = 120.0


class Sample(NamedTuple):
    """All processes of the server at a moment."""

    at: float
    memory: float  # bytes
    descriptors: float
    threads: float
    processes: float


class SoakRound(NamedTuple):
    """Streams that were read at a time."""

    struck: bool
    told: list[StreamRecord]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-every-s", type=float, default=600.0, help="0 = no worker is killed")
    parser.add_argument("--sample-every-s", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rest-s", type=float, default=0.5, help="between two rounds: the load is not the highest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default=" ".join(FLAGS), help="of `lamina-launch serve`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the server ends, too
    target = Target(args.model, [*shlex.split(args.flags), "--max-recoveries", "1000000"])
    try:
        rounds, samples, kills = soak(target, args)
    finally:
        left = target.stop()
    results = summary(rounds, samples) | {"kills": kills, "left": left, "cpu_pressure": cpu_pressure()}
    for name, value in results.items():
        print(f"{name:28} {value}")
    print(record("soak", vars(args), results, write=args.write))


def soak(target: Target, args: argparse.Namespace) -> tuple[list[SoakRound], list[Sample], int]:
    """Load until the time is over. Raises OSError where the server does not recover."""
    rng, samples = random.Random(args.seed), list[Sample]()
    begun = last = time.monotonic()
    rounds, kills = list[SoakRound](), 0
    while time.monotonic() - begun < 60.0 * args.minutes:
        due = args.kill_every_s and time.monotonic() - last > args.kill_every_s
        hit = None
        if due:
            victim, last, kills = target.victim(VICTIMS[kills % len(VICTIMS)], rng), time.monotonic(), kills + 1

            def hit(victim: Any = victim) -> None:
                target.inject(victim, "SIGKILL")

        told = read_all(target.url, bodies_of(args.streams, args.tokens, rng), TIMEOUT_S, hit, rng.uniform(0.1, 1.0))
        rounds.append(SoakRound(bool(due), told))
        if due and not target.is_healthy(WELL_S):
            raise OSError(f"the server did not recover from kill {kills}")
        time.sleep(args.rest_s)
        if not samples or time.monotonic() - samples[-1].at >= args.sample_every_s:
            samples.append(sample(target.pids()))  # no stream is open: what there is now stays
    return rounds, samples, kills


def sample(pids: list[int]) -> Sample:
    """Samples the processes that are there."""
    memory = descriptors = threads = 0
    for pid in pids:
        with suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            memory += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            threads += len(os.listdir(f"/proc/{pid}/task"))
    return Sample(time.monotonic(), memory, descriptors, threads, len(pids))


def summary(rounds: list[SoakRound], samples: list[Sample]) -> dict[str, Any]:
    """Slopes in units an hour. Samples in which a process was missing, or there was one more, are left out."""
    usual = statistics.mode(s.processes for s in samples)
    steady = [s for s in samples[len(samples) // 4 :] if s.processes == usual]
    hours = [s.at / 3600.0 for s in steady]
    figures: dict[str, Any] = {"samples": len(steady), "rounds": len(rounds)}
    for name in ("memory", "descriptors", "threads"):
        values = [getattr(s, name) for s in steady]
        figures[name] = statistics.median(values)
        figures[f"{name}_per_hour"] = round(statistics.linear_regression(hours, values).slope, 3)
    streams = [told for each in rounds for told in each.told]
    figures["streams"], figures["failed"] = len(streams), sum(bool(told.error) for told in streams)
    calm = [each for each in rounds if not each.struck]
    third = max(1, len(calm) // 3)
    figures["first_p99_s"], figures["last_p99_s"] = p99(calm[:third]), p99(calm[-third:])
    return figures


def p99(rounds: list[SoakRound]) -> float:
    """Returns the p99 of the time between two events of a stream."""
    gaps = [b - a for each in rounds for told in each.told for a, b in zip(told.times, told.times[1:], strict=False)]
    return round(statistics.quantiles(gaps, n=100)[98], 5) if len(gaps) > 1 else 0.0


if __name__ == "__main__":
    main()
