"""The life of a worker process. Imports nothing that takes time, so that the driver is watched from the start."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

ORPHAN_EXIT_S = 2.0  # for an orderly end
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what ends a service

door_fd: int | None = (
    None  # of the warm process that this worker was forked from; see lamina.executor.launchers.zygote_client
)


class CorruptedMemoryError(Exception):
    """The memory of this worker does not hold the bytes that it wrote."""


def exit_now(why: str) -> None:
    """End this process as a kill would, with a line on stderr, so that its watchers hear of a death alone. Nothing
    happens in a process whose main thread this is not.
    """
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or its disk is full
            sys.stderr.write(why + "\n")
            sys.stderr.flush()
        os._exit(1)


def write_error() -> None:
    """Write the error that is being handled to stderr now, as Python would do at the end of the process, and not again
    then: whoever is told of the error ends this process at once. Nothing happens outside the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(OSError, ValueError):
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        sys.excepthook = lambda *error: None


class ExitPromptly:
    """Ends this process at once when its work is done: threads are awaited and exit functions run, as Python does it,
    but modules are not taken apart one by one. That touches every page that a forked process shares with its parent,
    which took 0.4 s of a core for each worker, and 1.2 s for a process that has imported transformers by itself.
    """

    def __init__(self) -> None:
        """Made before anything else registers exit functions, as the first one registered is the last one to run."""
        self.status: int | None = None  # of the process, once its work has ended as it should; else Python ends it
        atexit.register(self._end)

    def _end(self) -> None:
        if self.status is not None:
            if logging := sys.modules.get("logging"):  # its exit function may have been there before
                logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or none
                    stream.flush()
            os._exit(self.status)


def ignore_end_signals() -> None:
    """Ctrl-C and SIGTERM do not end this process: who stops a service tells all of its processes at once, and the
    driver lets its requests finish first. Whoever starts this process may have blocked them until here.
    """
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def run_process(control_fd: int, serve: Callable[[socket.socket], None], life_line_fd: int | None = None) -> None:
    """Serve the driver at the other end of ``control_fd``, an inherited socket.

    ``life_line_fd``: a pipe from whoever supervises this process here, for a driver that is elsewhere: it brings the
    keys of the control link, then ends when the supervisor does. A process that does not end soon after its driver, or
    supervisor, is ended by force.
    """
    ignore_end_signals()
    if life_line_fd is None:
        sock, watched = socket.socket(fileno=control_fd), [os.dup(control_fd)]
    else:
        from lamina.protocol.encrypted_socket import EncryptedSocket, read_key_pair  # needs the native module

        sock, watched = EncryptedSocket(control_fd, read_key_pair(life_line_fd)), [os.dup(control_fd), life_line_fd]
    threading.Thread(target=_exit_when_orphaned, args=(watched,), name="lamina-orphan", daemon=True).start()
    serve(sock)


def on_sigterm(call: Callable[[], None]) -> None:
    """Have SIGTERM call ``call``, and not end this process, for a worker that has something to give away first. For the
    main thread, before it makes others; called from another thread than the main one, it leaves SIGTERM as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # no wait of any thread is broken off by it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of one that is ignored nobody hears

    def watch() -> None:
        while signal.sigwait([signal.SIGTERM]):
            call()

    threading.Thread(target=watch, name="lamina-notice", daemon=True).start()


def _exit_when_orphaned(watched: list[int]) -> None:
    """``watched``: the control link first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the main thread's, which may await it
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLRDHUP)
    poll.poll()
    control = socket.socket(fileno=watched[0])
    with contextlib.suppress(OSError):  # it may have ended by itself
        control.shutdown(socket.SHUT_RDWR)  # so that a driver that lives knows too, at once
    threading.Event().wait(ORPHAN_EXIT_S)
    os._exit(1)
