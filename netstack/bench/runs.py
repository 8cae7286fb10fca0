"""A run: the measurements of a plan, one after the other, and a row for each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from lamina.netstack.contract.channel_terms import Terms
from lamina.netstack.contract.fabric import Channel, ChannelError, Fabric
from lamina.netstack.schemes import open

from .job import FACTS_BYTES, TIMEOUT_S, Job, Measured, Size, receive, send
from .machine_facts import side_of
from .patterns import DRIVERS, PATTERNS, WINDOWED, client_of
from .server import local_servers

ROUNDS_MIN = 20
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
    window: int
    rates: list[float]
    cores: list[int]  # the client's, then the servers'; empty: none is bound
    samples: str  # a file's name; empty: none is written

    def jobs(self) -> Iterator[tuple[Job, float]]:
        """Yield each job with the offered queries a second; 0: each query leaves after the last reply."""
        for pattern in self.patterns:
            window = self.window if pattern in WINDOWED else 1
            for driver in self.drivers:
                for size in self.sizes if pattern in DRIVERS[driver] else []:
                    rounds = max(ROUNDS_MIN, min(self.count, self.volume // size.query // 2) // window)
                    kv = 1 if pattern in WINDOWED else size.kv  # these send none
                    job = Job(pattern, driver, size.query, kv, min(self.warm_up, rounds), rounds, window)
                    yield from ((job, per_s) for per_s in (self.rates if pattern == "rate" else [0.0]))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest sample that ``share`` of all do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def measure(fabric: Fabric, urls: Sequence[str], job: Job, per_s: float) -> tuple[Measured, dict[str, float]]:
    """Run one job against the servers at ``urls``. Returns samples, and figures in microseconds and bytes of payload in
    both directions.
    """
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
    return measured, summary(measured, job, len(channels)) | {"CPU %": 100 * cpu_s / wall_s}


def connect(fabric: Fabric, place: str, job: Job) -> Channel:
    """Connect to a server. ``place``: its URL, and its name after a #."""
    url, _, name = place.partition("#")
    inbox = job.geometry()
    terms = Terms(outbound=inbox, inbound=inbox, name="bench", peer=name, kernels=job.by_kernels)
    return fabric.connect(url, terms)


def summary(measured: Measured, job: Job, peers: int) -> dict[str, float]:
    ordered = sorted(measured.samples)
    rounds_s = len(ordered) / measured.busy_s
    payloads = PATTERNS[job.pattern].payloads(job)
    quantiles = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999, "max_us": 1.0}
    return {name: 1e6 * percentile(ordered, share) for name, share in quantiles.items()} | {
        "msg/s": rounds_s * len(payloads) * peers,
        "GB/s": rounds_s * sum(payloads) * peers / 1e9,
    }


def histogram(samples: Sequence[float]) -> dict[str, int]:
    """Return the number of samples by the least power of two of microseconds that is not below them."""
    bins = Counter(max(0, math.ceil(1e6 * sample) - 1).bit_length() for sample in samples)
    return {str(1 << number): bins[number] for number in sorted(bins)}


@contextlib.contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """Bind this thread to ``cores`` for the block; without cores it stays on all of its own."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(plan: BenchPlan, key: bytes, connect: Sequence[str], *, as_json: bool) -> None:
    for scheme in plan.transports:
        run_one(plan, scheme, key, connect, as_json=as_json)


def run_one(plan: BenchPlan, scheme: str, key: bytes, connect: Sequence[str], *, as_json: bool) -> None:
    fabric = open(scheme, key=key)
    try:
        if fabric.in_process:
            raise ValueError(f"--transport {scheme}: both ends live in one process; nothing crosses to another")
        with servers_of(plan, scheme, key, connect) as urls:
            facts = {"client": side_of(fabric, plan.cores), "server": [ask_facts(fabric, url) for url in urls]}
            for job, per_s in plan.jobs():
                pattern = PATTERNS[job.pattern]
                chosen = urls if pattern.fans else urls[:1]
                with bound([] if pattern.threads else plan.cores[:1]):
                    measured, figures = measure(fabric, chosen, job, per_s)
                row = row_of(scheme, job, per_s, len(chosen), plan) | figures
                sys.stdout.write((json_line(row, measured, facts) if as_json else table_line(row)) + "\n")
                sys.stdout.flush()
                if plan.samples:
                    write_samples(plan.samples, row, measured)
            end(fabric, urls)
        if reason := getattr(fabric, "reason", ""):
            sys.stderr.write(f"{reason}\n")
    finally:
        fabric.close()


def servers_of(
    plan: BenchPlan, scheme: str, key: bytes, connect: Sequence[str]
) -> contextlib.AbstractContextManager[list[str]]:
    """Return the addresses of the given servers, or of new local processes."""
    if connect:
        return contextlib.nullcontext([*connect])
    peers = plan.peers if any(PATTERNS[pattern].fans for pattern in plan.patterns) else 1
    others: list[int | None] = [*plan.cores[1:]] or [None]
    return local_servers(scheme, key, [others[i % len(others)] for i in range(peers)])


def ask_facts(fabric: Fabric, url: str) -> dict[str, Any]:
    """Return the result of ``side_of`` on a server's host."""
    job = Job("facts", query=FACTS_BYTES)
    channel = connect(fabric, url, job)
    try:
        send(channel, job.pack(), TIMEOUT_S)
        facts: dict[str, Any] = json.loads(receive(channel, TIMEOUT_S))
        return facts
    finally:
        channel.close()


def end(fabric: Fabric, urls: Sequence[str]) -> None:
    """Notify the servers that no job follows."""
    job = Job("end")
    for url in urls:
        channel = connect(fabric, url, job)
        send(channel, job.pack(), TIMEOUT_S)
        with contextlib.suppress(ChannelError):  # it may be gone before its reply is read
            receive(channel, TIMEOUT_S)
        channel.close()


def row_of(scheme: str, job: Job, per_s: float, peers: int, plan: BenchPlan) -> dict[str, Any]:
    """Return the facts of a measurement, by the names of a JSON line."""
    row: dict[str, Any] = {"transport": scheme, "driver": job.driver, "pattern": job.pattern, "size": job.query}
    if job.pattern == "pair":
        row["kv"] = job.kv
    if job.pattern in WINDOWED:
        row["window"] = job.window
    if per_s:
        row["offered/s"] = per_s
    return row | {"peers": peers, "rounds": job.rounds, "warm_up": job.warm_up, "cores": plan.cores, "verified": True}


def table_line(row: dict[str, Any]) -> str:
    pattern = f"{row['pattern']}@{row['offered/s']:g}" if "offered/s" in row else row["pattern"]
    head = f"{row['transport']:>8}  {row['driver']:>8}  {pattern:>12}  {row['size']:>8}"
    return "  ".join([head, *(f"{row[column]:>10.4g}" for column in COLUMNS)])


def json_line(row: dict[str, Any], measured: Measured, facts: dict[str, Any]) -> str:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    return json.dumps(rounded | {"histogram_us": histogram(measured.samples)} | facts)


def write_samples(path: str, row: dict[str, Any], measured: Measured) -> None:
    """Append every sample, in the order in which they were taken, in microseconds."""
    which = {
        name: row[name] for name in ("transport", "driver", "pattern", "size", "window", "offered/s") if name in row
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(which | {"samples_us": [round(1e6 * sample, 3) for sample in measured.samples]}) + "\n")
