"""A thread's wait for descriptors, or for a ring from another thread."""

from __future__ import annotations

import os
import select
from io import FileIO


class EventWaiter:
    """A sleep ends once one of ``fds`` is readable, or with a ring. Its owner closes it, but not ``fds``."""

    def __init__(self, *fds: int) -> None:
        self._bell = FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._poller = select.poll()
        for fd in (self._bell.fileno(), *fds):
            self._poller.register(fd, select.POLLIN)
        self.asleep = False

    def ring(self) -> None:
        if self.asleep:
            os.eventfd_write(self._bell.fileno(), 1)

    def sleep(self, timeout_s: float) -> None:
        for fd, _ in self._poller.poll(max(0.0, timeout_s) * 1000):
            if fd == self._bell.fileno():
                self._bell.read(8)

    def close(self) -> None:
        self._bell.close()
