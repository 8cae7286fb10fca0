"""What ``--transport auto``, or none, means on this machine: one process, where all workers compute on one GPU.

Processes have a GPU by turns, of milliseconds, and what one sends waits for the other's turn; streams of one process
have it at once.
"""

from __future__ import annotations

import logging

from lamina import netstack
from lamina.config import changed
from lamina.protocol.options.engine import EngineConfig

log = logging.getLogger(__name__)


def nearest(config: EngineConfig) -> tuple[EngineConfig, str]:
    """``config``, with another transport where a nearer one will do, and why; empty: it is as it was.

    Workers that have places of their own, hosts, addresses or cores, stay processes.
    """
    scheme = netstack.within_process(config.launching.transport)
    launching, devices = config.launching, config.devices
    apart = launching.elsewhere or launching.memory_addresses or devices.cores
    if not scheme or apart or "cpu" in (devices.compute_device, devices.memory_device):
        return config, ""
    gpus = _gpus(config)
    if len(gpus) != 1 or None in gpus:
        return config, ""
    (gpu,) = gpus
    why = f"all workers compute on GPU {gpu}, which processes would have by turns"
    log.info("--transport: %s, for %s", scheme, why)
    return changed(config, {"transport": scheme, "rdma_device": ""}), why


def _gpus(config: EngineConfig) -> set[int | None]:
    """The numbers of all workers' GPUs; None for a CPU."""
    from lamina.workers.devices import gpu_of

    devices = config.devices
    return {
        gpu_of(devices.memory_device if role == "memory" else devices.compute_device, config.gpu_number(role, index))
        for role, count in config.topology.counts.items()
        for index in range(count)
    }
