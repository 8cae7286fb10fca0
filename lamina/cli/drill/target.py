"""The server that is drilled: its processes, its log, and who of them is hit."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lamina.processes import lives

from .cut import cut

MODULES = {
    "compute": "lamina.compute.main",
    "memory": "lamina.memory.main",
    "prefill": "lamina.compute.prefill_main",
    "engine": "lamina.server.link.engine_process",
}
NOTICED = "all requests go on"  # words of the log
START_S, END_S = 600.0, 60.0
LOOK_S = 0.05


class Victim(NamedTuple):
    """A process of the server."""

    role: str
    pid: int

    @property
    def name(self) -> str:
        return f"{self.role}{'' if self.role == 'engine' else ' worker'} (pid {self.pid})"


class Target:
    """A server in processes of its own. What it logs goes on to stderr."""

    def __init__(self, model: str, flags: list[str]) -> None:
        """Raises OSError where it does not start."""
        self.struck_at = 0.0
        self._log: list[tuple[float, str]] = []
        command = [
            sys.executable,
            "-m",
            "lamina.cli.launch",
            "serve",
            model,
            "--port",
            "0",
            "--no-log-requests",
            *flags,
        ]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read_log, name="lamina-log", daemon=True).start()
        try:
            self.url = self._await_url()
        except BaseException:
            self.end()
            raise

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [self._server.pid, *self._descendants()]

    def victim(self, role: str, rng: random.Random) -> Victim:
        """A process of ``role``; "" = any worker. Raises ValueError where there is none."""
        found = [v for v in self._processes() if v.role == role or (not role and v.role != "engine")]
        if not found:
            raise ValueError(f"--faults: the server has no {role} worker: its flags say how many")
        return rng.choice(found)

    def strike(self, victim: Victim, how: str) -> None:
        """Send it the signal of that name; CUT: end a connection of it to a memory worker, or of another of its role
        where it has none, as a spare. Raises OSError.
        """
        if how == "CUT":
            found = self._processes()
            ends = [victim.pid, *(v.pid for v in found if v.role == victim.role)]
            if not any(cut(end, v.pid) for end in ends for v in found if v.role == "memory"):
                raise OSError(f"no {victim.role} worker has a TCP connection to a memory worker")
        else:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.Signals[how])
        self.struck_at = time.perf_counter()

    def noticed_s(self) -> float | None:
        """From the last strike until the log said so."""
        times = (at for at, line in list(self._log) if at >= self.struck_at and NOTICED in line)
        return next((at - self.struck_at for at in times), None)

    def is_well(self, timeout_s: float) -> bool:
        """Whether its /health says so, within so many seconds."""
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline and self._server.poll() is None:
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self.url + "/health", timeout=5.0):
                return True
            time.sleep(LOOK_S)
        return False

    def end(self) -> int:
        """End it. How many of its processes are left."""
        pids = self._descendants()
        self._server.terminate()
        try:
            self._server.wait(END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        deadline = time.perf_counter() + END_S
        while (left := [pid for pid in pids if lives(pid)]) and time.perf_counter() < deadline:
            time.sleep(LOOK_S)
        return len(left)

    def _await_url(self) -> str:
        out = self._server.stdout
        assert out is not None
        readable, _, _ = select.select([out], [], [], START_S)
        line = out.readline() if readable else ""
        if " on http" not in line:
            raise OSError("the server did not start: its log says why")
        return line.rsplit(" on ", 1)[1].strip()

    def _read_log(self) -> None:
        log = self._server.stderr
        assert log is not None
        for line in log:
            self._log.append((time.perf_counter(), line))
            sys.stderr.write(line)

    def _processes(self) -> list[Victim]:
        found = []
        for pid in self._descendants():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                found += [Victim(role, pid) for role, module in MODULES.items() if f"{module}:" in command]
        return found

    def _descendants(self) -> list[int]:
        found, parents = list[int](), [self._server.pid]
        while parents:
            parent = parents.pop()
            with suppress(OSError):
                children = [int(c) for c in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
                found += children
                parents += children
        return found
