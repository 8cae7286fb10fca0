"""``lamina-launch drill MODEL``: injects faults into processes of a server while streams are read, and compares each
stream with that of an undisturbed run. Exit status 1 if a stream was wrong, too short, or had something twice. Rebuilt
KV may change a token to a neighbour at an edge: such a stream is counted apart.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from math import inf

from lamina.cli.common.flags import check_at_least
from lamina.config.conflicts import CONFLICTS, DRILL, conflict_text, need_text
from lamina.facts.report import count_text

# name -> (role, signal or action). CUT: it loses a connection to a memory worker. SCALE: it ends as the server gets
# twice as many memory workers, or as many as at first. FLIP: a bit of its KV changes.
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
USUAL = [name for name in FAULTS if name not in ("partition", "kill-spare", "flip")]  # the rest needs flags of its own
FLAGS = ["--memory-workers", "2", "--prefill-workers", "1", "--dtype", "float32", "--deterministic"]
# Flags without which a drill ends early, or cannot test an edge: that needs a bias for each token of the vocabulary.
REMOVED_LIMITS = {"--max-recoveries": "1000000", "--limits": "logit-bias=1000000"}
CHECKED = {"--kv-checks": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("model", help="a directory, a GGUF file or a hub id")
    parser.add_argument("--faults", default=",".join(USUAL), help="faults, caused in turn (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="number of faults (default: %(default)s)")
    parser.add_argument(
        "--streams", type=int, default=32, help="streams that are read at a time (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="the most tokens of a completion (default: %(default)s)")
    parser.add_argument("--per-reading", type=int, default=1, help="faults during the same streams (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of prompts, victims and times of faults (default: %(default)s)"
    )
    for name, most, what in (("noticed", 2.5, "until a fault is detected"), ("pause", 10.0, "of a stream's pause")):
        text = f"the most seconds {what} (more: exit status 1); 0 = no limit (default: %(default)s)"
        parser.add_argument(f"--{name}-s", type=float, default=most, help=text)
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        help="seconds of silence after which a stream counts as failed (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--dry-run", action="store_true", help="print what would happen, and exit")
    parser.add_argument(
        "--flags", default=" ".join(FLAGS), help="flags of `lamina-launch serve` (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the drill. Returns exit status 0, or 1 if a stream was harmed, a fault took too long or a process is left.
    Raises ValueError, OSError.
    """
    faults, flags = parse_arguments(args)
    if args.dry_run:
        print(f"would serve {args.model} with {' '.join(flags)}")
        print(f"would read {count_text(args.streams, 'stream')} at a time, and hit {count_text(args.count, 'time')}:")
        print(*(f"  {name}: {FAULTS[name][1]}" for name in dict.fromkeys(faults)), sep="\n")
        return 0
    from .drill_report import report
    from .injections import Drill
    from .target import Target

    target = Target(args.model, flags, journal=True)
    try:
        drill = Drill(target, args, FAULTS)
        calm = drill.run_undisturbed()
        blows = drill.inject_all(faults, args.count)
    finally:
        left = target.stop()
    return report(args, blows, calm, left)


def parse_arguments(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the faults, and the flags of the server. Raises ValueError."""
    faults = args.faults.split(",")
    for name in faults:
        if name not in FAULTS:
            raise ValueError(f"--faults: there is no {name!r}; there are {', '.join(FAULTS)}")
    check_at_least(args, 1, "count", "streams", "tokens", "per_reading")
    for name, least in (("noticed_s", "at least 0"), ("pause_s", "at least 0"), ("timeout_s", "more than 0")):
        if not 0.0 <= (value := getattr(args, name)) < inf or (name == "timeout_s" and not value):
            raise ValueError(f"--{name.replace('_', '-')} must be a number of seconds, {least}, not {value:g}")
    try:
        flags = shlex.split(args.flags)
    except ValueError as error:
        raise ValueError(f"--flags {args.flags}: {error}") from None
    if "partition" in faults and not _has(flags, "--transport", "tcp"):
        raise ValueError(need_text("drill --faults partition", ["drill --flags '--transport tcp'"]))
    for setting in (other for one, other in CONFLICTS if one == DRILL):
        flag, _, value = setting.partition(" ")
        if _has(flags, flag, value):
            raise ValueError(conflict_text(DRILL, setting))
    for flag, value in (REMOVED_LIMITS | (CHECKED if "flip" in faults else {})).items():
        if not _has(flags, flag):
            flags += [flag, value]
    return faults, flags


def _has(flags: Sequence[str], name: str, value: str = "") -> bool:
    """Return True if ``name`` is among the flags, with ``value`` if one is given."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    return any(a == name and value in ("", b) for a, b in zip(words, [*words[1:], ""], strict=True))
