"""Ping-pong by send and receive of torch's process groups: of NCCL between two GPUs, for pingpong.py.

``group_rounds.py BACKEND WARM_UP SIZE:ROUNDS...`` prints, for each size: SIZE, then p50 and p99 of half a round trip in
microseconds. With nccl the clock is the GPU's, and rounds are parts of a graph, as those of Lamina's kernels are. Any
other backend has tensors of the CPU and its clock; gloo shows there that this works. Every payload is compared, on both
sides, once all messages of a batch have come: no round waits for the other side's comparison.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

PAYLOADS = 3
MOST_ROUNDS = 32  # of a batch
KEPT_BYTES = 64 << 20  # of a batch's messages
LIMIT = timedelta(seconds=60)  # of a wait for the other rank


def payload(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


class RoundBatch:
    """One rank's rounds that go on without a look at what came: each message comes to a place of its own. The first one
    is for both sides to be there, and does not count.
    """

    def __init__(self, rank: int, device: torch.device, nbytes: int, rounds: int) -> None:
        self._rank, self.counted = rank, min(rounds, max(1, min(MOST_ROUNDS, KEPT_BYTES // nbytes)))
        self.payloads = [payload(nbytes, seed).to(device) for seed in range(PAYLOADS)]
        self.came = [torch.empty_like(self.payloads[0]) for _ in range(1 + self.counted)]

    def play(self, n: int) -> None:
        came = self.came[n]
        if self._rank == 0:
            dist.send(self.payloads[n % PAYLOADS], 1)
        dist.recv(came, 1 - self._rank)
        if self._rank == 1:
            dist.send(came, 0)

    def check(self) -> None:
        """Raises ValueError for a message that is not the one that was sent. None of them shows again."""
        for n, came in enumerate(self.came):
            if not torch.equal(came, self.payloads[n % PAYLOADS]):
                raise ValueError(f"message {n} differs from what was sent")
            came.zero_()


def by_gpu(batch: RoundBatch) -> Callable[[], list[float]]:
    """A call for each batch, of one graph, so that no launch of the host is between two rounds: their mean seconds, by
    the GPU's clock.
    """
    batch.play(0)  # what NCCL makes at first is no part of a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for n in range(1, 1 + batch.counted):
            batch.play(n)

    def run() -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        batch.play(0)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return [float(start.elapsed_time(end)) / 1e3 / batch.counted]

    return run


def by_cpu(batch: RoundBatch) -> Callable[[], list[float]]:
    """Does as ``by_gpu``, but for each round."""

    def run() -> list[float]:
        times = []
        for n in range(1 + batch.counted):
            start = perf_counter()
            batch.play(n)
            times.append(perf_counter() - start)
        return times[1:]

    return run


def ping_pong(rank: int, device: torch.device, nbytes: int, warm_up: int, rounds: int) -> list[float]:
    """Seconds of half a round trip each, sorted, of rank 0."""
    batch = RoundBatch(rank, device, nbytes, rounds)
    run = by_gpu(batch) if device.type == "cuda" else by_cpu(batch)
    times = list[list[float]]()
    for _ in range(-(-warm_up // batch.counted) + -(-rounds // batch.counted)):
        times.append(run())
        batch.check()
    counted = times[-(-warm_up // batch.counted) :]
    return sorted(time / 2 for each in counted for time in each)


def play(rank: int, backend: str, place: str, warm_up: int, runs: list[tuple[int, int]]) -> None:
    """One rank's process; rank 0 prints."""
    store = dist.FileStore(f"{place}/store", 2)  # type: ignore[attr-defined]
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=LIMIT)
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
