"""Looks after what devices do with other ranks while hosts go on: nobody there would notice that a rank has gone."""

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
END_S = 5.0  # for the thread, which may be ending what devices wait for


class DeviceWatchdog:
    """A thread that ends a device's waits, by ``abort``, once a rank or this one's fabric has gone, or after a time.
    What it has found is raised from the next call here.
    """

    def __init__(self, mesh: MeshCollective, abort: Callable[[], None], timeout_s: float) -> None:
        """``abort``: called once at most, by this thread. ``timeout_s``: for what is to be watched, each."""
        self._mesh, self._abort, self._timeout_s = mesh, abort, timeout_s
        self._using = threading.Lock()  # the mesh, which has one reader at a time
        self._pending: deque[tuple[Callable[[], bool], float]] = deque()
        self._error: ChannelError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lamina-guard", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what has been found: PeerFault, ChannelTimeout, ChannelAborted."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def mesh(self) -> Iterator[MeshCollective]:
        """The mesh, for the caller alone. Raises as ``check``."""
        with self._using:
            self.check()
            yield self._mesh

    def watch(self, done: Callable[[], bool]) -> None:
        """``done`` is to be true in time; asked from another thread."""
        self._pending.append((done, time.monotonic() + self._timeout_s))

    def close(self) -> None:
        """Idempotent."""
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
        if self._using.acquire(blocking=False):  # else somebody waits there, and notices
            try:
                self._mesh.check()
            finally:
                self._using.release()
        while self._pending and self._pending[0][0]():
            self._pending.popleft()
        if self._pending and time.monotonic() > self._pending[0][1]:
            raise ChannelTimeout(
                f"rank {self._mesh.rank}: the device has waited {self._timeout_s:g} s for other ranks: one is out of "
                f"step, or stands still"
            )
