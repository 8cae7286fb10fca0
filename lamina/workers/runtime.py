"""A worker's environment: time, threads, queues between them, and a network. A simulation replaces it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lamina import netstack
from lamina.netstack import Fabric
from lamina.utils.background_thread import LowPriorityCall

from .worker_process import exit_now


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run ``work`` on a thread of its own, which ends with the process."""
    threading.Thread(target=work, name=name, daemon=True).start()


class Runtime(NamedTuple):
    """The functions by which a worker uses its environment.

    ``clock``: seconds that never decrease. ``start``: starts a thread, given its function and name.
    ``start_background``: the same at low priority, for work that must not delay other work. ``queue``: makes a queue
    with ``put(message)`` and ``get(block)``, which raises queue.Empty. ``condition``: as threading.Condition.
    ``open_fabric``: as netstack.open. ``exit_process``: see exit_now.
    """

    clock: Callable[[], float] = time.monotonic
    start: Callable[[Callable[[], None], str], None] = start_thread
    start_background: Callable[[Callable[[], None], str], object] = LowPriorityCall
    queue: Callable[[], Any] = queue.SimpleQueue
    open_fabric: Callable[..., Fabric] = netstack.open
    condition: Callable[[], threading.Condition] = threading.Condition
    exit_process: Callable[[str], None] = exit_now


RUNTIME = Runtime()  # for a worker in a process or thread of this machine
