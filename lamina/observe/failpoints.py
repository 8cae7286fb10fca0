"""Failpoints: a drill or a check names an event at which a worker kills itself, so that it dies between two messages.

Active only if LAMINA_TRIPWIRE names a file.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from pathlib import Path

from .trace import CAPACITY, NULL_RECORDER, Event, Recorder, StepRef

FAILPOINT = "LAMINA_TRIPWIRE"
UNCOLLECTED_CAPACITY = 1 << 8  # records, which are never collected
_WORDS = struct.Struct("=qqq")  # pid of a process, an event, how often it is still to come
_WORD = struct.Struct("=q")
_LEFT = 16  # offset of the last one
NO_PROCESS = 0


class Failpoint:
    """A file that workers map; native modules use the same one in csrc/spans.h. One process arms it."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises ValueError for a file of another kind, a link, or another user's file."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ValueError(f"{FAILPOINT}={path}: {e.strerror}: unset it; drill and check set it") from None
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or status.st_size not in (0, _WORDS.size):
                raise ValueError(f"{FAILPOINT}={path} is no tripwire of this user: unset it; drill and check set it")
            if not status.st_size:
                os.ftruncate(fd, _WORDS.size)
            self.memory = mmap.mmap(fd, _WORDS.size)
        finally:
            os.close(fd)

    def arm(self, pid: int, event: int, times: int) -> None:
        """Make process ``pid`` end when ``event`` comes for the ``times``-th time."""
        self.disarm()
        _WORDS.pack_into(self.memory, 0, pid, event, 0)
        _WORD.pack_into(self.memory, _LEFT, times)

    def disarm(self) -> bool:
        """Clear the failpoint. Returns whether it had fired."""
        tripped = self.has_fired
        _WORDS.pack_into(self.memory, 0, NO_PROCESS, 0, 0)
        return tripped

    @property
    def has_fired(self) -> bool:
        """Return whether the armed event has come."""
        pid, _, left = _WORDS.unpack_from(self.memory)
        return pid != NO_PROCESS and not left

    def num_until(self, event: int) -> int:
        """Return how often ``event`` is still to come in this process."""
        pid, named, left = _WORDS.unpack_from(self.memory)
        return left if event == named and pid == os.getpid() else 0

    def on_fired(self) -> None:
        """Record that the armed event has come, and that this process continues."""
        _WORD.pack_into(self.memory, _LEFT, 0)

    def hit(self, event: Event) -> None:
        """Count an event of this process, and kill the process if it is the armed one."""
        if (left := self.num_until(event)) > 0:
            _WORD.pack_into(self.memory, _LEFT, left - 1)
            if left == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class FailpointRecorder(Recorder):
    """A recorder that counts added events at a failpoint. Native modules count their own, which come by ``put``."""

    def __init__(self, tripwire: Failpoint, capacity: int) -> None:
        super().__init__(capacity)
        self._tripwire = tripwire

    @property
    def native_buffer(self) -> object:
        return memoryview(self._tripwire.memory)

    def is_due(self, event: int) -> bool:
        return self._tripwire.num_until(event) > 0

    def on_failpoint_passed(self, event: int) -> None:
        self._tripwire.on_fired()

    def add(self, event: Event, start: float, at: StepRef, layer: int = -1, peer: int = -1, value: int = 0) -> float:
        now = super().add(event, start, at, layer, peer, value)
        self._tripwire.hit(event)
        return now


def recorder(on: bool) -> Recorder:
    """Return a Recorder, or NULL_RECORDER; one with a failpoint if the environment names its file."""
    if path := os.environ.get(FAILPOINT):
        return FailpointRecorder(Failpoint(Path(path)), CAPACITY if on else UNCOLLECTED_CAPACITY)
    return Recorder() if on else NULL_RECORDER
