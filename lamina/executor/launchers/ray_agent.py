"""The node agent of the launcher ``ray``: it watches one worker on its host, for a driver elsewhere. Its methods take
and return strings of JSON.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from lamina import __version__
from lamina.netstack import ChannelError
from lamina.netstack.contract.cluster_key import KEY, KEY_FILE
from lamina.observe.log_lines import log_json
from lamina.utils.proc import StopProbe

from .local import spawn_supervised
from .process import SpawnedProcess, exit_status_text
from .remote_links import ControlListener

ARRIVAL_S = 60.0  # for the driver to connect, after which the agent stops waiting
LOOK_S = 0.1  # between looks whether the worker is stopped


class NodeAgent:
    """Starts the worker once its driver has connected. The worker ends with this agent and with the driver.

    ``listen`` and ``kill`` return at once; all other methods wait, each on a thread of its own.
    """

    def __init__(self) -> None:
        self._order: dict[str, Any] = {}
        self._process: SpawnedProcess | None = None
        self._life_line = -1
        self._started, self._ended = threading.Event(), threading.Event()
        self._fate = ""
        self._stop_probe = StopProbe()

    def listen(self, order: str) -> str:
        """Listen for the driver. Returns {port, version, auth}; ``auth``: how Ray authenticates its own peers here.

        ``order``: {role, threads, key, host, name, driver, log_json}. The key is hexadecimal, host is the interface
        that the driver reaches, and name and driver name the two ends of the control link.
        """
        self._order = json.loads(order)
        if self._order.get("log_json"):
            log_json("node agent")
        at, key = self._order, bytes.fromhex(self._order["key"])
        listener = ControlListener(at["host"], key, at["name"], at["driver"])
        threading.Thread(target=self._serve, args=(listener,), name="lamina-warden", daemon=True).start()
        return json.dumps({"port": listener.port, "version": __version__, "auth": os.environ.get("RAY_AUTH_MODE", "")})

    def wait_started(self) -> str:
        """Wait until the worker runs. Returns {pid}, or {error} if the driver did not connect."""
        self._started.wait(ARRIVAL_S)
        if self._process is None:
            return json.dumps({"error": self._fate or "the driver did not come"})
        return json.dumps({"pid": self._process.pid})

    def wait_stopped_change(self, known: bool) -> str:
        """Wait until the worker's state differs from ``known``, or it ends. Returns whether it is now stopped by a
        signal; see StopProbe.
        """
        still = known
        while still == known and not self._ended.wait(LOOK_S):
            still = self._process is not None and self._stop_probe.is_stopped(self._process.pid)
        return json.dumps(still and not self._ended.is_set())

    def exit_reason(self) -> str:
        """Wait for the worker's end. Returns how it ended, in words."""
        self._ended.wait()
        return self._fate

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _serve(self, listener: ControlListener) -> None:
        try:
            self._spawn(listener)
        except (ChannelError, OSError) as error:
            self._fate = str(error)
        finally:
            listener.close()
            self._started.set()
        if self._process is not None:
            self._fate = exit_status_text(self._process.wait())
        self._ended.set()

    def _spawn(self, listener: ControlListener) -> None:
        sock, keys = listener.accept(ARRIVAL_S)
        order = self._order
        # The driver's key is also used for layer messages, whatever this host's environment has.
        with sock:
            self._process, self._life_line = spawn_supervised(
                order["role"], sock, keys, order["threads"], **{KEY: order["key"], KEY_FILE: ""}
            )
