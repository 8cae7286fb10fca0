"""A watchdog over devices that wait for other ranks: their hosts continue, and would not notice a rank's end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lamina.netstack import ChannelError, ChannelTimeout, PeerFault

from .mesh import MeshCollective

log = logging.getLogger(__name__)
EVERY_S = 0.02
END_S = 5.0  # seconds for the thread to end, which may be aborting


class DeviceWatchdog:
    """A thread that ends a device's waits by ``abort``: when a rank or this rank's fabric ends, or after a timeout. The
    next call of a method raises what it has found.
    """

    def __init__(self, mesh: MeshCollective, abort: Callable[[], None], timeout_s: float) -> None:
        """``abort``: called by the thread, at most once. ``timeout_s``: seconds for each piece of work that is
        watched.
        """
        self._mesh, self._abort, self._timeout_s = mesh, abort, timeout_s
        self._using = threading.Lock()  # protects the mesh, which has one reader at a time
        self._pending: deque[tuple[Callable[[], bool], float]] = deque()
        self._error: ChannelError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lamina-guard", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what was found: PeerFault, ChannelTimeout, ChannelAborted."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def mesh(self) -> Iterator[MeshCollective]:
        """The mesh, for the caller alone. Raises as ``check``."""
        with self._using:
            self.check()
            yield self._mesh

    def watch(self, done: Callable[[], bool]) -> None:
        """Watch a piece of work: ``done`` must return True in time, and is called by another thread."""
        self._pending.append((done, time.monotonic() + self._timeout_s))

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - no other code ends the waits
                known = error if isinstance(error, ChannelError) else PeerFault(f"rank {self._mesh.rank}: {error}")
                self._error = known
                log.info("rank %d ends what its device waits for: %s", self._mesh.rank, known)
                self._abort()
                return

    def _look(self) -> None:
        if self._using.acquire(blocking=False):  # else a caller waits there, and notices
            try:
                self._mesh.check()
            finally:
                self._using.release()
        while self._pending and self._pending[0][0]():
            self._pending.popleft()
        if self._pending and time.monotonic() > self._pending[0][1]:
            raise ChannelTimeout(
                f"rank {self._mesh.rank}: the device has waited {self._timeout_s:g} s for other ranks: one is out of "
                f"step, or is stopped"
            )
