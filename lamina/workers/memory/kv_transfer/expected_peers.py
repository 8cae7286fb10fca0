"""Other workers that are to connect to this one in an epoch for transfers of KV."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from lamina.netstack import Channel

log = logging.getLogger(__name__)


class ExpectedPeers:
    """The workers that are to connect, by name. Their channels wait until this worker can serve them. One thread uses
    it.
    """

    def __init__(self, names: Iterable[str], clock: Callable[[], float]) -> None:
        self._names, self._clock = set(names), clock
        self._due, self._deadline = set(self._names), math.inf
        self._waiting: list[Channel] = []
        self._attach: Callable[[Channel], object] = self._waiting.append

    @property
    def num_missing(self) -> int:
        """The number of workers that are still to connect; 0 after the time limit. Their KV is useful, but not
        necessary.
        """
        if self._due and self._clock() > self._deadline:
            log.warning("%s did not connect in time, and no KV is transferred there", ", ".join(sorted(self._due)))
            self._due.clear()
        return len(self._due)

    def accept(self, channel: Channel) -> bool:
        """Take ``channel`` if it is of an expected worker, and return whether it is. A worker may come again."""
        if channel.peer_name not in self._names:
            return False
        self._due.discard(channel.peer_name)
        self._attach(channel)
        return True

    def serve(self, attach: Callable[[Channel], object], timeout_s: float) -> None:
        """Pass all channels to ``attach`` from now on. Workers have ``timeout_s`` seconds to connect."""
        self._attach, self._deadline = attach, self._clock() + timeout_s
        for channel in self._waiting:
            attach(channel)
