"""A worker process: ``python -m lamina.workers MODULE:FUNCTION --control-fd N [--life-line-fd M] [--cores LIST]``.

One that is forked from the warm process (``zygote.py``) begins here too, and ps shows it so.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from importlib import import_module

from . import worker_process


def main(arguments: Sequence[str] | None = None) -> None:
    """``FUNCTION(socket)`` serves the driver at the other end of the inherited socket N."""
    parser = argparse.ArgumentParser(prog="python -m lamina.workers", allow_abbrev=False)
    parser.add_argument("serve", metavar="MODULE:FUNCTION", help="what to run")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited socket of the control link")
    parser.add_argument("--life-line-fd", type=int, help="inherited pipe of a supervisor; see run_process")
    parser.add_argument("--cores", help="where to run, by comma; else where the system says")
    parser.add_argument("--door-fd", type=int, help="inherited socket of the warm process, for workers of its own")
    args = parser.parse_args(arguments)
    worker_process.door_fd = args.door_fd
    if args.cores:  # before any thread is made
        os.sched_setaffinity(0, map(int, args.cores.split(",")))
    module, _, function = args.serve.partition(":")

    def serve(sock: socket.socket) -> None:
        getattr(import_module(module), function)(sock)  # imported while the driver is watched

    worker_process.run_process(args.control_fd, serve, args.life_line_fd)


if __name__ == "__main__":
    end = worker_process.ExitPromptly()
    main()
    end.status = 0
