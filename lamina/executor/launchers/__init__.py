"""The contract of launchers, which start the workers of one engine. Options choose the launcher.

- ``start`` returns once the process runs and its control link is up, or raises within ``start_timeout_s``. The link's
  messages are the worker's own, and do not depend on the launcher.
- A worker ends soon after its driver, however that ends, and after the process that supervises it on its host.
- Its end closes its control link. ``exit_reason`` reports at once, or within a second of that, how it ended; it never
  waits.
- ``close`` ends the remaining workers, and releases what the launcher itself holds. Idempotent.
- Tensors never pass through a launcher, nor anything that could carry code.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from lamina.config.engine_config import EngineConfig

# name -> module of this package with open_launcher(config, key, wanted, without) -> Launcher; imported when first used
LAUNCHERS = {"local": "local", "ray": "ray", "static": "static"}


class HostLostError(OSError):
    """The host of a lost worker is gone, and no other host has space. ``lost_hosts``: names of lost hosts."""

    def __init__(self, text: str, lost_hosts: Collection[str] = ()) -> None:
        super().__init__(text)
        self.lost_hosts = sorted(lost_hosts)


class WorkerHandle(Protocol):
    """A started worker, as the driver sees it."""

    role: str
    index: int
    pid: int  # on its host
    host: str  # where it listens for workers of other hosts, IP:0; "" = none connect

    @property
    def sock(self) -> socket.socket:
        """The driver's end of the control link."""
        ...

    def exit_reason(self) -> str | None:
        """Return how it ended, in words; None while it runs."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Return whether it is stopped by a signal; False if that is unknown. Never waits."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for its end; after the timeout, kill it. The control link has been closed before."""
        ...


class Launcher(Protocol):
    """Starts each worker once, and again in the place of a lost one."""

    key: bytes  # for the workers' start messages; empty = they have the cluster's key from elsewhere

    def thread_count(self, role: str, index: int) -> int:
        """Return the threads of a worker that shares its host's cores with others of its role."""
        ...

    def start(self, role: str, index: int, threads: int = 0) -> WorkerHandle:
        """Start a worker. ``threads``: of OpenMP; 0: as the environment says, else all cores. Raises OSError,
        ValueError; HostLostError if the place had a worker before.
        """
        ...

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> WorkerHandle | None:
        """Start a worker without a place yet, the ``number``-th spare of its role. None: it takes longer than
        ``wait_s`` to start; call again. Raises as ``start`` does.
        """
        ...

    def promote_spare(self, role: str, number: int, index: int) -> None:
        """Give that spare the place ``index`` of a lost worker, whose resources the next spare of that number gets."""
        ...

    def avoid_host(self, role: str, index: int) -> None:
        """Start the next worker of that place on another host, since other workers do not reach the present one."""
        ...

    def can_replace(self, lost: WorkerHandle) -> bool:
        """Return whether another worker can be started in the place of ``lost``, once that has been ended."""
        ...

    def set_capacity(self, role: str, count: int) -> bool:
        """Allow ``count`` workers of a role from now on. Returns False, and changes nothing, if they cannot be had
        while the others run. There may be fewer in any case.
        """
        ...

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None:
        """Keep these workers of a role, numbered in this order from now on; the others end."""
        ...

    def close(self) -> None: ...


def open_launcher(
    config: EngineConfig, key: bytes, wanted: Mapping[str, int], without: Collection[str] = ()
) -> Launcher:
    """Return the launcher of ``config``, for the ``wanted`` number of workers of each role, none of them on hosts
    ``without``; see HostLostError.

    Raises ImportError if its own requirements are missing, ValueError with the fix if the workers do not fit.
    """
    module = import_module(f"{__package__}.{LAUNCHERS[config.launch.launcher_name]}")
    launcher: Launcher = module.open_launcher(config, key, wanted, without)
    return launcher
