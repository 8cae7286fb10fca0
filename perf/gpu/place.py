"""The place where parts of gpu_suite.py compute: the GPU, or, in a dry run, a CPU that emulates its kernels, with sizes
that a CPU can do. A dry run shows that the parts themselves have no fault; its times say nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lamina.ops.attention.cuda import CudaAttention, open_backend

DRY_RUN = "GPU_SUITE_DRY_RUN"  # set by the suite for the processes of its parts
IS_DRY = bool(os.environ.get(DRY_RUN))
DEVICE = torch.device("cpu" if IS_DRY else "cuda")


def backend(dtype: torch.dtype, stored: torch.dtype | None = None) -> CudaAttention:
    """Return the cuda backend for queries of ``dtype``."""
    if not IS_DRY:
        return open_backend(DEVICE, dtype, stored or dtype)
    from cuda_emulation import emulated

    return emulated(dtype, store=stored or dtype)


def synchronize() -> None:
    """Wait for all work of the device."""
    if not IS_DRY:
        torch.cuda.synchronize()


def capture(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays ``work``: a CUDA graph. Raises RuntimeError if it cannot be captured."""
    if IS_DRY:
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], Any] = graph.replay
    return replay


def seconds(call: Callable[[], Any], repeats: int = 15, calls: int = 8) -> float:
    """Return the seconds of one call on the device: the median over runs of a graph of several, where it can be
    captured.
    """
    if IS_DRY:
        repeats = calls = 1
    for _ in range(1 if IS_DRY else 3):
        call()
    synchronize()

    def several() -> None:
        for _ in range(calls):
            call()

    run: Callable[[], Any] = several
    try:
        run = capture(several)
    except RuntimeError:
        synchronize()
    return statistics.median(_timed(run) / calls for _ in range(repeats))


def _timed(run: Callable[[], Any]) -> float:
    if IS_DRY:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended) / 1e3)
