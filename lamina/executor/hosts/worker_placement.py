"""The choice of a host for each worker. Policy: it requests and starts nothing."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.config.engine_config import EngineConfig
from lamina.config.flag_groups import flag_name

RACK = "lamina_rack"  # hosts with the same value of this label are near each other
_TYPE = "accelerator_type:"  # how Ray names the resource of a type of GPU
_TRACE = 0.001  # amount of a resource that only marks a host, and is not used up


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of the cluster; ``resources``: those that are free."""

    name: str  # unique
    address: str  # IP
    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    cores: int = 1
    port: int = 0  # of its Ray; 0: none is known


@dataclass(frozen=True)
class HostAssignment:
    """A worker's host, and the resources that the worker takes there."""

    host: Host
    resources: dict[str, float]  # by resource; GPU and CPU are among them


def worker_requirements(config: EngineConfig, wanted: Mapping[str, int]) -> dict[str, tuple[int, str, str]]:
    """Return the ``wanted`` argument of ``assign_hosts``, compute workers first, as they communicate most."""
    traits = {"compute": "compute_on", "prefill": "compute_on", "memory": "memory_on"}
    return {
        role: (wanted[role], getattr(config.launch, name), flag_name(name))
        for role, name in traits.items()
        if wanted.get(role)
    }


def on_gpu(config: EngineConfig) -> set[str]:
    """Return the roles whose workers take a GPU each."""
    compute, memory = config.devices.compute_device, config.devices.memory_device
    devices = {"compute": compute, "prefill": compute, "memory": memory}
    return {role for role, device in devices.items() if device.startswith("cuda")}


def assign_hosts(
    hosts: Sequence[Host], wanted: dict[str, tuple[int, str, str]], placement: str, on_gpu: Container[str] = ()
) -> dict[str, list[HostAssignment]]:
    """Return role -> a place for each of its workers.

    ``wanted``: role -> (workers, what a host must have, the flag that requires it), in the order of choice. The first
    role packs where most of its workers fit, the others near it. ``on_gpu``: roles whose workers take a GPU each, in
    addition to what a host must have. The placement pack fills a host before the next one, nearest first; spread gives
    every host one worker before any gets another. Raises ValueError, with what there is, if they do not fit.
    """
    chosen: dict[str, list[HostAssignment]] = {}
    taken: dict[str, dict[str, float]] = {host.name: {} for host in hosts}
    for role, (count, trait, requirement) in wanted.items():
        gpu = role in on_gpu
        near = [p.host for places in chosen.values() for p in places]
        ordered = _nearest(hosts, near, {h.name: _room(h, trait, {}, gpu) for h in hosts})
        chosen[role] = []
        while len(chosen[role]) < count:
            next_place = _next(ordered, trait, taken, chosen[role] if placement == "spread" else [], gpu)
            if next_place is None:
                raise ValueError(_too_few(hosts, role, count, trait, requirement, gpu))
            chosen[role].append(next_place)
            for name, amount in next_place.resources.items():
                taken[next_place.host.name][name] = taken[next_place.host.name].get(name, 0.0) + amount
    return chosen


def resource_request(trait: str, *, gpu: bool, typed: bool) -> HostAssignment:
    """Return a worker's place on a host that does not exist yet: what it will take, and the labels that the host needs.
    ``typed``: the trait names a type of GPU.
    """
    label, sign, value = trait.partition("=")
    has = {"GPU": 1.0} if gpu or typed else {}
    if typed:
        has[_TYPE + trait.removeprefix(_TYPE)] = 1.0
    host = Host(name="", address="", resources=has, labels={label: value} if sign else {})
    return HostAssignment(host, _takes(host, trait, gpu))


def is_gpu_type(trait: str, types: Container[str]) -> bool:
    """Return whether ``trait`` names a type of GPU; ``types``: types that are known by their names alone."""
    return trait.startswith(_TYPE) or trait in types


def check_kv_memory(assignments: dict[str, list[HostAssignment]], kv_bytes: int) -> None:
    """Raise ValueError if KV memory is to be chosen automatically (0 bytes) on a host without a compute worker. Only
    compute workers measure memory, each for its own host.
    """
    measured = [p.host.address for p in assignments.get("compute", [])][:1]
    elsewhere = [p.host.address for p in assignments.get("memory", []) if measured and p.host.address not in measured]
    if elsewhere and not kv_bytes:
        raise ValueError(
            f"--kv-cache-memory-bytes auto is for one host: say what a worker takes on {elsewhere[0]}, such as 4GiB"
        )


def _next(
    ordered: Sequence[Host], trait: str, taken: dict[str, dict[str, float]], even: Sequence[HostAssignment], gpu: bool
) -> HostAssignment | None:
    fitting = [h for h in ordered if _room(h, trait, taken[h.name], gpu) > 0]
    if not fitting:
        return None
    host = min(fitting, key=lambda h: sum(p.host.name == h.name for p in even))  # the nearest of the emptiest
    return HostAssignment(host, _takes(host, trait, gpu))


def _nearest(hosts: Sequence[Host], near: Sequence[Host], room: dict[str, int]) -> list[Host]:
    """Sort hosts by distance to the chosen ones (same host, same rack, elsewhere), then by space in rack and host."""
    names, racks = {h.name for h in near}, {h.labels.get(RACK) for h in near} - {None}
    in_rack: dict[str, int] = {}
    for host in hosts:
        rack = host.labels.get(RACK, host.name)
        in_rack[rack] = in_rack.get(rack, 0) + room[host.name]

    def rank(host: Host) -> tuple[int, int, str, int, str]:
        rack = host.labels.get(RACK)
        distance = 0 if host.name in names else 1 if rack in racks else 2
        key = rack or host.name
        return distance, -in_rack[key], key, -room[host.name], host.name

    return sorted(hosts, key=rank)


def _takes(host: Host, trait: str, gpu: bool) -> dict[str, float]:
    """Return what a worker reserves: the resource, and with ``gpu`` also a GPU. For a type of GPU or a label it is a
    GPU, or a CPU if the host has no GPU and none is required.
    """
    kind = _TYPE + trait.removeprefix(_TYPE)
    if "=" not in trait and kind not in host.resources:
        return {trait: 1.0, "GPU": 1.0} if gpu else {trait: 1.0}
    device = "GPU" if gpu or host.resources.get("GPU") else "CPU"
    return {device: 1.0} if "=" in trait else {device: 1.0, kind: _TRACE}


def _room(host: Host, trait: str, taken: dict[str, float], gpu: bool) -> int:
    """Return how many more workers fit."""
    label, sign, value = trait.partition("=")
    if sign and host.labels.get(label) != value:
        return 0
    takes = _takes(host, trait, gpu)
    return min(int((host.resources.get(n, 0.0) - taken.get(n, 0.0) + 1e-9) / a) for n, a in takes.items())


def _too_few(hosts: Sequence[Host], role: str, count: int, trait: str, requirement: str, gpu: bool) -> str:
    room = sum(_room(h, trait, {}, gpu) for h in hosts)
    if gpu and room < sum(_room(h, trait, {}, False) for h in hosts):
        return (
            f"{count} {role} workers with a GPU each do not fit: the cluster has room for {room} on hosts with {trait} "
            f"({requirement}). Use --{'memory' if role == 'memory' else 'compute'}-device cpu, add GPUs, or name them "
            f"in the YAML (device)"
        )
    if room == 0:
        return (
            f"no host of the cluster has {trait} free, which {requirement} asks for {role} workers. Start Ray there "
            f"with --resources '{{\"{trait}\": 1}}', or name a resource, a type of GPU or LABEL=VALUE that hosts have"
        )
    return f"{count} {role} workers do not fit: the cluster has room for {room} on hosts with {trait} ({requirement})"
