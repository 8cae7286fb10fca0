"""Launchers start the workers of one engine; which one is a matter of options. This is their contract.

- ``start`` returns once the process runs and its control link is up, or raises within ``start_timeout_s``. What comes
  over the link is the worker's own: the same messages whoever started it.
- A worker ends soon after its driver, however that ends, and after whoever supervises it on its host.
- Its end closes its control link. ``exit_reason`` says at once, or within a second of that, how it ended; it never
waits.
- ``close`` ends what is left of them, and gives back what the launcher itself holds. Idempotent.
- Tensors never pass through a launcher, nor anything that could bear code.
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
    """The host of a lost worker is gone, and no other one has room. ``lost_hosts``: names of such hosts."""

    def __init__(self, text: str, lost_hosts: Collection[str] = ()) -> None:
        super().__init__(text)
        self.lost_hosts = sorted(lost_hosts)


class WorkerHandle(Protocol):
    """A started worker, as the driver sees it."""

    role: str
    index: int
    pid: int  # on its host
    host: str  # where it listens for workers of other hosts, IP:0; "" = nobody comes from there

    @property
    def sock(self) -> socket.socket:
        """The driver's end of the control link."""
        ...

    def exit_reason(self) -> str | None:
        """How it ended, in words; None while it runs."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still by a signal; False where that is not known. It never waits."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for its end; past the timeout end it by force. The control link has been closed before."""
        ...


class Launcher(Protocol):
    """Starts workers, each of them once; again in the place of one that is lost."""

    key: bytes  # for the workers' start messages; empty = they have the cluster's key from elsewhere

    def thread_count(self, role: str, index: int) -> int:
        """Threads for a worker that shares its host's cores with others of its role."""
        ...

    def start(self, role: str, index: int, threads: int = 0) -> WorkerHandle:
        """``threads`` of OpenMP; 0 = what the environment says, else all cores. Raises OSError, ValueError;
        HostLostError where there has been one at that place.
        """
        ...

    def start_spare(self, role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> WorkerHandle | None:
        """A worker without a place yet, with that ``number`` among the spares of its role. None: it takes longer than
        ``wait_s`` to come up; ask again. Raises as ``start``.
        """
        ...

    def promote_spare(self, role: str, number: int, index: int) -> None:
        """That spare takes the place ``index``, whose worker is lost; the next one of that number has the room that the
        lost one had.
        """
        ...

    def avoid_host(self, role: str, index: int) -> None:
        """Others do not reach the host of that place: whoever is started there next goes to another one."""
        ...

    def can_replace(self, lost: WorkerHandle) -> bool:
        """Whether another worker can be started in the place of ``lost``, once that has been ended."""
        ...

    def set_capacity(self, role: str, count: int) -> bool:
        """From now on there may be ``count`` workers of a role; False, and nothing changes, where they cannot be had
        while the others run. There may be fewer in any case.
        """
        ...

    def keep_workers(self, role: str, numbers: Sequence[int]) -> None:
        """Of the workers of a role these stay, and are numbered in this order from now on; the others end."""
        ...

    def close(self) -> None: ...


def open_launcher(
    config: EngineConfig, key: bytes, wanted: Mapping[str, int], without: Collection[str] = ()
) -> Launcher:
    """The launcher of ``config``, for so many workers of each role, none of them on hosts ``without``; see
    HostLostError.

    Raises ImportError where its own needs are missing, ValueError where the workers do not fit, with the fix.
    """
    module = import_module(f"{__package__}.{LAUNCHERS[config.launch.launcher_name]}")
    launcher: Launcher = module.open_launcher(config, key, wanted, without)
    return launcher
