"""``python -m lamina.netstack bench``: what a message costs between two processes, on one host or on two.

On one host the servers are processes of this command's own. On two, start a server with --listen on one and name its
address with --connect on the other; both need the same key in LAMINA_CLUSTER_KEY or LAMINA_CLUSTER_KEY_FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lamina.netstack.contract.channel_terms import ListenTerms
from lamina.netstack.contract.cluster_key import KEY, KEY_FILE, cluster_key
from lamina.netstack.contract.fabric import ChannelError
from lamina.netstack.schemes import SCHEMES, WRAPPERS, open

from .job import BYTES_MAX, WINDOW_MAX, parse_size
from .patterns import DRIVERS, PATTERNS, WINDOWED
from .runs import COLUMNS, BenchPlan, bound, run
from .server import serve, watch_life_line

SIZES = "8,64,256,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB"
DEVICES = {"cpu": (), "cuda": ("cuda", "mlx5", "gin")}  # the caller -> transports with kernels for it; none: any
FANS = [name for name, pattern in PATTERNS.items() if pattern.fans]


def listen(scheme: str, address: str, key: bytes, cores: Sequence[int], idle_s: float) -> None:
    watch_life_line()
    fabric = open(scheme, key=key)
    try:
        with bound(cores[:1]):
            place, mark, name = address.partition("#")
            listener = fabric.listen(place, ListenTerms(name=name))
            sys.stdout.write(f"listening at {listener.url}{mark}{name}\n")
            sys.stdout.flush()
            serve(fabric, listener, idle_s, cores)
    finally:
        fabric.close()


def usable_transports(key: bytes) -> list[str]:
    """Return the transports between processes that open on this host; stderr names the reason for each of the rest."""
    schemes = []
    for scheme in (s for s in SCHEMES if s not in WRAPPERS):
        try:
            fabric = open(scheme, key=key)
        except ImportError as error:
            sys.stderr.write(f"{scheme}: left out: {' '.join(str(error).split())}\n")
            continue
        fabric.close()
        if not fabric.in_process:
            schemes.append(scheme)
    return schemes


def parser(program: str) -> argparse.ArgumentParser:
    text = (__doc__ or "").split(": ", 1)[1]
    result = argparse.ArgumentParser(prog=program, description=text, allow_abbrev=False)
    add = result.add_argument
    add("--transport", metavar="NAME[,NAME...]", help=f"of {', '.join(SCHEMES)} (default: all that work here)")
    add("--pattern", default="rtt", metavar="NAME[,NAME...]", help=f"of {', '.join(PATTERNS)} (default: %(default)s)")
    add("--sizes", default=SIZES, metavar="SIZE[,SIZE...]", help=f"{parse_size.__doc__.split('.')[0]}"
        if parse_size.__doc__ else None)  # fmt: skip
    add("--driver", metavar="NAME[,NAME...]", help="the caller: python (default), or native (no Python in between; "
        f"{', '.join(DRIVERS['native'])} only)")  # fmt: skip
    add("--device", default="cpu", metavar="NAME", help="cpu, or cuda: kernels call, by the GPU's clock, in a graph "
        "for each round (device) and in one kernel for all (kernel)")  # fmt: skip
    add("--count", type=int, default=10_000, help="rounds of a measurement, or messages of windows "
        "(default: %(default)s)")  # fmt: skip
    add("--warm-up", type=int, default=1000, help="rounds before them (default: %(default)s)")
    add("--volume", default="512MiB", help="payload bytes of a measurement; fewer rounds of large messages then "
        "(default: %(default)s)")  # fmt: skip
    add("--peers", type=int, default=2, help=f"servers of the patterns {', '.join(FANS)} (default: %(default)s)")
    add("--window", type=int, default=64, help=f"messages that leave before a side waits, of the patterns "
        f"{', '.join(WINDOWED)} (default: %(default)s)")  # fmt: skip
    add("--rate", default="10000", metavar="PER_S[,PER_S...]", help="queries/s that the pattern rate offers; each is a "
        "measurement (default: %(default)s)")  # fmt: skip
    add("--samples", default="", metavar="FILE", help="append every sample, in microseconds, as JSON lines")
    add("--cores", default="auto", help="the client's core, then the servers': 0,1 (auto: the first of this process, "
        "none: not bound; default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="a JSON line for each measurement")
    add("--listen", nargs="?", const="", metavar="ADDRESS[#NAME]", help="serve another host (or process) at this "
        "address; NAME: which clients must want")  # fmt: skip
    add("--connect", metavar="ADDRESS[#NAME][,...]", help="measure against the servers of these names there")
    add("--idle", type=float, default=600.0, metavar="S", help="--listen ends after so long without a client")
    add("--dry-run", action="store_true", help="check everything, print what would be measured, and exit")
    return result


def names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a list separated by commas. Raises ValueError for an unknown one."""
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown {flag} {name!r}; choose from {', '.join(known)}")
    return chosen


def cores_of(text: str) -> list[int]:
    """Return the cores that --cores names. Raises ValueError for a core that this process may not use."""
    own = sorted(os.sched_getaffinity(0))
    if text in ("auto", "none"):
        return own if text == "auto" and len(own) > 1 else []
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ValueError(f"--cores must be auto, none, or numbers separated by commas, not {text!r}")
    cores = [int(part) for part in text.split(",")]
    if strange := set(cores) - set(own):
        raise ValueError(f"--cores: {min(strange)} is not among this process's cores {own}")
    return cores


def drivers_of(args: argparse.Namespace) -> list[str]:
    """Return the drivers. Raises ValueError if --device leaves no choice of driver or transport."""
    named, those = names("--driver", args.driver or "python", ("python", "native")), DEVICES[args.device]
    if not those:
        return named
    if args.driver:
        raise ValueError(f"--driver {args.driver} is of --device cpu: leave it out")
    if args.transport not in (None, *those):
        raise ValueError(f"--device {args.device} has kernels for --transport {', '.join(those)}, not {args.transport}")
    return ["device", "kernel"]


def plan_of(args: argparse.Namespace, transports: list[str]) -> BenchPlan:
    """Return the plan of the flags. Raises ValueError that names the flag."""
    for name in ("count", "peers", "idle"):
        if not 0 < getattr(args, name) < 1 << 32:
            raise ValueError(f"--{name} must be above 0, not {getattr(args, name)}")
    if not 0 <= args.warm_up < 1 << 32:
        raise ValueError(f"--warm-up must be 0 or more, not {args.warm_up}")
    drivers = drivers_of(args)
    patterns = names("--pattern", args.pattern, list(PATTERNS))
    known = [pattern for pattern in PATTERNS if any(pattern in DRIVERS[driver] for driver in drivers)]
    if strange := set(patterns) - set(known):
        flag = f"--driver {drivers[0]}" if not DEVICES[args.device] else f"--device {args.device}"
        raise ValueError(f"{flag} has no pattern {min(strange)}; choose from {', '.join(known)}")
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    most = max(size.query for size in sizes)
    if not 1 <= args.window <= WINDOW_MAX:
        raise ValueError(f"--window must be 1 to {WINDOW_MAX}, not {args.window}")
    if set(patterns) & set(WINDOWED) and args.window * most > BYTES_MAX:
        raise ValueError(f"--window {args.window}: messages of {most} B are more than 1 GiB together; name fewer")
    if args.samples:
        try:
            Path(args.samples).open("a").close()
        except OSError as error:
            raise ValueError(f"--samples {args.samples}: {error.strerror}; name a file that can be written") from error
    return BenchPlan(
        transports=transports,
        patterns=patterns,
        drivers=drivers,
        sizes=sizes,
        count=args.count,
        warm_up=args.warm_up,
        volume=parse_size(args.volume).query,
        peers=args.peers,
        window=args.window,
        rates=rates_of(args.rate),
        cores=cores_of(args.cores),
        samples=args.samples,
    )


def rates_of(text: str) -> list[float]:
    """Return the rates that --rate names. Raises ValueError for anything but numbers above 0."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1 << 32 for rate in rates):
        raise ValueError(f"--rate must be numbers above 0, separated by commas, not {text!r}")
    return rates


def main(argv: Sequence[str] | None = None, program: str = "python -m lamina.netstack bench") -> int:
    """Return the exit status: 0 = done, 1 = a peer was lost, 2 = bad input (one line on stderr), 130 = interrupted.
    ``program``: the command in the usage line.
    """
    args = parser(program).parse_args(argv)
    try:
        return _main(args)
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except ChannelError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _main(args: argparse.Namespace) -> int:
    key = cluster_key()
    if args.device not in DEVICES:
        raise ValueError(f"unknown --device {args.device!r}; choose from {', '.join(DEVICES)}")
    remote = args.listen is not None or args.connect is not None
    if remote and args.listen is not None and args.connect is not None:
        raise ValueError("--listen and --connect exclude each other: one on each host")
    if remote and key is None:
        raise ValueError(f"--listen and --connect need the key of both sides in {KEY} or {KEY_FILE}")
    own = key or secrets.token_bytes(32)
    given = args.transport or next(iter(DEVICES[args.device]), "")
    named = names("--transport", given or "tcp", list(SCHEMES))
    if remote and len(named) != 1:
        raise ValueError("--listen and --connect measure one --transport")
    plan = plan_of(args, named)
    if not (remote or given):
        plan = replace(plan, transports=usable_transports(own))
    if args.dry_run:
        sys.stdout.write(json.dumps(asdict(plan) | {"listen": args.listen, "connect": args.connect}) + "\n")
        return 0
    if args.listen is not None:
        listen(named[0], args.listen, own, plan.cores, args.idle)
        return 0
    if not args.json and plan.transports:
        head = f"{'transport':>8}  {'driver':>8}  {'pattern':>12}  {'size':>8}"
        sys.stdout.write("  ".join([head, *(f"{c:>10}" for c in COLUMNS)]) + "\n")
    addresses = [a if "://" in a else f"{named[0]}://{a}" for a in (args.connect or "").split(",") if a]
    run(plan, own, addresses, as_json=args.json)
    return 0
