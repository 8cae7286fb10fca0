"""The competitors of pingpong.py, and how each is started: every competitor is two processes on the same two cores."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 45
LISTEN_S = 10.0  # for a server to listen
PORTS = 5  # that are tried for one server
Times = dict[int, tuple[float, float]]  # bytes -> (p50, p99) of one way, in microseconds


KINDS = {  # what carries the bytes -> the words of its plots
    "memory": "Ping-pong within one host over shared memory",
    "tcp": "Ping-pong within one host over TCP",
    "rdma": "Ping-pong through an RDMA port",
    "window": "Windows of messages through an RDMA port",
    "gpu": "Ping-pong between two GPUs",
}


@dataclass(frozen=True)
class Course:
    """The settings that every competitor runs in a round."""

    sizes: Sequence[int]
    cores: tuple[int, int]
    count: int
    warm_up: int
    volume: int
    build: Path  # a folder for what has to be compiled
    limit_s: float = LIMIT_S  # of each of Lamina's and perftest's commands

    def rounds(self, nbytes: int) -> int:
        return max(20, min(self.count, self.volume // (2 * nbytes)))

    @property
    def runs(self) -> list[str]:
        return [f"{n}:{self.rounds(n)}" for n in self.sizes]


@dataclass(frozen=True)
class Competitor:
    name: str
    kind: str  # of KINDS
    caller: str  # native, python, or a kernel of a GPU
    run: Callable[[Course], Times]
    missing: Callable[[], str] = lambda: ""  # what it needs and does not find here
    compares: bool = True  # every payload, with what was sent; and payloads differ


def call(command: Sequence[str], env: dict[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    """Returns what a command printed. It and its children are ended after ``limit_s``; then that is what was printed by
    then.

    Raises RuntimeError when it fails.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE.parents[1],
        env=os.environ | (env or {}),
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {err.strip() or out.strip()}")
    return out


def _table(text: str) -> Times:
    rows = [line.split() for line in text.splitlines()]
    return {int(row[0]): (float(row[1]), float(row[2])) for row in rows if len(row) == 3}


def lamina(transport: str, pattern: str, driver: str) -> Callable[[Course], Times]:
    def run(course: Course) -> Times:
        command = [sys.executable, "-m", "lamina.netstack", "bench", "--json", "--transport", transport]
        command += ["--pattern", pattern, "--driver", driver, "--sizes", ",".join(map(str, course.sizes))]
        command += ["--count", str(course.count), "--warm-up", str(course.warm_up), "--volume", str(course.volume)]
        command += ["--cores", "{},{}".format(*course.cores)]
        rows = map(json.loads, call(command, limit_s=course.limit_s).splitlines())
        ways = 2 if pattern == "rtt" else 1
        return {row["size"]: (row["p50_us"] / ways, row["p99_us"] / ways) for row in rows}

    return run


def program(course: Course, name: str, *compile: str) -> str:
    """baselines.cpp, compiled when it is first asked for."""
    path = course.build / name
    if not path.exists():
        flags = ["-std=c++17", "-O3", "-Wall", "-Wextra"]
        call([*compile, *flags, str(HERE / "baselines.cpp"), "-o", str(path)])
    return str(path)


def plain(kind: str) -> Callable[[Course], Times]:
    def run(course: Course) -> Times:
        cores = [str(core) for core in course.cores]
        return _table(call([program(course, "plain", "g++"), kind, *cores, str(course.warm_up), *course.runs]))

    return run


def library(kind: str) -> Callable[[Course], Times]:
    def run(course: Course) -> Times:
        script, cores = str(HERE / "python_loops.py"), [str(core) for core in course.cores]
        return _table(call([sys.executable, script, kind, *cores, str(course.warm_up), *course.runs]))

    return run


def open_mpi(layers: str) -> Callable[[Course], Times]:
    def run(course: Course) -> Times:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *root, "-np", "2", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1"]
        command += [
            "--mca",
            "btl",
            layers,
            program(course, "mpi", "mpicxx", "-DWITH_MPI"),
            "mpi",
            *(str(core) for core in course.cores),
        ]
        return _table(call([*command, str(course.warm_up), *course.runs]))

    return run


def ucx(layers: str, test: str) -> Callable[[Course], Times]:
    def one(course: Course, nbytes: int) -> tuple[float, float]:
        env = os.environ | {"UCX_TLS": layers, "UCX_WARN_UNUSED_ENV_VARS": "n"}
        client = ["-c", str(course.cores[0]), "-t", test, "-s", str(nbytes)]
        with listening_server(["ucx_perftest", "-c", str(course.cores[1])], env) as port:
            command = ["ucx_perftest", "127.0.0.1", "-p", str(port), *client]
            text = call([*command, "-n", str(course.rounds(nbytes)), "-w", str(course.warm_up), "-f"], env)
        figures = re.findall(r"^\s*\d+\s+(\d+\.\d+)", text, re.MULTILINE)
        if not figures:
            raise RuntimeError(f"ucx_perftest printed no figures: {text[-200:]}")
        return float(figures[-1]), float("nan")

    return lambda course: {nbytes: one(course, nbytes) for nbytes in course.sizes}


@contextmanager
def listening_server(command: Sequence[str], env: dict[str, str]) -> Iterator[int]:
    """The port at which the process of ``command`` itself listens. Another process may take a port that was free a
    moment ago; then ``command`` ends, and the next port is tried. Raises RuntimeError.
    """
    for _ in range(PORTS):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        server = subprocess.Popen([*command, "-p", str(port)], env=env, stdout=subprocess.DEVNULL)
        try:
            if listens(server, port):
                yield port
                return
        finally:
            server.kill()
            server.wait()
    raise RuntimeError(f"{command[0]} listened at none of {PORTS} ports that were free")


def listens(server: subprocess.Popen[bytes], port: int) -> bool:
    """Returns whether ``server`` comes to listen at ``port``.

    Nothing connects: the server would take that for its client.
    """
    deadline = time.monotonic() + LISTEN_S
    while server.poll() is None and time.monotonic() < deadline:
        if _listening_sockets(port) & _sockets_of(server.pid):
            return True
        time.sleep(0.01)
    return False


def _listening_sockets(port: int) -> set[str]:
    """Their inodes (proc(5): /proc/net/tcp)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {words[9] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"}


def _sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets; none of one that has ended."""
    links = set[str]()
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                links.add(os.readlink(fd))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def needs_program(*names: str) -> Callable[[], str]:
    return lambda: ", ".join(name for name in names if shutil.which(name) is None)


def needs_module(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"the Python package {name}"


CXX, MPI, UCX = needs_program("g++"), needs_program("mpirun", "mpicxx"), needs_program("ucx_perftest")
COMPETITORS = [
    Competitor("lamina shm put", "memory", "native", lamina("shm", "put_lat", "native")),
    Competitor("lamina shm copy", "memory", "native", lamina("shm", "rtt", "native")),
    Competitor("Open MPI shm", "memory", "native", open_mpi("vader,self"), MPI),
    Competitor("UCX shm tag", "memory", "native", ucx("shm,self", "tag_lat"), UCX, False),
    Competitor("UCX shm put", "memory", "native", ucx("shm,self", "ucp_put_lat"), UCX, False),
    Competitor("unix socket", "memory", "native", plain("unix"), CXX),
    Competitor("unix socket, polled", "memory", "native", plain("unix-poll"), CXX),
    Competitor("pipe", "memory", "native", plain("pipe"), CXX),
    Competitor("lamina shm put, Python", "memory", "python", lamina("shm", "put_lat", "python")),
    Competitor("lamina shm copy, Python", "memory", "python", lamina("shm", "rtt", "python")),
    Competitor("ZeroMQ ipc, Python", "memory", "python", library("zeromq-ipc"), needs_module("zmq")),
    Competitor("lamina tcp put", "tcp", "native", lamina("tcp", "put_lat", "native")),
    Competitor("lamina tcp copy", "tcp", "native", lamina("tcp", "rtt", "native")),
    Competitor("TCP socket", "tcp", "native", plain("tcp"), CXX),
    Competitor("TCP socket, polled", "tcp", "native", plain("tcp-poll"), CXX),
    Competitor("Open MPI tcp", "tcp", "native", open_mpi("tcp,self"), MPI),
    Competitor("UCX tcp tag", "tcp", "native", ucx("tcp,self", "tag_lat"), UCX, False),
    Competitor("lamina tcp put, Python", "tcp", "python", lamina("tcp", "put_lat", "python")),
    Competitor("lamina tcp copy, Python", "tcp", "python", lamina("tcp", "rtt", "python")),
    Competitor("TCP socket, Python", "tcp", "python", library("tcp")),
    Competitor("ZeroMQ tcp, Python", "tcp", "python", library("zeromq-tcp"), needs_module("zmq")),
    Competitor("gloo, Python", "tcp", "python", library("gloo"), needs_module("torch")),
]
