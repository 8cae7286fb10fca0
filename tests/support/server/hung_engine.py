"""An engine that does by a signal what else happens rarely, and leaves a file as that begins, and as it is over."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lamina.server.engine_client import engine_process

FOLDER, SECONDS = "PYTEST_HUNG_FOLDER", 6
HANGS, SPINS, HELD, FAILS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGURG


def serve_engine(sock: socket.socket) -> None:
    """HANGS: its thread waits for itself. SPINS: it computes for SECONDS. HELD: another one keeps the interpreter.
    FAILS: it makes a mistake.
    """
    folder = Path(os.environ[FOLDER])

    def told(number: int, word: str) -> None:
        (folder / f"{signal.Signals(number).name}-{word}").touch()

    def hang(number: int, frame: Any) -> None:
        lock = threading.Lock()
        lock.acquire()
        told(number, "begun")
        lock.acquire()

    def spin(number: int, frame: Any) -> None:
        told(number, "begun")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            pass
        told(number, "over")

    def hold(number: int, frame: Any) -> None:
        def keep() -> None:
            told(number, "begun")
            ctypes.PyDLL(None).sleep(SECONDS)
            told(number, "over")

        threading.Thread(target=keep, daemon=True).start()

    def fail(number: int, frame: Any) -> None:
        told(number, "begun")
        raise KeyError("a mistake")

    for number, work in ((HANGS, hang), (SPINS, spin), (HELD, hold), (FAILS, fail)):
        signal.signal(number, work)
    engine_process.serve_engine(sock)
