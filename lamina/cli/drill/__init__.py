"""``lamina-launch drill MODEL``: hit processes of a server while streams are read, and compare each stream with that
of a run in which nobody was hit. Exit status 1 where it was told a wrong thing, too little, or something twice. Where
KV is built again a token may be the neighbour of what it was, at an edge: such a stream is counted apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.cli.words import counted

if TYPE_CHECKING:
    from .streams import StreamTold
    from .target import Target, Victim

log = logging.getLogger(__name__)

# name -> (role, signal, or CUT: it loses a connection to a memory worker, or SCALE: it ends as the server gets twice as
# many memory workers, or as many as at first, or FLIP: a bit of its KV changes)
FAULTS = {
    "kill-compute": ("compute", "SIGKILL"),
    "kill-memory": ("memory", "SIGKILL"),
    "kill-prefill": ("prefill", "SIGKILL"),
    "kill-engine": ("engine", "SIGKILL"),
    "stop": ("", "SIGSTOP"),
    "stop-engine": ("engine", "SIGSTOP"),
    "partition": ("compute", "CUT"),
    "kill-spare": ("spare", "SIGKILL"),
    "scale": ("engine", "SCALE"),
    "flip": ("memory", "FLIP"),
}
USUAL = [name for name in FAULTS if name not in ("partition", "kill-spare", "flip")]  # which need flags of their own
FLAGS = ["--memory-workers", "2", "--prefill-workers", "1", "--dtype", "float32", "--deterministic"]
BAD = "wrong", "lost", "twice"
GOOD = "right", "edge"
# Flags without which a drill ends early, or cannot try an edge: that takes a bias for each token of the vocabulary.
LIFTED = {"--max-recoveries": "1000000", "--max-logit-bias": "1000000"}
CHECKED = {"--kv-checks": "1"}
TRIES = 5  # to hit somebody before the last token
WELL_S = 120.0  # behind a hit, for /health to say 200


class Blow(NamedTuple):
    """One hit that came in time, and what the streams were told: how many of each verdict."""

    fault: str
    victim: Victim
    kind: str  # of the message at which it came
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
    for flag, value in (LIFTED | (CHECKED if "flip" in faults else {})).items():
        if not _has(flags, flag):
            flags += [flag, value]
    if _has(flags, "--journal"):
        raise ValueError("--flags: the drill's server has a journal of the drill's own: leave --journal out")
    if args.dry_run:
        print(f"would serve {args.model} with {' '.join(flags)}")
        print(f"would read {counted(args.streams, 'stream')} at a time, and hit {counted(args.count, 'time')}:")
        print(*(f"  {name}: {FAULTS[name][1]}" for name in dict.fromkeys(faults)), sep="\n")
        return 0
    from .target import Target

    target = Target(args.model, flags, journal=True)
    try:
        blows, calm = _hit(target, args, faults)
    finally:
        left = target.end()
    return _report(args, blows, calm, left)


def _has(flags: Sequence[str], name: str, value: str = "") -> bool:
    """Whether ``name`` is among them, of that value where one is given."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    return any(a == name and value in ("", b) for a, b in zip(words, [*words[1:], ""], strict=True))


class _Drill:
    """One server, and the same requests again and again."""

    def __init__(self, target: Target, args: argparse.Namespace) -> None:
        from .moments import Moments
        from .streams import bodies_of

        self._target, self._args = target, args
        self._rng = random.Random(args.seed)
        self._bodies = bodies_of(args.streams, args.tokens, self._rng)
        self._moments = Moments(self._rng, grants=target.has_prefill)
        self._wanted: list[StreamTold] = []
        self._took = 0.0

    def calm(self) -> Counter[str]:
        """Two runs without a hit: how the second compares with the first; what is not the same there says nothing."""
        self._read(self._bodies)  # the first requests of a server are slower
        began = time.perf_counter()
        self._wanted = self._read(self._bodies)
        self._took = time.perf_counter() - began
        return self._judged(self._read(self._bodies), well=True)

    def hit(self, fault: str) -> tuple[Blow, bool]:
        """One hit, and whether the server is well behind it. Raises ValueError."""
        target, rng, (role, how) = self._target, self._rng, FAULTS[fault]
        moment = self._moments.next(role if how == "SIGKILL" else "")
        for _ in range(TRIES):
            victim, kinds = target.victim(role, rng), list[str]()
            after_s = 0.0 if moment.early else rng.uniform(0.1, 0.7) * self._took
            began = time.perf_counter()
            told = self._read(self._bodies, lambda v=victim, k=kinds: k.append(target.strike(v, how, moment)), after_s)
            pauses = [x for one in told if (x := one.pause_behind(target.struck_at)) is not None]
            if pauses or any(one.error for one in told):
                break
            self._took = time.perf_counter() - began  # the machine has become faster
        else:
            tokens = self._args.tokens
            raise ValueError(f"--tokens {tokens}: {TRIES} times all streams had ended before {fault}: give more")
        well = target.is_well(WELL_S)
        noticed, pause = target.noticed_s(), max(pauses, default=0.0)
        return Blow(fault, victim, kinds[0], noticed, pause, self._judged(told, well=well)), well

    def _read(self, bodies: Sequence[dict[str, Any]], hit: Any = None, after_s: float = 0.0) -> list[StreamTold]:
        from .streams import read_all

        return read_all(self._target.url, bodies, self._args.timeout_s, hit, after_s)

    def _read_one(self, body: dict[str, Any]) -> StreamTold:
        return self._read([body])[0]

    def _judged(self, told: Sequence[StreamTold], *, well: bool) -> Counter[str]:
        """Where the server is well, streams without a seed are asked for again, with the seed that they were given."""
        from .streams import has_one_answer, seeds_of
        from .verdicts import error_of, is_at_edge, verdict, words_of

        wanted, bodies = dict(enumerate(self._wanted)), list(self._bodies)
        known = {i for i, b in enumerate(bodies) if has_one_answer(b)}
        if well:
            seeds = seeds_of(self._target.journal)
            again = [i for i, one in enumerate(told) if i not in known and one.id in seeds]
            for i in again:
                bodies[i] = {**bodies[i], "seed": seeds[told[i].id]}
            wanted.update(zip(again, self._read([bodies[i] for i in again]), strict=True))
            known.update(again)
        words = [verdict(one, wanted[i], exactly=i in known) for i, one in enumerate(told)]
        error = max((error_of(one, wanted[i]) for i, one in enumerate(told) if i in known), default=0.0)
        for i in known if well else ():
            if words[i] == "wrong" and is_at_edge(told[i], wanted[i], bodies[i], error, self._read_one):
                words[i] = "edge"
        for i, word in enumerate(words):
            if word in BAD:
                log.warning(
                    "stream %d was %s: %s (error %.1g): %s", i, word, words_of(told[i], wanted[i]), error, bodies[i]
                )
        return Counter(words)


def _hit(target: Target, args: argparse.Namespace, faults: Sequence[str]) -> tuple[list[Blow], Counter[str]]:
    """All hits; and how another run without one compares with the first."""
    drill = _Drill(target, args)
    calm, blows = drill.calm(), list[Blow]()
    for number in range(args.count):
        blow, well = drill.hit(faults[number % len(faults)])
        blows.append(blow)
        if not well:
            break  # the server is gone: what is left would only say so again
    return blows, calm


def _report(args: argparse.Namespace, blows: Sequence[Blow], calm: Counter[str], left: int) -> int:
    rows = {fault: _row([b for b in blows if b.fault == fault]) for fault in dict.fromkeys(b.fault for b in blows)}
    harmed = sum(row[name] for row in rows.values() for name in BAD)
    bad = bool(harmed or left or len(blows) < args.count)
    if args.json:
        kinds = Counter(b.kind for b in blows)
        summary = {
            "kinds": dict(sorted(kinds.items())),
            "faults": rows,
            "hits": len(blows),
            "left": left,
            "calm": dict(calm),
            "streams": args.streams,
        }
        print(json.dumps(summary))
        return int(bad)
    head = f"{'right':>7} {'edge':>5} {'wrong':>6} {'lost':>5} {'twice':>6}"
    print(f"{'fault':14} {'hits':>5} {'noticed after':>20} {'pause':>20} {head}")
    for fault, row in rows.items():
        times = (_span(row["noticed_s"]), _span(row["pause_s"]))
        counts = f"{row['right']:7} {row['edge']:5} {row['wrong']:6} {row['lost']:5} {row['twice']:6}"
        print(f"{fault:14} {row['hits']:5} {times[0]:>20} {times[1]:>20} {counts}")
        print(f"{'':14} of {_counts(row['victims'])}; at {_counts(row['kinds'])}")
        if fault == "flip":
            print(f"{'':14} noticed: {len(row['noticed_s'])} of {row['hits']}")
    if other := args.streams - sum(calm[name] for name in GOOD):
        print(f"nobody was hit, and yet {other} of {args.streams} streams were not the same again")
    if len(blows) < args.count:
        print(f"the server did not recover from hit {len(blows)}, of {blows[-1].victim.name}")
    processes = counted(left, "process", "processes")
    print(f"{counted(len(blows), 'hit')}, {counted(harmed, 'stream')} harmed, {processes} left")
    return int(bad)


def _row(blows: Sequence[Blow]) -> dict[str, Any]:
    verdicts = sum((b.verdicts for b in blows), Counter[str]())
    return {
        "hits": len(blows),
        "noticed_s": [round(b.noticed_s, 3) for b in blows if b.noticed_s is not None],
        "pause_s": [round(b.pause_s, 3) for b in blows],
        "victims": dict(sorted(Counter(b.victim.place for b in blows).items())),
        "kinds": dict(sorted(Counter(b.kind for b in blows).items())),
        **{name: verdicts[name] for name in (*GOOD, *BAD)},
    }


def _span(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} to {max(seconds):.2f} s" if seconds else "-"


def _counts(of: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of.items())
