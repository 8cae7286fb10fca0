"""The processes of guests, and the compute budget of a host for them, in addition to its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from lamina.env import LEASE_BYTES, LEASE_METER
from lamina.executor.launchers.local import spawn_supervised
from lamina.executor.launchers.process import SpawnedProcess
from lamina.netstack.contract.cluster_key import KEY, KEY_FILE
from lamina.utils.proc import stat_fields
from lamina.workers.memory.lease_limits import READ_COUNTER

UNKEYED = {KEY: "", KEY_FILE: ""}


class GuestProcess(NamedTuple):
    """A lease's memory worker. ``life_line``: a descriptor that ends with this process. ``meter``: a file in memory
    (LAMINA_LEASE_METER), in which the worker records how many bytes of K and V its attention has read.
    """

    process: SpawnedProcess
    life_line: int
    meter: int

    @property
    def read_bytes(self) -> float:
        """The bytes read since its start; 0 if it has recorded none yet."""
        data = os.pread(self.meter, READ_COUNTER.size, 0)
        return float(READ_COUNTER.unpack(data)[0]) if len(data) == READ_COUNTER.size else 0.0

    def close(self) -> None:
        """Close the descriptors, once the process has ended."""
        os.close(self.life_line)
        os.close(self.meter)


def start_guest(sock: Any, keys: bytes, threads: int, nbytes: int) -> GuestProcess:
    """Start a guest with its control link to a debtor, and ``nbytes`` of KV memory at most. Raises OSError."""
    meter = os.memfd_create("lamina-lease")
    try:
        env = {**UNKEYED, LEASE_BYTES: str(nbytes), LEASE_METER: str(meter)}
        return GuestProcess(*spawn_supervised("memory", sock, keys, threads, [meter], **env), meter)
    except OSError:
        os.close(meter)
        raise


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process since its start; 0 if it has ended."""
    return sum(map(int, stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


class _Taken(NamedTuple):
    """The use by one guest since its start: CPU seconds, and bytes of K and V."""

    used_s: float = 0.0
    read: float = 0.0


class GuestBudget:
    """The limits on all guests together for new loans: cores, and gigabits of K and V read in a second."""

    def __init__(self, most_cores: float, most_gbps: float, now: float) -> None:
        self._most_cores, self._most_gbps = most_cores, most_gbps
        self._cores = self._gbps = 0.0
        self._measured_at, self._taken = now, dict[int, _Taken]()  # by process

    def measure(self, guests: Sequence[GuestProcess], now: float) -> None:
        """Measure the use since the last call. A guest that has ended meanwhile does not reduce the others' use."""
        taken = {g.process.pid: _Taken(cpu_seconds(g.process.pid), g.read_bytes) for g in guests}
        before, seconds = {pid: self._taken.get(pid, _Taken()) for pid in taken}, max(1e-3, now - self._measured_at)
        self._cores = sum(max(0.0, x.used_s - before[pid].used_s) for pid, x in taken.items()) / seconds
        self._gbps = sum(max(0.0, x.read - before[pid].read) for pid, x in taken.items()) * 8e-9 / seconds
        self._taken, self._measured_at = taken, now

    def exceeded(self) -> str:
        """Return the limit that is exceeded, in words; "" = none."""
        if self._cores > self._most_cores:
            return f"guests use {self._cores:.1f} of {self._most_cores:g} cores"
        if self._gbps > self._most_gbps:
            return f"guests read {self._gbps:.1f} of {self._most_gbps:g} Gb/s"
        return ""
