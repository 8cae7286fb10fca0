"""Ray on this host, for `lamina-launch cluster`: ``python -m lamina.executor.hosts.ray_node`` reads one JSON order from
stdin and writes one reply to stdout. It ends only what an earlier order started here.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lamina.netstack.own_python import own_python
from lamina.utils.proc import start_time_of

from .ray_token import MODE, TOKEN, TOKEN_PATH, state_folder

NICENESS = "RAY_worker_niceness"
STARTED = "Ray runtime started"  # Ray's own message
END_S = 20.0
DOWN_S = 150.0  # for a start in progress to stop
STOP = "stop"  # a file next to the lock
POLL_S = 0.1
MAX_SHOWN_LINES = 20  # the last ones of Ray's log, in errors


class NodeError(Exception):
    """An error of an order, in one line for people."""


def up(order: dict[str, Any]) -> dict[str, Any]:
    """Run ``ray start`` unless it runs. ``order``: {address, arguments, token, timeout_s, call}.

    Returns {pid, fresh, arguments}: whether this ``call`` has started it, and the arguments with which it was started.
    """
    folder = folder_of(order["address"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder, order["timeout_s"]):
        if (pid := running_pid(folder)) is not None:
            return {"pid": pid, "fresh": False, "arguments": _started_by(folder).get("arguments", [])}
        return {"pid": _start(folder, order), "fresh": True, "arguments": order["arguments"]}


def down(order: dict[str, Any]) -> dict[str, Any]:
    """End Ray. ``order``: {address, call}; with a ``call``, Ray stays if another call started it. Returns {ended}:
    whether there was anything to end.
    """
    folder, call = folder_of(order["address"]), order.get("call")

    def own() -> bool:
        return not call or _started_by(folder).get("call") == call

    if not folder.is_dir() or not own():
        return {"ended": False}
    ran = running_pid(folder) is not None
    (folder / STOP).touch()  # ends the wait of a start in progress
    with _alone(folder, DOWN_S):
        (folder / STOP).unlink(missing_ok=True)
        if own():
            ran = _end(folder) or ran
    return {"ended": ran}


def status(order: dict[str, Any]) -> dict[str, Any]:
    """Return {pid}, 0: not up; for the head {hosts, serves}: free resources by address, workers by driver. ``order``:
    {address, token, head}.
    """
    pid = running_pid(folder_of(order["address"])) or 0
    if not pid or not order["head"]:
        return {"pid": pid}
    os.environ.update({MODE: "token", TOKEN: order["token"]})
    from .ray_cluster import deployments_of, hosts_of, joined

    with joined(order["head"]) as ray:
        hosts = {h.address: h.resources for h in hosts_of(ray)}
        return {"pid": pid, "hosts": hosts, "serves": deployments_of(ray)}


COMMANDS = {"up": up, "down": down, "status": status}


@contextmanager
def _alone(folder: Path, limit_s: float) -> Iterator[None]:
    """Exclude all other orders that start or end something here."""
    deadline = time.monotonic() + limit_s
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NodeError(f"another call has been at Ray for {limit_s:g} s: see {folder}") from None
            threading.Event().wait(POLL_S)
        yield


def _start(folder: Path, order: dict[str, Any]) -> int:
    """Start Ray, and return the process that keeps it running."""
    # By default Ray lowers the priority of its processes by 15; workers are to run as without it.
    own = {MODE: "token", TOKEN: order["token"], "RAY_USAGE_STATS_ENABLED": "0", NICENESS: "0"}
    given = {name: value for name, value in os.environ.items() if name != TOKEN_PATH}
    command, environment = own_python(
        "-m", "ray.scripts.scripts", "start", "--block", *order["arguments"], environ={**given, **own}
    )
    (folder / STOP).unlink(missing_ok=True)
    (folder / "order").write_text(json.dumps({name: order[name] for name in ("call", "arguments")}))
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    (folder / "pid").write_text(f"{process.pid} {start_time_of(process.pid)}")
    deadline = time.monotonic() + order["timeout_s"]
    while STARTED not in (log_text := log.read_text(errors="replace")):
        stopped = (folder / STOP).exists()
        if stopped or process.poll() is not None or time.monotonic() > deadline:
            _end(folder)
            why = (
                "an order to end it came before"
                if stopped
                else " ".join(" ".join(log_text.splitlines()[-MAX_SHOWN_LINES:]).split()) or "it printed nothing"
            )
            raise NodeError(f"Ray did not start: {why}; see {log}")
        threading.Event().wait(POLL_S)
    return process.pid


def _end(folder: Path) -> bool:
    """End Ray. Returns whether there was anything to end."""
    pid = running_pid(folder)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # `ray start --block` then ends all that it started
            deadline = time.monotonic() + END_S
            while running_pid(folder) is not None:
                if time.monotonic() > deadline:
                    os.killpg(pid, signal.SIGKILL)  # its own session
                    break
                threading.Event().wait(POLL_S)
    (folder / "pid").unlink(missing_ok=True)
    return pid is not None


def _started_by(folder: Path) -> dict[str, Any]:
    """Return the order that started what runs here: {call, arguments}; empty if it was not recorded."""
    try:
        order: dict[str, Any] = json.loads((folder / "order").read_text())
    except (OSError, ValueError):
        return {}
    return order


def folder_of(address: str) -> Path:
    return state_folder() / "hosts" / address.replace(":", "_")


def running_pid(folder: Path) -> int | None:
    """Return the process that an earlier order started, if it still runs; a pid alone may be reused."""
    try:
        pid, birth = (folder / "pid").read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if birth == start_time_of(int(pid)) else None


def main() -> int:
    order = json.load(sys.stdin)
    try:
        answer = COMMANDS[order["order"]](order)
    except (NodeError, OSError, ValueError, ImportError) as error:
        answer = {"error": " ".join(str(error).split())}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
