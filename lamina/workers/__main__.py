"""A worker process: ``python -m lamina.workers MODULE:FUNCTION --control-fd N [--life-line-fd M] [--cores LIST]``.

A worker forked from the zygote (``zygote.py``) begins here too, and ps shows it like that.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
from collections.abc import Sequence
from importlib import import_module

from . import worker_process


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``FUNCTION(socket)``, which serves the driver at the other end of the inherited socket N."""
    parser = argparse.ArgumentParser(prog="python -m lamina.workers", allow_abbrev=False)
    parser.add_argument("serve", metavar="MODULE:FUNCTION", help="function to run")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited socket of the control link")
    parser.add_argument("--life-line-fd", type=int, help="inherited pipe of a supervisor; see run_process")
    parser.add_argument("--cores", help="cores to run on, separated by commas; default: the system's choice")
    parser.add_argument("--door-fd", type=int, help="inherited socket of the zygote, to start more workers")
    args = parser.parse_args(arguments)
    worker_process.door_fd = args.door_fd
    if args.cores:  # before any thread starts
        os.sched_setaffinity(0, map(int, args.cores.split(",")))
    faulthandler.enable(all_threads=False)  # a crash prints where it was in Python
    module, _, function = args.serve.partition(":")

    def serve(sock: socket.socket) -> None:  # imports after the watch on the driver has begun
        import_module("lamina.observe.log_lines").log_as_told(function.removeprefix("serve_"))
        getattr(import_module(module), function)(sock)

    worker_process.run_process(args.control_fd, serve, args.life_line_fd)


if __name__ == "__main__":
    end = worker_process.ExitPromptly()
    main()
    end.status = 0
