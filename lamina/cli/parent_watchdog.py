"""A server that ends with its drill, however the drill ends.

    python -m lamina.cli.parent_watchdog FD FOLDER serve ...

FD: of a pipe whose other end the drill alone has; FOLDER: of the server alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from contextlib import suppress

from lamina.utils.proc import descendants_of


def main(line: int, folder: str) -> None:
    """Returns as ``lamina.cli.launch.run_program``, whose arguments are those of ``sys.argv``."""
    threading.Thread(target=_follow, args=(line, folder), name="lamina-leash", daemon=True).start()
    from .launch import run_program

    run_program()


def _follow(line: int, folder: str) -> None:
    while os.read(line, 1):
        pass
    for pid in descendants_of(os.getpid()):  # a process that a drill has stopped does not end by itself
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, fd, own, *arguments = sys.argv
    sys.argv = ["lamina-launch", *arguments]
    main(int(fd), own)
