"""Strangers without the token, or with another one, at the ports of a real Ray cluster: none of their code runs."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from fake_cluster import FakeCluster
from verdict import Verdict, first_failure

TRY_S = 60.0
NOISE = 50
LISTENS = "0A"  # the state in /proc/net/tcp
TASK = """
import pathlib, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(ray.remote(lambda file: pathlib.Path(file).touch()).remote(sys.argv[2]), timeout=40)
"""


def attack(folder: Path, auth: str = "token") -> Verdict:
    """``auth``: Ray's RAY_AUTH_MODE of the cluster."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return Verdict(None, "needs ray")
    with closing(FakeCluster(folder, {}, auth=auth)) as cluster:
        strangers = {
            "without a token": {"RAY_AUTH_MODE": "disabled"},
            "with another token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "00" * 32},
        }
        checks = {}
        for who, variables in strangers.items():
            file = folder / who.replace(" ", "-")
            _run_task(cluster.address, file, variables)
            checks[f"the task of a stranger {who} does not run"] = not file.exists()
        ports = _listening(_tree(cluster.pid))
        _send_noise(ports)
        own = folder / "own"
        _run_task(cluster.address, own, cluster.environment)
        checks["the task of the owner runs after noise to all ports"] = own.exists()
    return first_failure(checks, f"{len(strangers)} strangers refused, noise to {len(ports)} ports")


def _run_task(address: str, file: Path, variables: dict[str, str]) -> None:
    """Run a task on the cluster that makes ``file``, as a driver of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", TASK, address, str(file)],
            env=environment,
            capture_output=True,
            timeout=TRY_S,
            check=False,
        )


def _tree(pid: int) -> list[int]:
    """The process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    below = [int(word) for word in children.read_text().split()] if children.exists() else []
    return [pid, *(p for child in below for p in _tree(child))]


def _listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses and TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and fields[9] in inodes:
                    address, _, port = fields[1].partition(":")
                    own = table.endswith("tcp") and int(address, 16)
                    host = socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)) if own else "127.0.0.1"
                    ports.add((host, int(port, 16)))
    return sorted(ports)


def _send_noise(ports: list[tuple[str, int]]) -> None:
    rng = random.Random(0)
    for at in ports:
        for _ in range(NOISE):
            with suppress(OSError), socket.create_connection(at, timeout=2) as sock:
                sock.sendall(rng.randbytes(rng.randrange(1, 4000)))
