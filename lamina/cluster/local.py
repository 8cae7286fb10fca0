"""Starts workers on this machine, as processes or, for a transport that stays in one process, as threads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

# role -> (module, its function that serves one control socket)
ROLES = {
    "memory": ("lamina.workers.memory", "serve_memory"),
    "compute": ("lamina.workers.compute_main", "serve_compute"),
    "prefill": ("lamina.workers.prefill_main", "serve_prefill"),
    "engine": ("lamina.server.engine_process", "serve_engine"),
}


class WorkerHandle(Protocol):
    """A started worker, as the driver sees it."""

    role: str
    index: int
    pid: int
    sock: socket.socket  # the driver's end of the control link

    def fate(self) -> str | None:
        """How it ended, in words; None while it runs."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for its end; past the timeout end it by force. The control link has been closed before."""
        ...


class ProcessWorker:
    """A worker that is its own process: ``python -m lamina.workers``."""

    def __init__(self, role: str, index: int, threads: int = 0) -> None:
        """``threads`` of OpenMP; 0 = what the environment says, else all cores."""
        self.role, self.index = role, index
        self.sock, theirs = socket.socketpair()
        module, function = ROLES[role]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lamina.workers", f"{module}:{function}", "--control-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(threads),
                process_group=0,  # Ctrl-C is the driver's to handle, also while the worker still imports
            )
        self.pid = self._process.pid

    def fate(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"

    def join(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ThreadWorker:
    """A worker on a thread of the driver's process; ``extra`` goes to its serve function behind the socket."""

    def __init__(self, role: str, index: int, *extra: Any) -> None:
        self.role, self.index, self.pid = role, index, os.getpid()
        self.sock, theirs = socket.socketpair()
        module, function = ROLES[role]
        serve: Callable[..., None] = getattr(import_module(module), function)
        self._thread = threading.Thread(target=serve, args=(theirs, *extra), name=f"lamina-{role}-{index}", daemon=True)
        self._thread.start()

    def fate(self) -> str | None:
        return None if self._thread.is_alive() else "ended"

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _environment(threads: int) -> dict[str, str]:
    # The package need not be installed: workers find it where this process did.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Both pools may share these cores: OpenMP threads that spin at the end of a loop take them from the other pool, and
    # on a busy machine from the very thread that they wait for (measured: 10 times slower steps).
    defaults = {"OMP_WAIT_POLICY": "passive"}
    # Told at start, OpenMP makes no more threads than asked for; told later, it wakes them for the smallest loop.
    wanted = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**defaults, **os.environ, **wanted, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
