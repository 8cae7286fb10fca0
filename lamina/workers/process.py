"""The life of a worker process. Imports nothing that takes time, so that the driver is watched from the start."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable

ORPHAN_EXIT_S = 2.0  # for an orderly end


def run_process(control_fd: int, serve: Callable[[socket.socket], None]) -> None:
    """Serve the driver at the other end of ``control_fd``, an inherited socket.

    Ctrl-C is the driver's to handle. A process that does not end soon after its driver is ended by force.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=control_fd)
    threading.Thread(target=_exit_when_orphaned, args=(os.dup(control_fd),), name="lamina-orphan", daemon=True).start()
    serve(sock)


def _exit_when_orphaned(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    threading.Event().wait(ORPHAN_EXIT_S)
    os._exit(1)
