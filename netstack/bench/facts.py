"""Facts of a machine on which its times depend, as its kernel tells them: they stand in the rows of a measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from lamina.netstack.contract.base import RDMA_DEVICE
from lamina.netstack.rdma.quality import PARTITION, SERVICE_LEVEL, TRAFFIC_CLASS

RDMA_KNOBS = RDMA_DEVICE, TRAFFIC_CLASS, SERVICE_LEVEL, PARTITION
SYS, PROC = Path("/sys"), Path("/proc")


def machine(cores: Sequence[int] = (), *, sys: Path = SYS, proc: Path = PROC) -> dict[str, Any]:
    """Of this host: kernel, CPU, and of ``cores`` (none: the first of this process) the governors and NUMA nodes; the
    source and the least step of the clock, in nanoseconds; each RDMA device with its node, state, rate and PCIe link;
    what the environment says of RDMA. What is not told is left out.
    """
    chosen = [*cores] or sorted(os.sched_getaffinity(0))[:1]
    cpus = [sys / f"devices/system/cpu/cpu{core}" for core in chosen]
    facts = {
        "kernel": os.uname().release,
        "cpu": _cpu(proc / "cpuinfo"),
        "governor": _one({_text(cpu / "cpufreq/scaling_governor") for cpu in cpus}),
        "numa": _one({",".join(sorted(node.name for node in cpu.glob("node*"))) for cpu in cpus}),
        "clock": _text(sys / "devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_step_ns": clock_step(),
        "rdma": [_rdma(device) for device in sorted((sys / "class/infiniband").glob("*"))],
        "rdma_knobs": {name: os.environ[name] for name in RDMA_KNOBS if os.environ.get(name)},
    }
    return {name: value for name, value in facts.items() if value not in ("", [], {})}


def clock_step() -> int:
    """The least difference of two readings of the clock of the samples, in nanoseconds, of a thousand."""
    steps = []
    for _ in range(1000):
        before = perf_counter_ns()
        after = perf_counter_ns()
        if after > before:
            steps.append(after - before)
    return min(steps, default=0)


def _rdma(device: Path) -> dict[str, str]:
    ports = sorted((device / "ports").glob("*"))
    facts = {
        "device": device.name,
        "numa": _text(device / "device/numa_node"),
        "state": _one({_text(port / "state") for port in ports}),
        "rate": _one({_text(port / "rate") for port in ports}),
        "link": _one({_text(port / "link_layer") for port in ports}),
        "pcie": " x".join(t for t in (_text(device / f"device/current_link_{k}") for k in ("speed", "width")) if t),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu(cpuinfo: Path) -> str:
    lines = (line.split(":", 1) for line in _text(cpuinfo).splitlines() if line.startswith("model name"))
    return next((value.strip() for _, value in lines), "")


def _one(texts: set[str]) -> str:
    return ", ".join(sorted(text for text in texts if text))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
