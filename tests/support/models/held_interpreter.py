"""A memory worker whose interpreter stands still for a while, as in a native call that keeps its lock: no thread of it
answers, and none takes CPU time.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

from lamina.workers.memory import main as memory_main

FOLDER, SECONDS = "PYTEST_HELD_FOLDER", "PYTEST_HELD_SECONDS"
LOOK_S = 0.02


def serve_memory(sock: socket.socket) -> None:
    """It begins once there is a file ``hold`` in the folder; each leaves a file of its own as it begins, and another
    one as it ends.
    """
    folder, seconds = Path(os.environ[FOLDER]), int(os.environ[SECONDS])

    def hold() -> None:
        never = threading.Event()
        while not (folder / "hold").exists():
            never.wait(LOOK_S)
        (folder / f"begun-{os.getpid()}").touch()
        ctypes.PyDLL(None).sleep(seconds)
        (folder / f"over-{os.getpid()}").touch()

    threading.Thread(target=hold, daemon=True).start()
    memory_main.serve_memory(sock)
