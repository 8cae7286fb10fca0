"""The server of a drill: its processes, its log, and the choice of a victim."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from lamina.config.flag_groups import flag_words
from lamina.netstack.own_python import own_python
from lamina.observe.failpoints import FAILPOINT, Failpoint
from lamina.observe.trace import FLIP_BIT
from lamina.utils.proc import descendants_of, is_alive

from .cut_connection import cut
from .fault_points import ANY, FaultPoint

MODULES = {
    "compute": "lamina.workers.compute.main",
    "memory": "lamina.workers.memory.main",
    "prefill": "lamina.workers.prefill.main",
    "engine": "lamina.server.engine_client.engine_process",
}
NOTICED = "all requests go on"  # words of the log
BESIDE = "--kv-offload", "--kv-offloading-size"  # flags with which KV is offloaded
SPARE = "spare"  # the role of spare workers
SCALE = "SCALE"  # no process is hit: the server gets other memory workers
_MET = re.compile(r"epoch \d+: .* is pid \d+")  # a line of the log, after workers have connected
_REBUILT = re.compile(r"all sequences continue .* (\d+) tokens are recomputed")
_WAITED = re.compile(r"while it is waited for, (\d+\.\d+) s at most")  # of a victim that was stopped
_PLACE = re.compile(r"([a-z]+-\d+) is pid (\d+)")
START_S, END_S = 600.0, 60.0
LOOK_S = 0.05
FIND_S = 60.0  # longer than a recovery
JOURNAL_SIZE = "8MiB"  # all streams of a fault fit in it
TRIP_S = 3.0  # for a message of the kind to come
TRIP_LOOK_S = 0.002
FLIP_S = 30.0  # for a step to attend KV


ANY_TIME = FaultPoint(ANY)
FLIPPED = FaultPoint(ANY, FLIP_BIT)


class Victim(NamedTuple):
    """A process of the server. ``place``: such as memory-1, engine or spare."""

    role: str
    pid: int
    place: str

    @property
    def name(self) -> str:
        return f"{self.place} (pid {self.pid})"


def places_of(log: Sequence[str]) -> dict[int, str]:
    """Return process id -> place of the workers that connected last."""
    met = (line for line in reversed(log) if _MET.search(line))
    return {int(pid): place for place, pid in _PLACE.findall(next(met, ""))}


class Target:
    """A server in processes of its own, which end with this one. Its log is copied to stderr."""

    def __init__(
        self, model: str, flags: list[str], *, journal: bool = False, environment: Mapping[str, str] = os.environ
    ) -> None:
        """``journal``: whether it keeps one, at the attribute ``journal``. Raises OSError if it does not start."""
        self.injected_at = 0.0
        self._key, self._few = secrets.token_hex(), 0  # for scaling, and the fewest memory workers
        self.has_prefill, self.has_pages = False, any(f.partition("=")[0] in BESIDE for f in flags)
        self.log: list[tuple[float, str]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="lamina-drill-"))
        self._tripwire = Failpoint(self._folder / "tripwire")
        self.journal = self._folder / "journal"
        held, self._life_line = os.pipe()
        words = ["serve", model, "--port", "0", "--no-enable-log-requests"]
        words += flag_words({"journal": self.journal, "journal_size": JOURNAL_SIZE}) if journal else []
        own = {FAILPOINT: str(self._folder / "tripwire"), "LAMINA_ADMIN_KEY": self._key}
        command, environ = own_python(
            "-m",
            "lamina.cli.parent_watchdog",
            str(held),
            str(self._folder),
            *words,
            *flags,
            environ={**environment, **own},
        )
        self._server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, pass_fds=[held]
        )
        os.close(held)
        threading.Thread(target=self._read_log, name="lamina-log", daemon=True).start()
        try:
            self.url = self._await_url()
            self.has_prefill = any(v.role == "prefill" for v in self._processes())
        except BaseException:
            self.stop()
            raise

    @property
    def operator_headers(self) -> dict[str, str]:
        """The headers of a request by its operator."""
        return {"Authorization": f"Bearer {self._key}"}

    def pids(self) -> list[int]:
        """Return the ids of all its processes."""
        return [self._server.pid, *descendants_of(self._server.pid)]

    def victim(self, role: str, rng: random.Random) -> Victim:
        """Return a process of ``role``; "" = any worker that has a place. Raises ValueError if there is none for
        FIND_S: Linux may omit a child while another one ends.
        """
        deadline = time.perf_counter() + FIND_S
        while time.perf_counter() < deadline:
            victims = [v for v in self._processes() if v.role == role or (not role and v.role not in ("engine", SPARE))]
            if victims:
                return rng.choice(victims)
            time.sleep(LOOK_S)
        raise ValueError(f"--faults: the server has no {role} worker: its flags say how many")

    def inject(self, victim: Victim, how: str, moment: FaultPoint = ANY_TIME) -> str:
        """Send the victim the signal ``how``, or do an action. CUT ends its connection to a memory worker. SCALE
        changes the server to twice as many memory workers, or to as many as at first. FLIP changes a bit of KV that it
        is about to attend. At a moment with an event the victim ends itself, or by the signal if the event has not come
        for TRIP_S. Returns the kind. Raises OSError.
        """
        if how == SCALE:
            self._scale()
            return ANY
        if how == "FLIP":
            if not self._trips(victim, FLIPPED, FLIP_S):
                raise OSError(f"{victim.name} attended no stored KV for {FLIP_S:g} s")
            return ANY
        if how == "CUT":
            if not any(cut(victim.pid, v.pid) for v in self._processes() if v.role == "memory"):
                raise OSError(f"{victim.name} has no TCP connection to a memory worker")
        elif self._trips(victim, moment):
            return moment.kind
        else:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.Signals[how])
        self.injected_at = time.perf_counter()
        return ANY

    def _scale(self) -> None:
        """Scale the server. Raises OSError if it refuses."""
        there = sum(v.role == "memory" for v in self._processes())
        self._few = self._few or there
        body = json.dumps({"memory_workers": 2 * there if there == self._few else self._few}).encode()
        headers = {"Content-Type": "application/json", **self.operator_headers}
        self.injected_at = time.perf_counter()
        asked = urllib.request.Request(self.url + "/scale", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=START_S):
                pass
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"the server does not scale: {error.read().decode(errors='replace')}") from None

    def _trips(self, victim: Victim, moment: FaultPoint, limit_s: float = TRIP_S) -> bool:
        if moment.event is None:
            return False
        deadline = time.perf_counter() + limit_s
        self._tripwire.arm(victim.pid, moment.event, moment.times)
        while not self._tripwire.has_fired and (now := time.perf_counter()) < deadline:
            self.injected_at = now  # or later: the log may report it before the next check
            time.sleep(TRIP_LOOK_S)
        return self._tripwire.disarm()

    def noticed_s(self, since: float, until: float = inf) -> float | None:
        """Return the seconds from the fault at ``since`` until the log reported it; None if not before ``until``."""
        return next((at - since for at, _ in self._noticed(since, until)), None)

    def idle_s(self, since: float, until: float = inf) -> float:
        """Return how long no process waited for the victim that was stopped at ``since``, by the log. 0 if one waited
        all the time, or nothing was noticed.
        """
        each = [(at - since, m) for at, line in self._noticed(since, until) if (m := _WAITED.search(line))]
        return max(0.0, each[0][0] - float(each[0][1][1])) if each else 0.0

    def _noticed(self, since: float, until: float) -> list[tuple[float, str]]:
        return [(at, line) for at, line in list(self.log) if since <= at < until and NOTICED in line]

    def is_noticed(self, timeout_s: float) -> bool:
        """Return True if the log reports the last fault within so many seconds."""
        deadline = time.perf_counter() + timeout_s
        while (there := self.noticed_s(self.injected_at)) is None and time.perf_counter() < deadline:
            time.sleep(LOOK_S)
        return there is not None

    def rebuilt(self, since: float, until: float) -> int | None:
        """Return the tokens whose KV was computed again meanwhile, by the log; None if it does not show that: that
        engine is gone.
        """
        each = [m for at, line in list(self.log) if since <= at < until and (m := _REBUILT.search(line))]
        return sum(int(m[1]) for m in each) if each else None

    def is_healthy(self, timeout_s: float) -> bool:
        """Return True if its /health reports ok within so many seconds."""
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline and self._server.poll() is None:
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self.url + "/health", timeout=5.0):
                return True
            time.sleep(LOOK_S)
        return False

    def stop(self) -> int:
        """End the server. Returns how many of its processes are left."""
        pids = descendants_of(self._server.pid)
        self._server.terminate()
        try:
            self._server.wait(END_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        deadline = time.perf_counter() + END_S
        while (left := [pid for pid in pids if is_alive(pid)]) and time.perf_counter() < deadline:
            time.sleep(LOOK_S)
        os.close(self._life_line)
        shutil.rmtree(self._folder, ignore_errors=True)
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
            self.log.append((time.perf_counter(), line))
            sys.stderr.write(line)

    def _processes(self) -> list[Victim]:
        places, victims = places_of([line for _, line in list(self.log)]), []
        for pid in descendants_of(self._server.pid):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                for role in (role for role, module in MODULES.items() if f"{module}:" in command):
                    place = role if role == "engine" else places.get(pid, SPARE)
                    victims.append(Victim(SPARE if place == SPARE else role, pid, place))
        return victims
