"""The check that this host has memory for the requested KV blocks. No torch, since processes that only start workers
use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.config.option import size_flag

if TYPE_CHECKING:
    from lamina.config.engine_config import EngineConfig


def free_bytes() -> int:
    """Return the memory that this host could give to processes now."""
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":") for line in f)
    return int(fields["MemAvailable"].split()[0]) << 10


def memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this host, or the part of it that this process's control group may have."""
    with open(proc / "meminfo") as f:
        fields = dict(line.split(":") for line in f)
    total = int(fields["MemTotal"].split()[0]) << 10
    return min([total, *_group_limits(proc, cgroups)])


def _group_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limits of this process's control groups and of their parents, in both versions of the file system."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        place = Path(group.lstrip("/"))
        for folder in (place, *place.parents):
            try:
                yield int((mount / folder / name).read_text())
            except (OSError, ValueError):  # no such file here, or "max"
                continue


def check_kv_memory_fits(config: EngineConfig, free: int) -> None:
    """Raise ValueError if --kv-cache-memory-bytes on all memory workers, spares included, exceeds ``free`` bytes."""
    spares = config.launch.spare_memory
    workers = config.topology.num_workers["memory"] + spares
    if (asked := config.devices.kv_bytes() * workers) > free:
        on = f" on {workers} memory workers" if workers > 1 else ""
        on += f", {spares} of them spare" if spares else ""
        raise ValueError(
            f"--kv-cache-memory-bytes {config.devices.kv_memory}{on}: {not_enough_memory_message(asked, free, workers)}"
        )


def not_enough_memory_message(asked: int, free: int, workers: int = 1, where: str = "here") -> str:
    """Return the error text for KV blocks of ``asked`` bytes on ``workers`` workers together."""
    from .report import size_text

    below = size_flag(free // workers)
    are_free = f"{size_text(free)} are free {where}"
    return f"KV blocks take {size_text(asked)}, {are_free}: lower --kv-cache-memory-bytes below {below}"
