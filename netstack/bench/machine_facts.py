"""Facts of a machine on which its times depend, from its kernel; they are part of a measurement's rows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.contract.fabric import Fabric
from lamina.netstack.kernel_files import text
from lamina.netstack.rdma.nearest_port import gpus
from lamina.netstack.rdma.traffic_class import PARTITION, SERVICE_LEVEL, TIMEOUT, TRAFFIC_CLASS

RDMA_KNOBS = RDMA_DEVICE, TRAFFIC_CLASS, SERVICE_LEVEL, PARTITION, TIMEOUT
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # of a PCI device


def side_of(fabric: Fabric, cores: Sequence[int]) -> dict[str, Any]:
    """Return the facts of one side of a measurement: its machine, and what its transport lacks there."""
    return machine(cores) | ({"without": [*fabric.remarks]} if fabric.remarks else {})


def machine(cores: Sequence[int] = (), *, root: Path = Path("/")) -> dict[str, Any]:
    """Return the facts of this host. These are kernel, CPU, and the governors and NUMA nodes of ``cores`` (none: the
    first of this process); the source and the least step of the clock, in nanoseconds. Each RDMA device and NVIDIA GPU
    has its node, the node's distance from the cores', its PCIe link and the bridges above it. A device also has its
    port, and the bridges that it shares with each GPU. The environment's RDMA variables come last. Unknown facts are
    left out.
    """
    sys = root / "sys"
    chosen = [*cores] or sorted(os.sched_getaffinity(0))[:1]
    cpus = [sys / f"devices/system/cpu/cpu{core}" for core in chosen]
    nodes = [node for cpu in cpus for node in sorted(cpu.glob("node*"))]
    there = [sys / "bus/pci/devices" / address for address in gpus(root)]
    graphics = [{"address": device.name} | _on_bus(device, nodes) for device in there]
    facts = {
        "kernel": os.uname().release,
        "cpu": _cpu(root / "proc/cpuinfo"),
        "governor": _one({text(cpu / "cpufreq/scaling_governor") for cpu in cpus}),
        "numa": _one({",".join(sorted(node.name for node in cpu.glob("node*"))) for cpu in cpus}),
        "clock": text(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_step_ns": clock_step(),
        "gpus": graphics,
        "rdma": [_rdma(device, nodes, graphics) for device in sorted((sys / "class/infiniband").glob("*"))],
        "rdma_knobs": {name: os.environ[name] for name in RDMA_KNOBS if os.environ.get(name)},
    }
    return {name: value for name, value in facts.items() if value not in ("", [], {})}


def clock_step() -> int:
    """Return the least difference of a thousand pairs of readings of the samples' clock, in nanoseconds."""
    steps = []
    for _ in range(1000):
        before = perf_counter_ns()
        after = perf_counter_ns()
        if after > before:
            steps.append(after - before)
    return min(steps, default=0)


def _rdma(device: Path, nodes: Sequence[Path], graphics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ports = sorted((device / "ports").glob("*"))
    facts = {
        "device": device.name,
        "state": _one({text(port / "state") for port in ports}),
        "rate": _one({text(port / "rate") for port in ports}),
        "link": _one({text(port / "link_layer") for port in ports}),
        "mtu": _one({text(net / "mtu") for net in (device / "device/net").glob("*")}),
    } | _on_bus(device / "device", nodes)
    own = facts.get("pcie_path", "").split("/")
    facts["shared_with_gpus"] = {gpu["address"]: _shared(own, gpu.get("pcie_path", "").split("/")) for gpu in graphics}
    return {name: value for name, value in facts.items() if value}


def _on_bus(device: Path, nodes: Sequence[Path]) -> dict[str, Any]:
    """Return a device's place on PCIe, and its distance from ``nodes``, those of the cores."""
    numa = text(device / "numa_node")
    away = {_distance(node, numa) for node in nodes}
    path = [part for part in device.resolve().parts if ADDRESS.fullmatch(part)]
    facts = {
        "numa": numa,
        "numa_distance": _one(away),
        "pcie": " x".join(t for t in (text(device / f"current_link_{k}") for k in ("speed", "width")) if t),
        "pcie_path": "/".join(path),
    }
    return {name: value for name, value in facts.items() if value}


def _distance(node: Path, other: str) -> str:
    """Return the distance of ``other``'s memory from ``node``, as the firmware reports it: 10 is near."""
    distances = text(node / "distance").split()
    return distances[int(other)] if other.isdigit() and int(other) < len(distances) else ""


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of bridges that two paths share from the root; 0: traffic between the devices
    passes the CPU.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] != "", zip(one, other, strict=False)))


def _cpu(cpuinfo: Path) -> str:
    lines = (line.split(":", 1) for line in text(cpuinfo).splitlines() if line.startswith("model name"))
    return next((value.strip() for _, value in lines), "")


def _one(texts: set[str]) -> str:
    return ", ".join(sorted(text for text in texts if text))
