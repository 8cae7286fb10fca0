"""Ranks that meet: nccl against mesh, for gpu_suite.py. HARDWARE-UNVERIFIED: run on CPUs, with gloo in NCCL's place.

Two ranks, threads of this process with a device each, sum and gather tensors of the sizes that slices have. With mesh,
each tensor goes down to the host, over shared memory and up again, as in a worker. Bandwidths are those of nccl-tests.
algbw is the size of the result over the time; busbw is what each rank's link carries each way, by which numbers of
ranks can be compared. ``bench_collective.py`` has ranks of CPUs, in processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import product
from typing import NamedTuple

import torch
from common import BrokenError

from lamina import netstack
from lamina.ops.collective import Collective, RankLocation, nccl, open_collective, why_unavailable
from lamina.ops.collective.mesh import MeshCollective, connect_mesh
from lamina.workers.compute.staged_comm import collective_with_staging
from lamina.workers.staging import Staging, open_staging

from .place import DEVICE, IS_DRY

SIZES = {
    "16 KiB": 1 << 14,
    "128 KiB": 1 << 17,
    "8 MiB": 1 << 23,
}  # of a step of few rows, of many, of a prompt
if IS_DRY:
    del SIZES["8 MiB"]
WARM, RUNS = 5, 50
LIMIT_S = 60.0


def nccl_against_mesh() -> dict[str, dict[str, float] | str]:
    """Times and bandwidths over two GPUs. Raises BrokenError for a wrong result. A dry run has two CPUs, and gloo."""
    if IS_DRY:
        nccl.open_collective = import_module("nccl_over_gloo").open_over_gloo
        return dict(measure(("mesh", "nccl"), [DEVICE] * 2, runs=2))
    count, first = torch.cuda.device_count(), torch.device("cuda", 0)
    if count < 2:
        return {"skipped": f"collective nccl against mesh takes 2 GPUs, and {count} is here"}
    if lacked := why_unavailable("nccl", first):
        return {"skipped": lacked}
    return dict(measure(("mesh", "nccl"), [torch.device("cuda", n) for n in range(2)]))


def measure(names: Sequence[str], devices: Sequence[torch.device], runs: int = RUNS) -> dict[str, dict[str, float]]:
    """Times and bandwidths by what is done, size and name; medians, of rank 0. Raises BrokenError for what is wrong."""
    fabrics = [netstack.open("shm", key=bytes(range(32))) for _ in devices]
    ranks = [f"rank {n}" for n in range(len(fabrics))]
    # A mesh for each name: it has one reader at a time, and nccl's guard is one.
    listeners = {
        name: [fabric.listen(reception=netstack.ListenTerms(name=r)) for fabric, r in zip(fabrics, ranks, strict=True)]
        for name in names
    }

    def mesh_of(name: str, number: int) -> MeshCollective:
        urls = [listener.url for listener in listeners[name]]
        fabric, listener = fabrics[number], listeners[name][number]
        return connect_mesh(fabric, listener, urls, ranks, number, start_timeout_s=LIMIT_S, step_timeout_s=LIMIT_S)

    def rank(number: int) -> dict[str, dict[str, float]]:
        try:
            meshes = {name: mesh_of(name, number) for name in names}
            return play(meshes, open_staging(devices[number]), runs)
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


def play(meshes: Mapping[str, MeshCollective], staging: Staging, runs: int) -> dict[str, dict[str, float]]:
    """Run a rank's part of ``measure``. ``meshes``: of each collective, by name."""
    times = dict[str, dict[str, float]]()
    at = RankLocation(staging.device, LIMIT_S, LIMIT_S)
    groups = {name: open_collective(name, mesh, at) for name, mesh in meshes.items()}
    (ranks, me), *_ = ((mesh.size, mesh.rank) for mesh in meshes.values())
    staged = {name: collective_with_staging(group, staging) for name, group in groups.items()}
    try:
        for (kind, way), (size, nbytes) in product(KINDS.items(), SIZES.items()):
            parts = [part(rank, nbytes // way.parts(ranks)) for rank in range(ranks)]
            want, row = way.result(parts), times.setdefault(f"{kind} {size}", {})
            for name, group in staged.items():
                call = partial(way.call, group, staging.to_device(parts[me]))
                if not torch.equal(staging.to_host(call())[0], want):
                    raise BrokenError(f"{kind} of {size} by {name} is wrong")
                figures = bandwidths(kind, nbytes, ranks, _seconds(call, staging, runs))
                row.update({f"{name} {unit}": value for unit, value in figures.items()})
    finally:
        for group in groups.values():
            group.close()
    return times


def part(rank: int, nbytes: int) -> torch.Tensor:
    """A rank's bf16 numbers, [nbytes / 2]."""
    return torch.randn(nbytes // 2, generator=torch.Generator().manual_seed(rank)).bfloat16()


def bandwidths(kind: str, nbytes: int, ranks: int, seconds: float) -> dict[str, float]:
    """Returns, for a result of ``nbytes`` on each of ``ranks``, microseconds, and GB/s as in nccl-tests
    (doc/PERFORMANCE.md).
    """
    algorithm = nbytes / seconds / 1e9
    return {"us": seconds * 1e6, "algbw": algorithm, "busbw": algorithm * KINDS[kind].share(ranks)}


def plain_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One rank after the other in fp32, rounded once."""
    total = parts[0].float()
    for x in parts[1:]:
        total = total + x.float()
    return total.bfloat16()


class CollectiveKind(NamedTuple):
    """``parts``: how many ranks' numbers a result holds side by side; ``share``: of its bytes, those that each rank's
    link carries each way.
    """

    call: Callable[[Collective, torch.Tensor], torch.Tensor]
    result: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    parts: Callable[[int], int]
    share: Callable[[int], float]


KINDS = {
    "all_reduce": CollectiveKind(
        lambda group, x: group.all_reduce(x), plain_sum, lambda ranks: 1, lambda ranks: 2 * (ranks - 1) / ranks
    ),
    "all_gather": CollectiveKind(
        lambda group, x: group.all_gather(x, group.size),
        lambda parts: torch.cat([*parts]),
        lambda ranks: ranks,
        lambda ranks: (ranks - 1) / ranks,
    ),
}


def _seconds(call: Callable[[], torch.Tensor], staging: Staging, runs: int) -> float:
    taken = []
    for _ in range(WARM + runs):
        start = time.perf_counter()
        staging.to_host(call()[:1])  # until the device is done
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:])
