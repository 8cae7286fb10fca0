"""What a process has resident; as a program, what a memory worker has before it holds anything."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Resident(NamedTuple):
    """Bytes in memory. private: the process's own; files: pages of files that it has mapped, most of them libraries';
    shared: memory that it shares with others, such as slots.
    """

    private: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        return sum(self)


def resident(pid: int | str = "self") -> Resident:
    """RssAnon, RssFile and RssShmem of /proc/PID/status (proc_pid_status(5)). Raises OSError if it is gone."""
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return Resident(*(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")))


def main(backend: str, scheme: str) -> None:
    """Import and open what a memory worker does, and print what is resident then."""
    import torch

    from lamina import attention, netstack
    from lamina.env import cluster_key

    from . import main as memory_main
    from . import worker as memory

    fabric = netstack.open(scheme, key=cluster_key())
    worker = memory.MemoryWorker()
    attention.get(backend, torch.device("cpu"), torch.float32)
    sys.stdout.write(" ".join(map(str, resident())))
    del worker, memory_main
    fabric.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
