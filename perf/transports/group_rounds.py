"""Ping-pong by send and receive of torch's process groups: of NCCL between two GPUs, for pingpong.py.

``group_rounds.py BACKEND WARM_UP SIZE:ROUNDS...`` prints, for each size: SIZE, then p50 and p99 of half a round trip in
microseconds. With nccl the clock is the GPU's: events on the stream before the send and behind the receive, as the
paper defines a round trip. Any other backend has tensors of the CPU and its clock; gloo shows there that this works.
Every payload is compared once the clock has stopped.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

PAYLOADS = 3


def gpu_clock() -> Callable[[], Callable[[], float]]:
    """Begins; the call that it gives ends, and tells the seconds."""

    def begin() -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()

        def stop() -> float:
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return stop

    return begin


def cpu_clock() -> Callable[[], Callable[[], float]]:
    """As ``gpu_clock``."""

    def begin() -> Callable[[], float]:
        start = perf_counter()
        return lambda: perf_counter() - start

    return begin


def payload(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def ping_pong(rank: int, device: torch.device, nbytes: int, warm_up: int, rounds: int) -> list[float]:
    """Seconds of half a round trip each, sorted, of rank 0."""
    payloads = [payload(nbytes, seed).to(device) for seed in range(PAYLOADS)]
    came, times = torch.empty_like(payloads[0]), []
    clock = gpu_clock() if device.type == "cuda" else cpu_clock()
    for n in range(warm_up + rounds):
        stop = clock()
        if rank == 0:
            dist.send(payloads[n % PAYLOADS], 1)
        dist.recv(came, 1 - rank)
        if rank == 1:
            dist.send(came, 0)
        times.append(stop() / 2)
        if not torch.equal(came, payloads[n % PAYLOADS]):
            raise ValueError(f"message {n} differs from what was sent")
    return sorted(times[warm_up:])


def play(rank: int, backend: str, place: str, warm_up: int, runs: list[tuple[int, int]]) -> None:
    """One rank's process; rank 0 prints."""
    store = dist.FileStore(f"{place}/store", 2)  # type: ignore[attr-defined]
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    for nbytes, rounds in runs:
        times = ping_pong(rank, device, nbytes, min(warm_up, rounds), rounds)
        if rank == 0:
            print(nbytes, *(f"{1e6 * times[int(len(times) * share)]:.4f}" for share in (0.5, 0.99)), flush=True)
    dist.destroy_process_group()


def main() -> None:
    backend, warm_up = sys.argv[1], int(sys.argv[2])
    runs = [(int(nbytes), int(rounds)) for nbytes, rounds in (run.split(":") for run in sys.argv[3:])]
    with tempfile.TemporaryDirectory() as place:
        child = os.fork()  # before either has touched a GPU
        play(1 if child == 0 else 0, backend, place, warm_up, runs)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
