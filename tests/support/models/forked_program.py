"""`lamina-launch`, or a test's own Python code, in a process that the warm process of the tests has forked, with a warm
process of its own.

That one is a fork too, so that processes hang together as they do where a user has started them. torch and transformers
are not imported again: that is 6 s of CPU for each program.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from itertools import pairwise
from pathlib import Path

import __main__
from lamina.cli.launch import main
from lamina.workers import worker_process, zygote
from lamina.workers.__main__ import main as work

ROOT = Path(__file__).resolve().parents[3]
MOST_FDS = 1 << 16


def serve_program(control: socket.socket) -> None:
    """``control`` brings the program's words and code as JSON, with descriptors of its standard output and error.

    Without code it is `lamina-launch`.
    """
    data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
    for fd, standard in zip(fds, (1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # workers leave both to their driver, which this is
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(ROOT)
    give_warm_process(control)
    told = json.loads(data)
    sys.argv[:] = ["-c" if told["code"] else "lamina-launch", *told["words"]]
    status = 1
    try:
        status = run(told["code"]) if told["code"] else main()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    __main__.end.status = status  # type: ignore[attr-defined]  # exit functions are run, then it ends at once
    sys.exit(status)


def run(code: str) -> int:
    """Runs code as ``python -c`` does."""
    exec(code, {"__name__": "__main__"})
    return 0


def give_warm_process(control: socket.socket) -> None:
    """Lets this program fork its workers from a child of its own, which ends with it."""
    door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held, _ = os.pipe()
    if os.fork():
        worker_process.door_fd = door.detach()
        theirs.close()
        os.close(held)
        return
    os.setpgid(0, 0)
    worker_process.ignore_end_signals()
    for low, high in pairwise(sorted((2, theirs.fileno(), held, MOST_FDS))):
        os.closerange(low + 1, high)  # all else is the program's, its end of the life line too
    door.detach()
    control.detach()
    zygote.set_process_title([sys.executable, "-m", "lamina.workers.zygote"])
    order = zygote.Zygote(theirs, held, "").serve()
    if order is not None:
        arguments = zygote.become_worker(order)
        zygote.set_threads(zygote.threads_wanted())
        work(arguments)
    __main__.end.status = 0  # type: ignore[attr-defined]
    sys.exit(0)
