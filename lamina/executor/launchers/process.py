"""A worker's process, and how it ended, in words."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from typing import Protocol

from .worker_stderr import INHERITED, Stderr


class Process(Protocol):
    """The process of a worker, whichever process is its parent."""

    pid: int

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether it has ended, after waiting ``timeout_s`` at most."""
        ...

    @property
    def exit_status(self) -> int | None:
        """The exit status, or minus the signal, once it has ended; None: unknown."""
        ...

    def kill(self) -> None: ...


class SpawnedProcess:
    """A process that imports its modules by itself, in contrast to a forked one. Safe from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: Stderr = INHERITED) -> None:
        self.pid = process.pid
        self.kill = process.kill
        self._process, self._stderr = process, stderr

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s) if timeout_s else self._process.poll()
        if self._process.returncode is None:
            return False
        self._stderr.end(self._process.returncode)
        return True

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def wait(self) -> int:
        """Wait for its end, and return the exit status."""
        status = self._process.wait()
        self._stderr.end(status)
        return status


def exit_status_text(status: int | None) -> str:
    """Return how a process with this exit status ended, in words; None: unknown."""
    if status is None:
        return "ended, in an unknown way, since its zygote had ended or was stopped"
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
