"""The life of a worker process. It imports no slow module, so that the driver is watched from the start."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

ORPHAN_EXIT_S = 2.0  # seconds for an orderly end
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and the signal that ends a service

door_fd: int | None = (
    None  # of the zygote that this worker was forked from; see lamina.executor.launchers.zygote_client
)


class CorruptedMemoryError(Exception):
    """The memory of this worker does not hold the bytes that it wrote."""


def exit_now(why: str) -> None:
    """End this process like a kill, with a line on stderr, so that its watchers notice only a death. Does nothing
    except on the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        logging.getLogger(__name__).error("%s", why)
        os._exit(1)


def write_error() -> None:
    """Write the error that is being handled to stderr now, and not again at the end of the process. The driver ends
    this process as soon as it receives the error. Does nothing except on the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(OSError, ValueError):
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        sys.excepthook = lambda *error: None


class ExitPromptly:
    """Ends this process quickly when its work is done: awaits threads and runs exit functions, but skips freeing
    modules. Freeing modules touches every page that a forked process shares with its parent. It took 0.4 s of a core
    for each worker, and 1.2 s for a process that had imported transformers by itself.
    """

    def __init__(self) -> None:
        """Must be created before any exit function is registered, as the first one registered runs last."""
        # The process's exit status, set after its work has ended normally; else Python ends it.
        self.status: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.status is not None:
            logging.shutdown()  # its exit function may have been registered before
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or missing
                    stream.flush()
            os._exit(self.status)


def ignore_end_signals() -> None:
    """Ignore Ctrl-C and SIGTERM: a service's end signals all of its processes, but the driver finishes requests first.
    The parent process may have blocked these signals until here.
    """
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def run_process(control_fd: int, serve: Callable[[socket.socket], None], life_line_fd: int | None = None) -> None:
    """Serve the driver at the other end of ``control_fd``, an inherited socket.

    ``life_line_fd``: a pipe from the process that supervises this one, if the driver is on another host. It brings the
    keys of the control link, and ends with the supervisor. A process that does not end soon after its driver or
    supervisor is ended by force.
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
    """Let SIGTERM call ``call`` instead of ending this process: for a worker that must first give something away. Call
    it on the main thread before other threads start; on another thread it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it interrupts no wait of any thread
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an ignored signal would not be delivered

    def watch() -> None:
        while signal.sigwait([signal.SIGTERM]):
            call()

    threading.Thread(target=watch, name="lamina-notice", daemon=True).start()


def _exit_when_orphaned(watched: list[int]) -> None:
    """Exit soon after one of the descriptors ends. ``watched``: the control link is the first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the main thread, which may wait for it
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLRDHUP)
    poll.poll()
    control = socket.socket(fileno=watched[0])
    with contextlib.suppress(OSError):  # it may have ended by itself
        control.shutdown(socket.SHUT_RDWR)  # notifies a living driver at once
    threading.Event().wait(ORPHAN_EXIT_S)
    os._exit(1)
