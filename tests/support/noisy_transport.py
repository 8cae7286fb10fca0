"""Shared memory, in whose every process text comes on stderr in all ways that there are, for tests of logs."""

from __future__ import annotations

import logging
import os
import threading
import warnings

from lamina.netstack.contract.fabric import Fabric
from lamina.netstack.host import shm

NATIVE = "native text\n  in two lines"


class Unraisable:
    """Its end raises an error, which no code can catch."""

    def __del__(self) -> None:
        raise ValueError("in the end")


def open_fabric(key: bytes) -> Fabric:
    """The fabric of shm, after a warning, a record, a record with a defect, errors of a thread and of a finalizer, and
    text that only the descriptor knows.
    """
    warnings.warn("an old habit", stacklevel=1)
    logging.getLogger("theirs").warning("theirs")
    logging.getLogger("theirs").warning("%d", "no number")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    Unraisable()
    os.write(2, f"{NATIVE}\n".encode())
    return shm.open_fabric(key)
