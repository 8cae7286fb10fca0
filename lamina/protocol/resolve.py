"""Which options go together. Policy: no torch, no I/O; what a host or a model has is handed in."""

from __future__ import annotations

from lamina.netstack import beyond_host

from .options import EngineConfig


def check_together(config: EngineConfig) -> None:
    """Raises ValueError, in one line that names the flags and the fix, for options that contradict each other."""
    _check_addresses(config)
    _check_weights(config)
    _check_ranks(config)
    _check_devices(config)


def _check_addresses(config: EngineConfig) -> None:
    addresses, over_ray = config.launching.memory_addresses, config.launching.ray_address
    workers = config.topology.memory_workers
    if addresses and len(addresses) != workers:
        raise ValueError(f"--memory-addresses names {len(addresses)} places for --memory-workers {workers}")
    fixed = [a for a in addresses if a and not a.endswith(":0")]  # port 0 is any free one
    if twice := next((a for a in fixed if fixed.count(a) > 1), None):
        raise ValueError(f"--memory-addresses names {twice} twice: each memory worker needs a place of its own")
    if not over_ray:
        return
    try:
        beyond_host(config.launching.transport)
    except ValueError as error:
        raise ValueError(f"--transport: {error}") from None
    if addresses:
        raise ValueError("--memory-addresses are for this machine: over --ray-address hosts have theirs from Ray")
    if config.devices.cores:
        raise ValueError("--cores are of this machine: over --ray-address Ray gives workers theirs")


def _check_weights(config: EngineConfig) -> None:
    weights, workers = config.topology.weights, config.topology.memory_workers
    if len(weights) != workers:
        raise ValueError(f"--memory-weights names {len(weights)} weights for --memory-workers {workers}")


def _check_ranks(config: EngineConfig) -> None:
    topology = config.topology
    size, workers = topology.tensor_parallel_size, topology.memory_workers
    if workers % size:
        raise ValueError(
            f"--tensor-parallel-size {size}: each rank has memory workers of its own, as many as the others: "
            f"use --memory-workers {size} or {2 * size}, not {workers}"
        )
    if size > 1 and topology.prefill_workers:
        raise ValueError("--prefill-workers have all weights: use 0 with --tensor-parallel-size > 1")
    weights = topology.weights
    if any(topology.of_rank(weights, r) != topology.of_rank(weights, 0) for r in range(size)):
        raise ValueError(
            f"--memory-weights {','.join(f'{w:g}' for w in weights)}: memory worker w is rank w mod {size}'s "
            f"(--tensor-parallel-size), and every rank must have the same weights in the same order"
        )


def _check_devices(config: EngineConfig) -> None:
    devices, size = config.devices, config.topology.tensor_parallel_size
    if ":" in devices.compute_device and size > 1:
        raise ValueError(
            f"--compute-device {devices.compute_device} is one GPU, and --tensor-parallel-size {size} takes one for "
            f"each rank: use --compute-device cuda"
        )
    if devices.memory_sms and devices.memory_device == "cpu":
        raise ValueError(
            f"--memory-sms {devices.memory_sms} is for memory workers on a GPU: leave it out with --memory-device cpu"
        )
    if config.model.compile and devices.compute_device != "cpu":
        raise ValueError(f"--compile is for CPUs: leave it out with --compute-device {devices.compute_device}")
