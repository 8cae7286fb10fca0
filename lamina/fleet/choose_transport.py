"""What ``--transport auto``, or none, means on this machine: one process, where all workers compute on one GPU.

Processes have a GPU by turns, of milliseconds, and what one sends waits for the other's turn; streams of one process
have it at once.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from lamina import netstack
from lamina.config import EngineConfig

log = logging.getLogger(__name__)


def nearest(config: EngineConfig) -> tuple[EngineConfig, str]:
    """``config``, with another transport where a nearer one will do, and why; empty: it is as it was.

    Workers that have places of their own, hosts, addresses or cores, stay processes.
    """
    scheme = netstack.within_process(config.transport)
    apart = config.ray_address or config.memory_addresses or config.cores
    if not scheme or apart or "cpu" in (config.compute_device, config.memory_device):
        return config, ""
    gpus = _gpus(config)
    if len(gpus) != 1 or None in gpus:
        return config, ""
    (gpu,) = gpus
    why = f"all workers compute on GPU {gpu}, which processes would have by turns"
    log.info("--transport: %s, for %s", scheme, why)
    return replace(config, transport=scheme), why


def _gpus(config: EngineConfig) -> set[int | None]:
    """Of all workers."""
    from lamina.workers.devices import gpu_of

    counts = {"compute": config.num_compute, "prefill": config.prefill_workers, "memory": config.memory_workers}
    return {
        gpu_of(config.memory_device if role == "memory" else config.compute_device, config.gpu_number(role, index))
        for role, count in counts.items()
        for index in range(count)
    }
