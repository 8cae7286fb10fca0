"""The transport that ``--transport auto``, or none, means on this machine: one process, if all workers compute on one
GPU.

Processes use a GPU in turns of milliseconds, so a message waits for the other process's turn. Streams of one process
use it at once.
"""

from __future__ import annotations

import logging

from lamina import netstack
from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import replace_options

log = logging.getLogger(__name__)


def choose_transport(config: EngineConfig) -> tuple[EngineConfig, str]:
    """Return ``config``, with a faster transport if one suffices, and the reason; empty: ``config`` is unchanged.

    Workers with hosts, addresses or cores of their own stay processes.
    """
    scheme = netstack.within_process(config.launch.transport)
    launching, devices = config.launch, config.devices
    is_separated = launching.may_span_hosts or launching.memory_addresses or devices.cores
    if not scheme or is_separated or "cpu" in (devices.compute_device, devices.memory_device):
        return config, ""
    gpus = _gpus(config)
    if len(gpus) != 1 or None in gpus:
        return config, ""
    (gpu,) = gpus
    why = f"all workers compute on GPU {gpu}, which processes would have by turns"
    log.info("--transport: %s, for %s", scheme, why)
    return replace_options(config, {"transport": scheme, "rdma_device": ""}), why


def _gpus(config: EngineConfig) -> set[int | None]:
    """Return the numbers of all workers' GPUs; None for a CPU."""
    from lamina.workers.device_selection import gpu_index

    devices = config.devices
    return {
        gpu_index(devices.memory_device if role == "memory" else devices.compute_device, config.gpu_index(role, index))
        for role, count in config.topology.num_workers.items()
        for index in range(count)
    }
