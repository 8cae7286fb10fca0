"""Baselines of pingpong.py that are Python libraries: a plain socket, ZeroMQ, gloo. Each end is a process.

``python_loops.py KIND CORE CORE WARM_UP SIZE:ROUNDS...`` prints, for each size: SIZE, then p50 and p99 of half a
round trip in microseconds. Messages arrive in memory of the caller's and are compared after the clock has stopped.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

PAYLOADS = 3


@dataclass
class PythonWire:
    """``get`` takes the number of bytes and gives what arrived, in memory that the next call may overwrite."""

    put: Callable[[bytes], object]
    get: Callable[[int], Any]


def over_tcp(leads: bool, place: str) -> PythonWire:
    if leads:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            _tell(place, str(listener.getsockname()[1]))
            sock, _ = listener.accept()
    else:
        sock = socket.create_connection(("127.0.0.1", int(_hear(place))))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory: dict[int, bytearray] = {}

    def get(nbytes: int) -> bytearray:
        buffer = memory.setdefault(nbytes, bytearray(nbytes))
        got, view = 0, memoryview(buffer)
        while got < nbytes:
            n = sock.recv_into(view[got:])
            if n == 0:
                raise ConnectionError("the other side is gone")
            got += n
        return buffer

    return PythonWire(sock.sendall, get)


def over_zeromq(leads: bool, place: str, transport: str) -> PythonWire:
    zmq = importlib.import_module("zmq")

    sock = zmq.Context().socket(zmq.REQ if leads else zmq.REP)
    if leads:
        where = f"ipc://{place}/socket" if transport == "ipc" else f"tcp://127.0.0.1:{_hear(place)}"
        sock.connect(where)
    elif transport == "ipc":
        sock.bind(f"ipc://{place}/socket")
    else:
        _tell(place, str(sock.bind_to_random_port("tcp://127.0.0.1")))
    return PythonWire(sock.send, lambda _: sock.recv())


def over_gloo(leads: bool, place: str) -> PythonWire:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{place}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0 if leads else 1, world_size=2)
    torch.set_num_threads(1)
    other = 1 if leads else 0
    memory: dict[int, torch.Tensor] = {}
    sources: dict[bytes, torch.Tensor] = {}

    def put(data: bytes) -> None:
        if data not in sources:
            sources[data] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(sources[data], other)

    def get(nbytes: int) -> Any:
        into = memory.setdefault(nbytes, torch.empty(nbytes, dtype=torch.uint8))
        dist.recv(into, other)
        return into.numpy()

    return PythonWire(put, get)


WIRES: dict[str, Callable[[bool, str], PythonWire]] = {
    "tcp": over_tcp,
    "zeromq-ipc": lambda leads, place: over_zeromq(leads, place, "ipc"),
    "zeromq-tcp": lambda leads, place: over_zeromq(leads, place, "tcp"),
    "gloo": over_gloo,
}


def _tell(place: str, text: str) -> None:
    with open(f"{place}/.address", "w") as file:
        file.write(text)
    os.rename(f"{place}/.address", f"{place}/address")


def _hear(place: str) -> str:
    deadline = perf_counter() + 30
    while not os.path.exists(f"{place}/address"):
        if perf_counter() > deadline:
            raise TimeoutError("the other side did not say where it is")
    with open(f"{place}/address") as file:
        return file.read()


def ping_pong(wire: PythonWire, leads: bool, nbytes: int, warm_up: int, rounds: int) -> list[float]:
    payloads = [bytes((i * 131 + i // 251 + k * 77) % 256 for i in range(min(nbytes, 4096))) for k in range(PAYLOADS)]
    payloads = [(p * (nbytes // len(p) + 1))[:nbytes] for p in payloads]
    times = []
    for n in range(warm_up + rounds):
        payload = payloads[n % PAYLOADS]
        start = perf_counter()
        if leads:
            wire.put(payload)
        data = wire.get(nbytes)
        if not leads:
            wire.put(payload)
        times.append((perf_counter() - start) / 2)
        if len(data) != nbytes or not payload.startswith(data):
            raise ValueError(f"message {n} differs from what was sent")
    return sorted(times[warm_up:])


def main() -> None:
    kind, cores, warm_up = sys.argv[1], [int(core) for core in sys.argv[2:4]], int(sys.argv[4])
    runs = [tuple(int(n) for n in run.split(":")) for run in sys.argv[5:]]
    with tempfile.TemporaryDirectory() as place:
        child = os.fork()
        leads = child != 0
        os.sched_setaffinity(0, {cores[0 if leads else 1]})
        wire = WIRES[kind](leads, place)
        for nbytes, rounds in runs:
            times = ping_pong(wire, leads, nbytes, min(warm_up, rounds), rounds)
            if leads:
                print(nbytes, *(f"{1e6 * times[int(len(times) * share)]:.4f}" for share in (0.5, 0.99)), flush=True)
        if not leads:
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
