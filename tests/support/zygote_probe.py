"""A worker that reports what its environment and its starter made of its process, then ends as it is asked."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

SIGNALS = ("SigBlk", "SigIgn", "SigCgt")


def serve_probe(sock: socket.socket) -> None:
    """A line of JSON, then an order: a status to exit with, raise, abort, return, or ``start`` and one more order."""
    told = facts(sock.fileno())  # before anything is sent: descriptors are counted
    sock.sendall(json.dumps(told).encode() + b"\n")
    order = sock.recv(64).decode()
    if order == "start":
        sock.sendall(json.dumps(brother()).encode() + b"\n")
        order = sock.recv(64).decode()
    if order == "raise":
        raise RuntimeError("as told")
    if order == "return":
        return leave_last_words(sock)
    if order == "abort":
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    if status := int(order or 0):
        sys.exit(status)
    return None  # as a worker that is done: taking modules apart takes 0.4 s


class LastWord:
    """Says a word when it is taken apart."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __del__(self) -> None:
        self._sock.sendall(b"torn down;")


def leave_last_words(sock: socket.socket) -> None:
    """Leaves messages of all that may still write when the worker has returned."""

    def after_main() -> None:
        threading.main_thread().join()
        sock.sendall(b"thread;")

    globals()["last_word"] = LastWord(sock)
    weakref.finalize(sock, sock.sendall, b"finalizer;")
    atexit.register(sock.sendall, b"exit function;")
    threading.Thread(target=after_main).start()
    sys.stdout.write("an open line")


def facts(control: int) -> dict[str, Any]:
    """All that a fresh process has too, but for its number and where its memory is."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found: dict[str, Any] = {
        "own": [random.random(), os.getpid()],
        "files": sorted(kind(fd, control) for fd in os.listdir("/proc/self/fd")),
        "signals": {name: status[name].strip() for name in SIGNALS},
        "umask": status["Umask"].strip(),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")],
        "group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "directory": os.getcwd(),
        "path": sys.path,
        "environment": dict(os.environ),
        "variable": from_c("PROBED"),
        "arguments": [a for a in sys.argv if a != str(control)],
        "shown": Path("/proc/self/cmdline").read_bytes().decode().strip("\0").split("\0")[1:],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    found["shown"] = [a for a in found["shown"] if a != str(control)]
    found["threads"] = thread_facts()
    import numpy
    import torch

    found["own"] += [numpy.random.random(), torch.initial_seed()]
    return found


def brother() -> dict[str, Any]:
    """Asks a worker that this one has started, and whose parent it is."""
    from lamina.executor.launchers import local

    local.ROLES["probe"] = ("zygote_probe", "serve_probe")
    process, ours = local.start("probe", 0, ())
    told = json.loads(ours.makefile().readline())
    parent = int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    ours.sendall(b"5")
    process.has_ended(60.0)
    return {"kind": type(process).__name__, "parent": parent, "status": process.exit_status, "files": told["files"]}


def from_c(name: str) -> str | None:
    """A variable as the C library sees it."""
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    value = get(name.encode())
    return value.decode() if value is not None else None


def kind(fd: str, control: int) -> str:
    """Returns what a descriptor is, in a way that two processes can be compared by."""
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # of the listing itself
        return ""
    which = f"{fd} " if int(fd) < 3 else "control " if int(fd) == control else ""
    return which + (name.split("[")[0] if int(fd) > 2 else name)


def thread_facts() -> dict[str, Any]:
    """Returns facts of OpenMP's, MKL's and torch's pools, on this thread and on another one, and all that they then
    have made.
    """
    import torch

    found = {}

    def look(name: str) -> None:
        said = [line.strip() for line in torch.__config__.parallel_info().splitlines()]
        found[name] = [line for line in said if "threads" in line.lower() and "NUM" not in line]
        left, right = torch.ones(512, 512), torch.ones(512, 512)
        found[f"{name}, sum"] = float((left @ right + torch.ones(2048, 512).sum()).sum())
        torch.ones(1 << 21).add_(1)

        tasks = os.listdir("/proc/self/task")
        found[f"{name}, made"] = len(tasks)
        found[f"{name}, where"] = sorted({tuple(sorted(os.sched_getaffinity(int(task)))) for task in tasks})

    look("main")
    other = threading.Thread(target=look, args=("other",))
    other.start()
    other.join()
    return found
