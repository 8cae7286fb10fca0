"""The stderr of workers, if this process logs JSON: a pipe to this process, which makes a JSON object of each text.

Lines of JSON, which a worker's logging writes, go on as they are. Other text, such as that of native code, becomes a
record of this process's log. If a worker crashes, one record has its signal and its last lines. If this process logs
text, workers write to its own stderr.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Protocol, TypeVar

from lamina.observe.log_lines import forward, is_json

log = logging.getLogger(__name__)
PIPE_BYTES = 1 << 20  # while this process does not read, a worker drops what does not fit
READ_BYTES, READS = 1 << 16, 64  # of a pipe at a time
MOST_LINE_BYTES = 1 << 20  # a longer line is cut
QUIET_S = 0.25  # after the last line of a text that is no JSON, until it becomes a record
LAST_LINES, LAST_LINES_S = 60, 10.0  # of a crash: so many lines at most, and none that is older
CRASHES = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS,
}  # fmt: skip


class Stderr(Protocol):
    """The stderr of a process that is about to start."""

    fd: int

    def end(self, status: int | None) -> None:
        """Called once the process has ended with this exit status, perhaps several times."""
        ...


class InheritedStderr:
    """This process's own stderr."""

    fd = 2

    def end(self, status: int | None) -> None:
        """Do nothing."""


INHERITED = InheritedStderr()


class Started(Protocol):
    """A started process."""

    pid: int


P = TypeVar("P", bound=Started)


def start_with_stderr(role: str, begin: Callable[[Stderr], P]) -> P:
    """Return the process that ``begin`` starts with a stderr, whose ``end`` that process calls."""
    if not is_json():
        return begin(INHERITED)
    stderr = WorkerStderr(role)
    try:
        process = begin(stderr)
    except BaseException:
        stderr.discard()
        raise
    stderr.watch(process.pid)
    return process


class WorkerStderr:
    """The pipe of one worker. It is open until ``end``, or until no process can write to it."""

    def __init__(self, role: str) -> None:
        """``fd`` is for the worker's process. Call ``watch`` once that has started, or ``discard``."""
        self._read, self.fd = os.pipe()
        for fd in (self._read, self.fd):  # no worker waits for this process, nor this process for a worker
            os.set_blocking(fd, False)
        with suppress(OSError):  # this user has too many pipes
            fcntl(self.fd, F_SETPIPE_SZ, PIPE_BYTES)
        self._role, self._pid = role, 0
        self._part = b""  # of a line
        self._held = list[str]()  # lines that are no JSON, and in no record yet
        self._quiet_at = 0.0  # when these become a record
        self._last = deque[tuple[float, str]](maxlen=LAST_LINES)  # lines that are no JSON, and when they came
        self._ended = False

    def watch(self, pid: int) -> None:
        """Read what the process ``pid`` writes, from now on."""
        self._pid = pid
        os.close(self.fd)
        _READER.add(self)

    def discard(self) -> None:
        """Close both ends: no process was started."""
        os.close(self.fd)
        os.close(self._read)

    def end(self, status: int | None) -> None:
        """Log what is left of the text of a process that has ended with this exit status. Idempotent."""
        _READER.end(self, status)

    # The rest is the reader's, which has a lock.
    def fileno(self) -> int:
        """The end to read from."""
        return self._read

    def take(self) -> bool:
        """Handle what has arrived. Returns False at the end of the pipe."""
        for _ in range(READS):
            try:
                data = os.read(self._read, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._part = (self._part + data).split(b"\n")
            if len(self._part) > MOST_LINE_BYTES:
                lines, self._part = [*lines, self._part], b""
            for line in lines:
                self._take_line(line.decode(errors="backslashreplace"))
        return True

    def quiet_in_s(self, now: float) -> float | None:
        """Return the seconds until ``log_held`` is due; None: nothing is held."""
        return max(0.0, self._quiet_at - now) if self._held else None

    def log_held(self) -> None:
        """Log the text that is held back."""
        text, self._held = "\n".join(self._held).strip("\n"), []
        if text:
            log.warning("%s", text, extra=self._fields())

    def close(self, status: int | None) -> None:
        """Log the rest. ``status``: the exit status of the process."""
        if self._ended:
            return
        self._ended = True
        if self._part:
            self._take_line(self._part.decode(errors="backslashreplace"))
        since = time.monotonic() - LAST_LINES_S
        last = "\n".join(line for at, line in self._last if at >= since).strip("\n")
        if last and status is not None and -status in CRASHES:
            name = signal.Signals(-status).name
            extra = self._fields(signal=name)
            log.error(
                "%s (pid %d) was killed by %s; its last lines: %s", self._role, self._pid, name, last, extra=extra
            )
        else:
            self.log_held()

    def _take_line(self, line: str) -> None:
        if is_object(line):
            self.log_held()
            forward(line)
            return
        self._held.append(line)
        self._last.append((now := time.monotonic(), line))
        self._quiet_at = now + QUIET_S
        if len(self._held) >= LAST_LINES:
            self.log_held()

    def _fields(self, **more: str) -> dict[str, dict[str, str | int]]:
        return {"fields": {"process": self._role, "pid": self._pid, **more}}


def is_object(line: str) -> bool:
    """Return whether a line is a JSON object."""
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _Reader:
    """Reads the pipes of all workers on one thread, which ends with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipes = dict[int, WorkerStderr]()
        self._wake = -1  # ends a wait of the thread; -1: there is no thread

    def add(self, pipe: WorkerStderr) -> None:
        with self._lock:
            self._pipes[pipe.fileno()] = pipe
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                threading.Thread(target=self._run, name="lamina-stderr", daemon=True).start()
            os.eventfd_write(self._wake, 1)

    def end(self, pipe: WorkerStderr, status: int | None) -> None:
        with self._lock:
            if self._pipes.get(pipe.fileno()) is pipe:
                pipe.take()
                self._remove(pipe)
                os.eventfd_write(self._wake, 1)
            pipe.close(status)

    def _remove(self, pipe: WorkerStderr) -> None:
        os.close(pipe.fileno())
        del self._pipes[pipe.fileno()]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pipes:
                    os.close(self._wake)
                    self._wake = -1
                    return
                poll, now = select.poll(), time.monotonic()
                for fd in (self._wake, *self._pipes):
                    poll.register(fd, select.POLLIN)
                due = [s for pipe in self._pipes.values() if (s := pipe.quiet_in_s(now)) is not None]
            ready = poll.poll(min(due) * 1000 + 1 if due else None)
            with self._lock:
                self._take({fd for fd, _ in ready})

    def _take(self, ready: set[int]) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        now = time.monotonic()
        for fd, pipe in [*self._pipes.items()]:
            if fd in ready and not pipe.take():
                self._remove(pipe)  # what it holds waits for its exit status
            elif pipe.quiet_in_s(now) == 0.0:
                pipe.log_held()


_READER = _Reader()
