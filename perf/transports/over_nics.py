"""The competitors of pingpong.py where there are RDMA ports and GPUs, and what each lacks here.

"rdma" and "window" go through a port of this host and back, between two processes on its cores, like perftest's
ib_write_lat and ib_write_bw. "gpu" is the paper's figure 13 (arXiv 2405.01814): two GPUs of this host, and a NIC that
carries what goes between them; NCCL may not take another way. HARDWARE-UNVERIFIED.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from common import line_of

from lamina import netstack
from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.contract.cluster_key import KEY
from lamina.netstack.cuda.cuda import DEVICE
from lamina.netstack.doctor import Machine, mellanox
from lamina.netstack.rdma.rdma_ports import NONE, Port, Wanted, ports, why_no_port
from lamina.netstack.schemes import SCHEMES

from .competitors import Competitor, Course, Times, call, lamina, listening_server, needs_program

BY_NIC = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # else GPUs of one host speak over NVLink, PCIe or the host
DOORBELL = {"MLX5_SHUT_UP_BF": "1"}  # libmlx5 rings by 8 bytes, as Lamina's kernels do, and the NIC fetches the request
DIRECT, THROUGH_HOST = {"NCCL_NET_GDR_LEVEL": "SYS"}, {"NCCL_NET_GDR_LEVEL": "LOC"}
ROOT = Path(__file__).parents[2]
WINDOW = 64
LEAST_ITERATIONS = 5  # that perftest takes
ATTEMPTS = 8
START_S = 180.0  # for a server, which may compile its kernels first


class NoClockError(RuntimeError):
    """A program of perftest has measured in units that it does not know."""


def chosen_port() -> tuple[Port, Wanted]:
    """The port that LAMINA_RDMA_DEVICE names, else the first that can be used. Raises ValueError, in one line."""
    there, text = ports(), os.environ.get(RDMA_DEVICE, "")
    if not there:
        raise ValueError(f"an RDMA port: {NONE}")
    if reason := why_no_port(there, text):
        raise ValueError(f"an RDMA port: {reason}")
    wanted = Wanted.parse(text)
    return next(port for port in there if port.fits(wanted)), wanted


def needs_port() -> str:
    try:
        chosen_port()
    except ValueError as error:
        return str(error)
    return ""


def needs_connectx() -> str:
    try:
        port, _ = chosen_port()
    except ValueError as error:
        return str(error)
    return "" if port.device in mellanox(Machine()) else f"a port of a ConnectX, which {port.device} is not"


def needs_transport(scheme: str) -> Callable[[], str]:
    """Empty where this host opens it."""

    def reason() -> str:
        if scheme not in SCHEMES:
            return f"the transport {scheme}, which is not among {', '.join(SCHEMES)}"
        try:
            netstack.open(scheme, key=secrets.token_bytes(32)).close()
        except (ImportError, ValueError) as error:
            return " ".join(str(error).split())
        return ""

    return reason


def needs_gpus(count: int) -> str:
    """Empty where torch can use that many."""
    if not importlib.util.find_spec("torch"):
        return "the Python package torch"
    import torch

    there = torch.cuda.device_count()
    return "" if there >= count else f"{count} NVIDIA GPUs that torch {torch.__version__} can use: {there} here"


def all_of(*needs: Callable[[], str]) -> Callable[[], str]:
    return lambda: "; ".join(filter(None, (need() for need in needs)))


def perftest(
    program: str, way: Callable[[str], float], environment: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Course], Times]:
    """``way``: the microseconds of a message in what the program prints. It measures the rate of its clock first; where
    others keep it from that it prints no numbers, and tries again. ``environment``: of both sides.
    """

    def one(course: Course, nbytes: int) -> tuple[float, float]:
        for _ in range(ATTEMPTS - 1):
            with suppress(NoClockError):
                return once(course, nbytes)
        return once(course, nbytes)

    def once(course: Course, nbytes: int) -> tuple[float, float]:
        port, wanted = chosen_port()
        place = ["-d", port.device, "-i", str(port.number), "-x", str(port.gid_index(wanted))]
        command = [program, *place, "-F", "-s", str(nbytes), "-n", str(max(LEAST_ITERATIONS, course.rounds(nbytes)))]
        on = [["taskset", "-c", str(core)] for core in course.cores]
        with listening_server([*on[1], *command], {**os.environ, **environment}) as number:
            client = [*on[0], *command, "-p", str(number), "127.0.0.1"]
            text = call(client, dict(environment), limit_s=course.limit_s)
        return way(text), late_of(text)

    return lambda course: {nbytes: one(course, nbytes) for nbytes in course.sizes}


def figures_of(text: str) -> list[float]:
    """The row of numbers after perftest's line of titles. Raises RuntimeError where there is none."""
    for title, row in pairwise(text.splitlines()):
        if title.lstrip().startswith("#bytes") and re.fullmatch(r"[\s\d.]+", row):
            return [float(number) for number in row.split()]
        if title.lstrip().startswith("#bytes") and "inf" in row:
            raise NoClockError(f"perftest did not find the rate of its clock: {row}")
    raise RuntimeError(f"perftest printed no figures: {text[-200:]}")


def typical_us(text: str) -> float:
    """Reads ib_write_lat's bytes, iterations, least, most, typical, ...; one way."""
    return figures_of(text)[4]


def late_of(text: str) -> float:
    """The 99th percentile, which ib_write_lat prints alone."""
    row = figures_of(text)
    return row[7] if len(row) > 7 else float("nan")


def average_us(text: str) -> float:
    """Reads ib_write_bw's bytes, iterations, peak and average MB/s (of 2 ** 20 bytes), million messages/s."""
    row = figures_of(text)
    if not row[3]:
        raise NoClockError("perftest did not find the rate of its clock: 0 MB/s")
    return row[0] / (row[3] * 2**20) * 1e6


def lamina_window(transport: str) -> Callable[[Course], Times]:
    """Microseconds of a message in a window."""

    def run(course: Course) -> Times:
        command = [sys.executable, "-m", "lamina.netstack", "bench", "--json", "--transport", transport]
        command += ["--pattern", "stream", "--driver", "native", "--window", str(WINDOW)]
        command += ["--sizes", ",".join(str(n) for n in course.sizes if n * WINDOW <= 1 << 30)]
        command += ["--count", str(course.count), "--volume", str(course.volume)]
        command += ["--cores", "{},{}".format(*course.cores)]
        rows = map(json.loads, call(command, limit_s=course.limit_s).splitlines())
        return {row["size"]: (row["p50_us"] / WINDOW, row["p99_us"] / WINDOW) for row in rows}

    return run


def lamina_gpus(transport: str, driver: str) -> Callable[[Course], Times]:
    """Kernels on GPU 0 and on GPU 1 of this host."""

    def run(course: Course) -> Times:
        with bench_server(transport, gpu=1) as (url, env):
            command = [sys.executable, "-m", "lamina.netstack", "bench", "--device", "cuda", "--json", "--connect", url]
            command += ["--transport", transport, "--sizes", ",".join(map(str, course.sizes))]
            command += ["--count", str(course.count), "--warm-up", str(course.warm_up), "--volume", str(course.volume)]
            rows = map(json.loads, call(command, env | {DEVICE: "0"}).splitlines())
            return {row["size"]: (row["p50_us"] / 2, row["p99_us"] / 2) for row in rows if row["driver"] == driver}

    return run


@contextmanager
def bench_server(transport: str, gpu: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Its URL, and the environment of its client. Raises RuntimeError where it does not start."""
    env = {KEY: secrets.token_hex(32)}
    command = [sys.executable, "-m", "lamina.netstack", "bench", "--transport", transport, "--listen"]
    environment = os.environ | env | {DEVICE: str(gpu)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield line_of(server, START_S).split()[-1], env
    finally:
        server.kill()
        server.wait()


def nccl(environment: dict[str, str]) -> Callable[[Course], Times]:
    """Send and receive of torch's process group, by GPUs' clocks."""

    def run(course: Course) -> Times:
        script = str(Path(__file__).with_name("group_rounds.py"))
        text = call([sys.executable, script, "nccl", str(course.warm_up), *course.runs], environment)
        return {int(n): (float(half), float(late)) for n, half, late in (line.split() for line in text.splitlines())}

    return run


TWO_GPUS = all_of(lambda: needs_gpus(2))
PERFTEST = {name: all_of(needs_program(name), needs_port) for name in ("ib_write_lat", "ib_write_bw")}
VERBS = needs_transport("verbs")
WITHOUT_BLUEFLAME = (
    perftest("ib_write_lat", typical_us, DOORBELL), all_of(needs_program("ib_write_lat"), needs_connectx),
)  # fmt: skip
OVER_NICS = [
    Competitor("lamina verbs put", "rdma", "native", lamina("verbs", "put_lat", "native"), VERBS),
    Competitor("lamina verbs copy", "rdma", "native", lamina("verbs", "rtt", "native"), VERBS),
    Competitor("ib_write_lat", "rdma", "native", perftest("ib_write_lat", typical_us), PERFTEST["ib_write_lat"], False),
    Competitor("ib_write_lat, no BlueFlame", "rdma", "native", *WITHOUT_BLUEFLAME, False),
    Competitor("lamina verbs stream", "window", "native", lamina_window("verbs"), VERBS),
    Competitor("ib_write_bw", "window", "native", perftest("ib_write_bw", average_us), PERFTEST["ib_write_bw"], False),
    Competitor("lamina cuda graph", "gpu", "kernel", lamina_gpus("cuda", "device"), needs_transport("cuda")),
    *(
        Competitor(f"lamina {scheme} {word}", "gpu", "kernel", lamina_gpus(scheme, driver), need)
        for scheme, need in (
            ("mlx5", all_of(lambda: needs_gpus(2), needs_port, needs_transport("mlx5"))),
            ("gin", all_of(lambda: needs_gpus(2), needs_port, needs_transport("gin"))),
        )
        for word, driver in (("graph", "device"), ("one kernel", "kernel"))
    ),
    Competitor("NCCL send/recv", "gpu", "kernel", nccl({}), TWO_GPUS),
    Competitor("NCCL by the NIC", "gpu", "kernel", nccl(BY_NIC | DIRECT), all_of(TWO_GPUS, needs_port)),
    Competitor("NCCL by the NIC and hosts", "gpu", "kernel", nccl(BY_NIC | THROUGH_HOST), all_of(TWO_GPUS, needs_port)),
]
FIGURE_13 = ("lamina mlx5 graph", "lamina mlx5 one kernel", "NCCL by the NIC", "NCCL by the NIC and hosts")
PAPER = {  # its figure 13: a round trip of small messages, in microseconds, and GB/s of large ones, over 400 Gb/s
    "Lamina": {"round_trip_us": 33.0, "gb_s": 45.7},
    "NCCL": {"round_trip_us": 66.6, "gb_s": 35.5},
}


def lacks_for_figure(competitors: Sequence[Competitor]) -> dict[str, str]:
    """Returns the competitors of figure 13 that cannot take part here, and what each needs."""
    return {c.name: c.missing() for c in competitors if c.name in FIGURE_13 and c.missing()}
