"""A start on several hosts, in words: placement, memory of every device, channels. It starts nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

from lamina.config.engine_config import EngineConfig
from lamina.executor.hosts.cluster_file import is_file, read_cluster
from lamina.executor.hosts.worker_placement import (
    Host,
    HostAssignment,
    assign_hosts,
    check_kv_memory,
    on_gpu,
    worker_requirements,
)
from lamina.executor.launchers.remote_links import any_port
from lamina.facts.hardware import DEVICES
from lamina.facts.report import count_text, size_text, table

from .phrases import collective_text

_GB = 1e9


def cluster_plan(model: str, config: EngineConfig) -> str:
    """The plan for the hosts of a YAML as it says, without asking them; else for those of a running cluster.

    Raises ValueError where the workers do not fit, in number or in memory, or ranks cannot meet as they are asked to.
    """
    topology, launching = config.topology, config.launch
    places = _places(config)
    check_kv_memory(places, config.devices.kv_bytes())
    weights, token = _sizes(model, config)
    workers = count_text(topology.num_compute, "compute worker")
    if topology.prefill_workers:
        workers += ", " + count_text(topology.prefill_workers, "prefill worker")
    title = (
        f"would start {workers} and {count_text(topology.memory_workers, 'memory worker')} "
        f"{'through Ray' if launching.ray_address else 'by hand'} over {launching.scheme} for {model}: "
        f"{launching.placement} placement"
    )
    meeting = collective_text(config, [at.host.name for at in places["compute"]])
    rows = [
        (f"{role}-{i}", at.host.address, *_weights(weights, _used(role, at, config)), _ring(config, role, at))
        for role in ("compute", "prefill")
        for i, at in enumerate(places.get(role, []))
    ]
    for i, at in enumerate(places["memory"]):
        part = topology.normalized_weights[i] / sum(topology.normalized_weights)
        ranks = topology.tensor_parallel_size
        came = (
            f"{_url(config, at)} from "
            + ("compute-*" if ranks == 1 else f"rank {i % ranks} of every replica")
            + (", prefill-*" if topology.prefill_workers else "")
        )
        rows.append((f"memory-{i}", at.host.address, *_kv(token * part, config, _used("memory", at, config)), came))
    head = ("worker", "host", "device", "memory of the device", "listens at, for")
    return "\n".join([title, *meeting, *table([head, *rows], left=range(len(head))), *_by_hand(config, places)])


def _places(config: EngineConfig) -> dict[str, list[HostAssignment]]:
    launching, counts = config.launch, config.topology.num_workers
    if launching.ray_address or launching.hosts:
        hosts = planned_hosts(launching.ray_address or launching.hosts)
        return assign_hosts(hosts, worker_requirements(config, counts), launching.placement, on_gpu(config))
    anywhere = HostAssignment(Host(name="", address="any", resources={}), {})
    return {role: [anywhere] * count for role, count in counts.items()}


def _by_hand(config: EngineConfig, assignments: dict[str, list[HostAssignment]]) -> list[str]:
    """The commands that a start would print, if it is for people to start the workers."""
    if config.launch.ray_address:
        return []
    from lamina.executor.launchers.static_commands import commands, instructions

    driver = re.sub(r":0$", ":PORT", config.launch.driver_address)
    planned = assignments if config.launch.hosts else {}
    made = commands(config, planned, config.topology.num_workers, driver, config.launch.driver_name or "NAME")
    return [instructions(made, config.deadlines.start_timeout_s)]


def planned_hosts(address: str) -> list[Host]:
    """The hosts of a ``ray_address``, or of a YAML file by its path."""
    if is_file(address):
        return read_cluster(address).planned()
    from lamina.executor.hosts.ray_cluster import hosts_of, joined

    with joined(address) as ray:
        return hosts_of(ray)


def _sizes(model: str, config: EngineConfig) -> tuple[int, int]:
    """Bytes of a rank's weights, and of a token's stored K and V in all layers; from the configuration alone."""
    from lamina.kv.stored_format import head_bytes, stored_dtype
    from lamina.models.meta_capture import check_plannable, plan_cuts
    from lamina.ops import gemm

    on_cpu = config.devices.compute_device == "cpu"
    program = plan_cuts(
        model,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        ranks=config.topology.tensor_parallel_size,
        hf_overrides=config.model.hf_overrides,
        backend=gemm.get("auto", 1) if on_cpu else None,
        quantization=config.model.quantization,
        quantization_compute=config.model.quantization_compute,
    ).program
    check_plannable(program)
    shapes = [(call.k.shape[0], call.k.shape[-1], call.v.shape[-1], call.k.dtype) for call in program.calls]
    token = sum(h * head_bytes(k, v, stored_dtype(config.kv.kv_cache_dtype, dtype)) for h, k, v, dtype in shapes)
    return program.weight_bytes, token * config.topology.tensor_parallel_size


class _Used(NamedTuple):
    """The device that a worker computes on."""

    title: str
    memory: float | None  # bytes; None = not stated, or the host's own


def _used(role: str, at: HostAssignment, config: EngineConfig) -> _Used:
    if role not in on_gpu(config):
        return _Used("host's cores", None)
    device = DEVICES.get(at.host.labels.get("lamina_device", ""))
    return _Used(device.title, device.memory_gb * _GB) if device else _Used("GPU", None)


def _weights(nbytes: int, on: _Used) -> tuple[str, str]:
    if on.memory is not None and nbytes > on.memory:
        raise ValueError(
            f"{nbytes / _GB:.1f} GB of weights do not fit in the {on.memory / _GB:g} GB of {on.title}: every compute "
            f"worker holds all of them, or a part with --tensor-parallel-size"
        )
    return on.title, f"{size_text(nbytes)} of weights" + ("" if on.memory is None else f" of {on.memory / _GB:g} GB")


def _kv(token: float, config: EngineConfig, on: _Used) -> tuple[str, str]:
    limit, asked = on.memory, config.devices.kv_bytes()
    if limit is not None and asked > limit:
        raise ValueError(
            f"--kv-cache-memory-bytes {config.devices.kv_memory} exceeds the {limit / _GB:g} GB of {on.title}"
        )
    if asked:
        room = f"{size_text(asked)} for KV" + ("" if limit is None else f" of {limit / _GB:g} GB")
        return on.title, f"{room}: {int(asked / token)} tokens"
    if limit is not None:
        return on.title, f"up to {limit / _GB:g} GB for KV: {int(limit / token)} tokens"
    return on.title, f"{size_text(token)} of KV a token"


def _url(config: EngineConfig, at: HostAssignment) -> str:
    return f"{config.launch.scheme.partition('+')[0]}://{any_port(at.host.address)}"


def _ring(config: EngineConfig, role: str, at: HostAssignment) -> str:
    if role == "compute" and config.topology.replicas > 1:
        return f"{_url(config, at)} from the compute worker before it"
    return "-"
