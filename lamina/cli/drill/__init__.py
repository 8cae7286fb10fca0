"""``lamina-launch drill MODEL``: hit processes of a server while streams are read, and compare each stream with that
of a run in which nobody was hit. Exit status 1 where it was told a wrong thing, too little, or something twice.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.cli.words import counted

if TYPE_CHECKING:
    from .target import Target

# name -> (role, signal, or CUT: it loses a connection to a memory worker)
FAULTS = {
    "kill-compute": ("compute", "SIGKILL"),
    "kill-memory": ("memory", "SIGKILL"),
    "kill-prefill": ("prefill", "SIGKILL"),
    "kill-engine": ("engine", "SIGKILL"),
    "stop": ("", "SIGSTOP"),
    "stop-engine": ("engine", "SIGSTOP"),
    "partition": ("compute", "CUT"),
}
USUAL = [name for name in FAULTS if name != "partition"]  # which needs TCP
FLAGS = ["--memory-workers", "2", "--prefill-workers", "1", "--dtype", "float32", "--deterministic"]
BAD = "wrong", "lost", "twice"
TRIES = 5  # to hit somebody before the last token
WELL_S = 120.0  # behind a hit, for /health to say 200


class Blow(NamedTuple):
    """One hit that came in time, and what the streams were told: how many of each verdict."""

    fault: str
    victim: str
    noticed_s: float | None  # until the log said so
    pause_s: float  # the longest of a stream behind it
    verdicts: Counter[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--faults", default=",".join(USUAL), help="what happens, in turn (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="hits (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="read at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of a completion, at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, victims and moments (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="silence that fails a stream (default: 120)")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, and exit")
    parser.add_argument("--flags", default=" ".join(FLAGS), help="of `lamina-launch serve` (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 1 where a stream was harmed or a process is left. Raises ValueError, OSError."""
    faults = args.faults.split(",")
    for name in faults:
        if name not in FAULTS:
            raise ValueError(f"--faults: there is no {name!r}; there are {', '.join(FAULTS)}")
    for name in ("count", "streams", "tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    flags = shlex.split(args.flags)
    if "partition" in faults and not _has(flags, "--transport", "tcp"):
        raise ValueError("--faults partition cuts a TCP connection: give --flags with --transport tcp")
    if not _has(flags, "--max-recoveries"):
        flags += ["--max-recoveries", "1000000"]
    if args.dry_run:
        print(f"would serve {args.model} with {' '.join(flags)}")
        print(f"would read {counted(args.streams, 'stream')} at a time, and hit {counted(args.count, 'time')}:")
        print(*(f"  {name}: {FAULTS[name][1]}" for name in dict.fromkeys(faults)), sep="\n")
        return 0
    from .target import Target

    target = Target(args.model, flags)
    try:
        blows, calm = _hit(target, args, faults)
    finally:
        left = target.end()
    return _report(args, blows, calm, left)


def _has(flags: Sequence[str], name: str, value: str = "") -> bool:
    """Whether ``name`` is among them, of that value where one is given."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    return any(a == name and value in ("", b) for a, b in zip(words, [*words[1:], ""], strict=True))


def _hit(target: Target, args: argparse.Namespace, faults: Sequence[str]) -> tuple[list[Blow], Counter[str]]:
    """All hits; and how another run without one compares with the first: what is not the same there says nothing."""
    from .streams import bodies_of, has_one_answer, read_all, verdict

    rng = random.Random(args.seed)
    bodies = bodies_of(args.streams, args.tokens, rng)

    def judged(told: Sequence[Any]) -> Counter[str]:
        each = zip(told, wanted, bodies, strict=True)
        return Counter(verdict(found, same, exactly=has_one_answer(body)) for found, same, body in each)

    def read(hit: Any = None, after_s: float = 0.0) -> list[Any]:
        return read_all(target.url, bodies, args.timeout_s, hit, after_s)

    read()  # the first requests of a server are slower
    began = time.perf_counter()
    wanted = read()
    took = time.perf_counter() - began
    calm = judged(read())
    blows: list[Blow] = []
    for number in range(args.count):
        role, how = FAULTS[fault := faults[number % len(faults)]]
        for _ in range(TRIES):
            victim = target.victim(role, rng)
            told = read(lambda: target.strike(victim, how), rng.uniform(0.1, 0.7) * took)  # noqa: B023 - called now
            pauses = [x for one in told if (x := one.pause_behind(target.struck_at)) is not None]
            verdicts = judged(told)
            if pauses or any(verdicts[name] for name in BAD):
                break
        else:
            raise ValueError(f"--tokens {args.tokens}: {TRIES} times all streams had ended before {fault}: give more")
        well = target.is_well(WELL_S)
        blows.append(Blow(fault, victim.name, target.noticed_s(), max(pauses, default=0.0), verdicts))
        if not well:
            break  # the server is gone: what is left would only say so again
    return blows, calm


def _report(args: argparse.Namespace, blows: Sequence[Blow], calm: Counter[str], left: int) -> int:
    rows = {fault: _row([b for b in blows if b.fault == fault]) for fault in dict.fromkeys(b.fault for b in blows)}
    harmed = sum(row[name] for row in rows.values() for name in BAD)
    bad = bool(harmed or left or len(blows) < args.count)
    if args.json:
        found = {"faults": rows, "hits": len(blows), "left": left, "calm": dict(calm), "streams": args.streams}
        print(json.dumps(found))
        return int(bad)
    head = f"{'right':>7} {'wrong':>6} {'lost':>5} {'twice':>6}"
    print(f"{'fault':14} {'hits':>5} {'noticed after':>20} {'pause':>20} {head}")
    for fault, row in rows.items():
        times = (_span(row["noticed_s"]), _span(row["pause_s"]))
        counts = f"{row['right']:7} {row['wrong']:6} {row['lost']:5} {row['twice']:6}"
        print(f"{fault:14} {row['hits']:5} {times[0]:>20} {times[1]:>20} {counts}")
    if other := args.streams - calm["right"]:
        print(f"nobody was hit, and yet {other} of {args.streams} streams were not the same again")
    if len(blows) < args.count:
        print(f"the server did not recover from hit {len(blows)}, of {blows[-1].victim}")
    processes = counted(left, "process", "processes")
    print(f"{counted(len(blows), 'hit')}, {counted(harmed, 'stream')} harmed, {processes} left")
    return int(bad)


def _row(blows: Sequence[Blow]) -> dict[str, Any]:
    verdicts = sum((b.verdicts for b in blows), Counter[str]())
    return {
        "hits": len(blows),
        "noticed_s": [round(b.noticed_s, 3) for b in blows if b.noticed_s is not None],
        "pause_s": [round(b.pause_s, 3) for b in blows],
        **{name: verdicts[name] for name in ("right", *BAD)},
    }


def _span(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} to {max(seconds):.2f} s" if seconds else "-"
