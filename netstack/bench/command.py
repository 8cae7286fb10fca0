"""``python -m lamina.netstack bench``: what a message costs between two processes, on one host or on two.

On one host the servers are processes of this command's own. On two, start a server with --listen on one and name its
address with --connect on the other; both need the same key in LAMINA_CLUSTER_KEY or LAMINA_CLUSTER_KEY_FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter, process_time

from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric
from lamina.netstack.contract.key import KEY, KEY_FILE, cluster_key
from lamina.netstack.contract.terms import Reception, Terms
from lamina.netstack.schemes import RENAMED, SCHEMES, WRAPPERS, check_scheme, open

from .job import TIMEOUT_S, Job, Measured, Size, parse_size, receive, send
from .patterns import DRIVERS, PATTERNS, client_of
from .server import local_servers, serve, watch_life_line

SIZES = "8,64,256,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB"
ROUNDS_MIN = 20
DEVICES = {"cpu": (), "cuda": ("cuda", "mlx5")}  # what makes the calls -> the transports of its kernels; none: any
COLUMNS = ("p50_us", "p99_us", "p999_us", "max_us", "msg/s", "GB/s", "CPU %")


@dataclass(frozen=True)
class BenchPlan:
    """The measurements of a run: every combination of the lists."""

    transports: list[str]
    patterns: list[str]
    drivers: list[str]
    sizes: list[Size]
    count: int
    warm_up: int
    volume: int
    peers: int
    per_s: float
    cores: list[int]  # the client's, then the servers'; empty: none is bound

    def jobs(self) -> Iterator[Job]:
        for pattern in self.patterns:
            for driver in self.drivers:
                for size in self.sizes if pattern in DRIVERS[driver] else []:
                    rounds = max(ROUNDS_MIN, min(self.count, self.volume // (2 * size.query)))
                    warm_up = min(self.warm_up, rounds)
                    yield Job(pattern, driver, size.query, size.kv, warm_up, rounds)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest sample that ``share`` of all do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def measure(fabric: Fabric, urls: Sequence[str], job: Job, per_s: float) -> dict[str, float]:
    """Run one job against the servers at ``urls``; times in microseconds, bytes of payload in both directions."""
    channels: list[Channel] = []
    try:
        for url in urls:
            channels.append(connect(fabric, url, job))
            send(channels[-1], job.pack(), TIMEOUT_S)
        for channel in channels:
            receive(channel, TIMEOUT_S)  # it is ready
        cpu_s, start = process_time(), perf_counter()
        measured = client_of(job)(fabric, channels, job, per_s)
        cpu_s, wall_s = process_time() - cpu_s, perf_counter() - start
        for channel in channels:
            cpu_s += float(json.loads(receive(channel, TIMEOUT_S))["cpu_s"])
    finally:
        for channel in channels:
            channel.close()
    return summary(measured, job, len(channels)) | {"CPU %": 100 * cpu_s / wall_s}


def connect(fabric: Fabric, place: str, job: Job) -> Channel:
    """``place``: the URL of a server, and its name behind a #."""
    url, _, name = place.partition("#")
    return fabric.connect(url, Terms(outbound=job.geometry(), inbound=job.geometry(), name="bench", peer=name))


def summary(measured: Measured, job: Job, peers: int) -> dict[str, float]:
    ordered = sorted(measured.samples)
    rounds_s = len(ordered) / measured.busy_s
    nbytes = 2 * job.query + (job.kv if job.pattern == "pair" else 0)
    quantiles = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999, "max_us": 1.0}
    return {name: 1e6 * percentile(ordered, share) for name, share in quantiles.items()} | {
        "msg/s": rounds_s * PATTERNS[job.pattern][2] * peers,
        "GB/s": rounds_s * nbytes * peers / 1e9,
    }


@contextlib.contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """This thread on ``cores`` alone, for the block; on all of its own where none is named."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(plan: BenchPlan, key: bytes, connect: Sequence[str], *, as_json: bool) -> None:
    for scheme in plan.transports:
        fabric = open(scheme, key=key)
        try:
            if fabric.in_process:
                raise ValueError(f"--transport {scheme}: both ends live in one process; nothing crosses to another")
            peers = plan.peers if "fan" in plan.patterns else 1
            others: list[int | None] = [*plan.cores[1:]] or [None]
            cores = [others[i % len(others)] for i in range(peers)]
            servers = contextlib.nullcontext([*connect]) if connect else local_servers(scheme, key, cores)
            with servers as urls, bound(plan.cores[:1]):
                for job in plan.jobs():
                    chosen = urls if job.pattern == "fan" else urls[:1]
                    report(scheme, job, len(chosen), plan, measure(fabric, chosen, job, plan.per_s), as_json)
                end(fabric, urls)
            if reason := getattr(fabric, "reason", ""):
                sys.stderr.write(f"{reason}\n")
        finally:
            fabric.close()


def end(fabric: Fabric, urls: Sequence[str]) -> None:
    """Tell the servers that no job follows."""
    job = Job("end")
    for url in urls:
        channel = connect(fabric, url, job)
        send(channel, job.pack(), TIMEOUT_S)
        with contextlib.suppress(ChannelError):  # it may be gone before its answer is read
            receive(channel, TIMEOUT_S)
        channel.close()


def report(scheme: str, job: Job, peers: int, plan: BenchPlan, result: dict[str, float], as_json: bool) -> None:
    facts: dict[str, object] = {"transport": scheme, "driver": job.driver, "pattern": job.pattern, "size": job.query}
    if as_json:
        if job.pattern == "pair":
            facts["kv"] = job.kv
        facts |= {"peers": peers, "rounds": job.rounds, "warm_up": job.warm_up, "cores": plan.cores, "verified": True}
        line = json.dumps(facts | {name: round(value, 3) for name, value in result.items()})
    else:
        line = "  ".join([*(f"{v!s:>8}" for v in facts.values()), *(f"{result[c]:>10.4g}" for c in COLUMNS)])
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def listen(scheme: str, address: str, key: bytes, cores: Sequence[int], idle_s: float) -> None:
    watch_life_line()
    fabric = open(scheme, key=key)
    try:
        with bound(cores[:1]):
            place, mark, name = address.partition("#")
            listener = fabric.listen(place, Reception(name=name))
            sys.stdout.write(f"listening at {listener.url}{mark}{name}\n")
            sys.stdout.flush()
            serve(fabric, listener, idle_s)
    finally:
        fabric.close()


def usable_transports(key: bytes) -> list[str]:
    """The transports between processes that open on this host; stderr tells why the others do not."""
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


def parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").split(": ", 1)[1]
    result = argparse.ArgumentParser(prog="python -m lamina.netstack bench", description=text, allow_abbrev=False)
    add = result.add_argument
    add("--transport", metavar="NAME[,NAME...]", help=f"of {', '.join(SCHEMES)} (default: all that work here)")
    add("--pattern", default="rtt", metavar="NAME[,NAME...]", help=f"of {', '.join(PATTERNS)} (default: %(default)s)")
    add("--sizes", default=SIZES, metavar="SIZE[,SIZE...]", help=f"{parse_size.__doc__.split('.')[0]}"
        if parse_size.__doc__ else None)  # fmt: skip
    add("--driver", metavar="NAME[,NAME...]", help="who calls: python (default), or native (no Python in between; "
        f"{', '.join(DRIVERS['native'])} only)")  # fmt: skip
    add("--device", default="cpu", metavar="NAME", help="cpu, or cuda: kernels call, and the GPU's clock runs from the "
        "end of the one before the send to the start of the one behind the receive")  # fmt: skip
    add("--count", type=int, default=10_000, help="rounds of a measurement (default: %(default)s)")
    add("--warm-up", type=int, default=1000, help="rounds before them (default: %(default)s)")
    add("--volume", default="512MiB", help="payload bytes of a measurement; fewer rounds of large messages then "
        "(default: %(default)s)")  # fmt: skip
    add("--peers", type=int, default=2, help="servers of the pattern fan (default: %(default)s)")
    add("--rate", type=float, default=10_000.0, metavar="PER_S", help="queries/s of the pattern rate (default: 10000)")
    add("--cores", default="auto", help="the client's core, then the servers': 0,1; auto: the first of this process; "
        "none: not bound (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="a JSON line for each measurement")
    add("--listen", nargs="?", const="", metavar="ADDRESS[#NAME]", help="serve another host (or process) at this "
        "address; NAME: which clients must want")  # fmt: skip
    add("--connect", metavar="ADDRESS[#NAME][,...]", help="measure against the servers of these names there")
    add("--idle", type=float, default=600.0, metavar="S", help="--listen gives up after so long without a client")
    add("--dry-run", action="store_true", help="check everything, say what would be measured, and exit")
    return result


def names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Raises ValueError for one that is not known."""
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ValueError(f"unknown {flag} {name!r}; choose of {', '.join(known)}")
    return chosen


def cores_of(text: str) -> list[int]:
    """Raises ValueError for a core that this process may not use."""
    own = sorted(os.sched_getaffinity(0))
    if text in ("auto", "none"):
        return own if text == "auto" and len(own) > 1 else []
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ValueError(f"--cores must be auto, none or numbers by comma, not {text!r}")
    cores = [int(part) for part in text.split(",")]
    if strange := set(cores) - set(own):
        raise ValueError(f"--cores: {min(strange)} is not among this process's cores {own}")
    return cores


def drivers_of(args: argparse.Namespace) -> list[str]:
    """Raises ValueError where --device leaves no choice of driver or transport."""
    named, those = names("--driver", args.driver or "python", ("python", "native")), DEVICES[args.device]
    if not those:
        return named
    if args.driver:
        raise ValueError(f"--driver {args.driver} is of --device cpu: leave it out")
    if args.transport not in (None, *those):
        raise ValueError(f"--device {args.device} has kernels for --transport {', '.join(those)}, not {args.transport}")
    return ["device"]


def plan_of(args: argparse.Namespace, transports: list[str]) -> BenchPlan:
    """Raises ValueError that names the flag."""
    for name in ("count", "peers", "rate", "idle"):
        if not 0 < getattr(args, name) < 1 << 32:
            raise ValueError(f"--{name} must be above 0, not {getattr(args, name)}")
    if not 0 <= args.warm_up < 1 << 32:
        raise ValueError(f"--warm-up must be 0 or more, not {args.warm_up}")
    drivers = drivers_of(args)
    patterns = names("--pattern", args.pattern, list(PATTERNS))
    known = DRIVERS[drivers[0]] if len(drivers) == 1 else tuple(PATTERNS)
    if strange := set(patterns) - set(known):
        flag = f"--driver {drivers[0]}" if not DEVICES[args.device] else f"--device {args.device}"
        raise ValueError(f"{flag} has no pattern {min(strange)}; choose of {', '.join(known)}")
    return BenchPlan(
        transports=transports,
        patterns=patterns,
        drivers=drivers,
        sizes=[parse_size(text) for text in args.sizes.split(",")],
        count=args.count,
        warm_up=args.warm_up,
        volume=parse_size(args.volume).query,
        peers=args.peers,
        per_s=args.rate,
        cores=cores_of(args.cores),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 = done, 1 = a peer was lost, 2 = bad input (one line on stderr), 130 = interrupted."""
    args = parser().parse_args(argv)
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
        raise ValueError(f"unknown --device {args.device!r}; choose of {', '.join(DEVICES)}")
    remote = args.listen is not None or args.connect is not None
    if remote and args.listen is not None and args.connect is not None:
        raise ValueError("--listen and --connect exclude each other: one on each host")
    if remote and key is None:
        raise ValueError(f"--listen and --connect need the key of both sides in {KEY} or {KEY_FILE}")
    own = key or secrets.token_bytes(32)
    given = args.transport or next(iter(DEVICES[args.device]), "")
    for scheme in given.split(","):
        if scheme.strip() in RENAMED:
            check_scheme(scheme.strip())
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
        head = ("transport", "driver", "pattern", "size")
        sys.stdout.write("  ".join([*(f"{h:>8}" for h in head), *(f"{c:>10}" for c in COLUMNS)]) + "\n")
    addresses = [a if "://" in a else f"{named[0]}://{a}" for a in (args.connect or "").split(",") if a]
    run(plan, own, addresses, as_json=args.json)
    return 0
