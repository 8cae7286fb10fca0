"""The resident memory of a process; run as a worker, the resident memory of a memory worker before it has a store."""

from __future__ import annotations

import json
import socket
from typing import NamedTuple


class ResidentMemory(NamedTuple):
    """The resident bytes. private: the process's own. files: pages of mapped files, mostly libraries. shared: memory
    shared with other processes, such as slots.
    """

    private: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        return sum(self)


def resident(pid: int | str = "self") -> ResidentMemory:
    """Return RssAnon, RssFile and RssShmem of /proc/PID/status (proc_pid_status(5)). Raises OSError if the process
    ended.
    """
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return ResidentMemory(*(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")))


def own_memory(total: ResidentMemory) -> ResidentMemory:
    """Return this process's memory, with pages shared with its parent counted as files. These are pages of the parent's
    imports, which all of its children have in common.
    """
    with open("/proc/self/smaps_rollup") as f:
        common = next(int(line.split()[1]) << 10 for line in f if line.startswith("Shared_Dirty:"))
    common = min(common, total.private)
    return total._replace(private=total.private - common, files=total.files + common)


def serve_footprint(sock: socket.socket) -> None:
    """Import and open all that a memory worker does, and send the resident bytes. Receives one line of JSON: [backend,
    scheme, RDMA device]. Sends one: {resident: [private, files, shared]} or {error}.
    """
    with sock, sock.makefile("rw") as lines:
        try:
            answer: dict[str, object] = {"resident": _open_all(*json.loads(lines.readline()))}
        except (ValueError, OSError, ImportError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        lines.write(json.dumps(answer) + "\n")


def _open_all(backend: str, scheme: str, device: str) -> ResidentMemory:
    import torch

    from lamina import netstack
    from lamina.env import cluster_key
    from lamina.ops import attention

    from . import main as memory_main
    from . import memory_worker as memory

    fabric = netstack.open(scheme, key=cluster_key(), device=device)
    worker = memory.MemoryWorker()
    attention.get(backend, torch.device("cpu"), torch.float32)
    footprint = own_memory(resident())
    del worker, memory_main
    fabric.close()
    return footprint
