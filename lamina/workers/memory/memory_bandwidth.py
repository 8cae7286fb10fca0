"""The speed of the memory that holds KV."""

from __future__ import annotations

import statistics
import time

import torch

RATE_BYTES = 256 << 20
RATE_PASSES = 5


def measure_read_bandwidth(device: torch.device) -> float:
    """Measure the bytes a second that ``device`` reads from memory outside its caches, with all of its threads."""
    data, rates = torch.ones(RATE_BYTES // 8, dtype=torch.int64, device=device), []
    for _ in range(RATE_PASSES):
        start = time.perf_counter()
        data.sum().item()
        rates.append(RATE_BYTES / (time.perf_counter() - start))
    return statistics.median(rates)
