"""Ranks that meet: nccl against mesh, for gpu_suite.py. HARDWARE-UNVERIFIED: run on CPUs, with gloo in NCCL's place.

Two ranks, threads of this process with a device each, sum tensors of the sizes that slices have. With mesh, each tensor
goes down to the host, over shared memory and up again, as in a worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from common import BrokenError

from lamina import netstack
from lamina.collective import Collective, RankPlace, lacks, open_collective
from lamina.collective.mesh import Mesh, listen_and_connect
from lamina.compute.staged import stage_collective
from lamina.workers.staging import Staging, open_staging

SIZES = {"16 KiB": 1 << 14, "128 KiB": 1 << 17, "8 MiB": 1 << 23}  # of a step of few rows, of many, of a prompt
WARM, RUNS = 5, 50
LIMIT_S = 60.0


def nccl_against_mesh() -> dict[str, dict[str, float] | str]:
    """Microseconds of one sum over two GPUs. Raises BrokenError where the two give other bits."""
    count, first = torch.cuda.device_count(), torch.device("cuda", 0)
    if count < 2:
        return {"skipped": f"collective nccl against mesh takes 2 GPUs, and {count} is here"}
    if lacked := lacks("nccl", first):
        return {"skipped": lacked}
    return dict(measure(("mesh", "nccl"), [torch.device("cuda", n) for n in range(2)]))


def measure(names: Sequence[str], devices: Sequence[torch.device], runs: int = RUNS) -> dict[str, dict[str, float]]:
    """Microseconds of one sum, by size and name; the median, of rank 0."""
    fabrics = [netstack.open("shm", key=bytes(range(32))) for _ in devices]
    ranks = [f"rank {n}" for n in range(len(fabrics))]
    listeners = [
        fabric.listen(reception=netstack.Reception(name=name)) for fabric, name in zip(fabrics, ranks, strict=True)
    ]
    urls = [listener.url for listener in listeners]

    def rank(number: int) -> dict[str, dict[str, float]]:
        try:
            mesh = listen_and_connect(
                fabrics[number], listeners[number], urls, ranks, number, start_timeout_s=LIMIT_S, step_timeout_s=LIMIT_S
            )
            return _rank(mesh, names, open_staging(devices[number]), runs)
        except BaseException:
            fabrics[number].close()  # the others need not wait
            raise

    try:
        with ThreadPoolExecutor(len(devices)) as pool:
            first, *_ = pool.map(rank, range(len(devices)))
        return first
    finally:
        for fabric in fabrics:
            fabric.close()


def _rank(mesh: Mesh, names: Sequence[str], staging: Staging, runs: int) -> dict[str, dict[str, float]]:
    times = dict[str, dict[str, float]]()
    groups = [open_collective(n, mesh, RankPlace(staging.device, "127.0.0.1", LIMIT_S, LIMIT_S)) for n in names]
    try:
        for size, nbytes in SIZES.items():
            g = torch.Generator().manual_seed(mesh.rank)
            x = staging.up(torch.randn(nbytes // 2, generator=g).bfloat16())
            sums = [stage_collective(group, staging).all_reduce(x) for group in groups]
            if not all(torch.equal(s, sums[0]) for s in sums):
                raise BrokenError(f"sums of {size} differ between {', '.join(names)}")
            times[size] = {
                name: _seconds(stage_collective(group, staging), x, staging, runs) * 1e6
                for name, group in zip(names, groups, strict=True)
            }
    finally:
        for group in groups:
            group.close()
    return times


def _seconds(group: Collective, x: torch.Tensor, staging: Staging, runs: int) -> float:
    taken = []
    for _ in range(WARM + runs):
        start = time.perf_counter()
        staging.down(group.all_reduce(x)[:1])  # until the device is done
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:])
