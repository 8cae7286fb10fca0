"""The RDMA port next to a GPU, or to the cores of this process, by the tree of PCI devices in /sys. Changes nothing.

A message between a GPU and a NIC below one switch never passes the CPU; between two sockets it shares their link with
all other traffic. With several such NICs the GPUs next to them take turns, so that each host's links are used (rails).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lamina.netstack.kernel_files import text

from .rdma_ports import CLASS, Port

PCI = "sys/bus/pci/devices"
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")  # vendor; classes of a GPU with a screen and without
Distance = tuple[int, int]  # 0: one root of PCI, 1: one NUMA node, 2: else or unknown; links of PCI in between


def nearest_first(there: Sequence[Port], gpu: str = "", root: Path = Path("/")) -> list[Port]:
    """Return all of ``there``, the nearest first. Ports at equal distance keep their order, but are rotated by the
    index of ``gpu`` among the GPUs with the same nearest devices. ``gpu``: its PCI address, as "0000:81:00.0"; "": this
    process's cores.
    """
    if not gpu:
        nodes = _nodes_of_cores(root)
        return sorted(there, key=lambda port: _numa(_device(port, root)) not in nodes | {-1})
    ordered = sorted(there, key=lambda port: _distance(_place(gpu, root), _device(port, root)))
    nearest = _nearest(gpu, there, root)
    rivals = [other for other in gpus(root) if _nearest(other, there, root) == nearest]
    turn = rivals.index(gpu) % len(nearest) if gpu in rivals else 0
    return nearest[turn:] + nearest[:turn] + ordered[len(nearest) :]


def _nearest(gpu: str, there: Sequence[Port], root: Path) -> list[Port]:
    distances = [_distance(_place(gpu, root), _device(port, root)) for port in there]
    return [port for port, distance in zip(there, distances, strict=True) if distance == min(distances)]


def _distance(one: Path, other: Path) -> Distance:
    common = Path(os.path.commonpath([one, other])).parts
    if any(part.startswith("pci") for part in common):
        return 0, len(one.parts) + len(other.parts) - 2 * len(common)
    return (1 if _numa(one) == _numa(other) != -1 else 2), 0


def _place(gpu: str, root: Path) -> Path:
    return (root / PCI / gpu).resolve()


def _device(port: Port, root: Path) -> Path:
    return (root / CLASS / port.device / "device").resolve()


def _numa(device: Path) -> int:
    """Return a device's NUMA node. -1: the kernel knows none, as on a host with one node, or for a device
    in software.
    """
    try:
        return int(text(device / "numa_node"))
    except ValueError:
        return -1


def cores_of(device: str, root: Path = Path("/")) -> list[int]:
    """Return the cores of this process that are next to the RDMA ``device``; none if the kernel knows none."""
    cores = text(root / CLASS / device / "device/local_cpulist")
    try:
        ranges = [[int(n) for n in part.split("-")] for part in cores.split(",")]
    except ValueError:
        return []
    near = {core for ends in ranges for core in range(ends[0], ends[-1] + 1)}
    return sorted(near & os.sched_getaffinity(0))


def _nodes_of_cores(root: Path) -> set[int]:
    folders = (root / f"sys/devices/system/cpu/cpu{core}" for core in os.sched_getaffinity(0))
    return {int(node.name[4:]) for folder in folders for node in folder.glob("node[0-9]*")}


def gpus(root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of the GPUs of this host, sorted."""
    return sorted(device.name for device in (root / PCI).glob("*") if _is_gpu(device))


def _is_gpu(device: Path) -> bool:
    return text(device / "vendor") == NVIDIA and text(device / "class").startswith(DISPLAYS)
