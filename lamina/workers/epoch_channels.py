"""The channels of a worker in one epoch, opened with the epoch's number and closed together.

A peer of an older epoch is refused before any of its bytes are read, so no message of an older epoch reaches a worker
of a newer one. A peer of a newer epoch waits until this worker is in that epoch, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, ChannelUnreachable, Fabric, Listener, Terms

CONNECT_ATTEMPT_S = 1.0  # seconds of one attempt to connect, after which a worker checks if its epoch is over
# Seconds without any reply to attempts, after which a worker reports that it cannot reach a peer's host.
SILENT_S = 15.0
POLL_S = 0.25  # seconds without a connection, after which a worker checks if its epoch is over


class EpochListener:
    """A listener that stays open in all epochs. One thread uses it."""

    def __init__(self, listener: Listener) -> None:
        self.url = listener.url
        self._listener = listener
        self._early_arrivals: list[Channel] = []  # channels of epochs that this worker has not entered yet

    def accept(self, epoch: int, *, timeout_s: float) -> Channel | None:
        """Accept the next peer of ``epoch``; None if a peer of another epoch connected. Raises ChannelTimeout,
        ChannelAborted.
        """
        for channel in self._early_arrivals:
            if channel.epoch <= epoch:
                self._early_arrivals.remove(channel)
                return _of(epoch, channel)
        channel = self._listener.accept(timeout_s=timeout_s)
        if channel.epoch > epoch:
            self._early_arrivals.append(channel)
            return None
        return _of(epoch, channel)


def _of(epoch: int, channel: Channel) -> Channel | None:
    if channel.epoch == epoch:
        return channel
    channel.abort(f"epoch {channel.epoch} is over: this worker is in epoch {epoch}")
    channel.close()
    return None


class EpochFabric:
    """Connects and accepts in one epoch. ``end_epoch`` may be called by any thread."""

    def __init__(self, epoch: int, fabric: Fabric | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``fabric``: None for a worker that only accepts."""
        self.epoch = epoch
        self._fabric, self._clock = fabric, clock
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._attempts = dict[str, str]()  # the names of peers that were to be connected to, by URL
        self._end_reason = ""

    def connect(self, url: str, terms: Terms, *, timeout_s: float) -> Channel:
        """Connect as Fabric.connect does, in this epoch. Gives up when the epoch ends, as the peer may be in the next
        one and accept no connection of this one. Also gives up if a host is silent for SILENT_S.
        """
        if self._fabric is None:
            raise ValueError(f"{url}: this worker connects to no other one")
        self._attempts[url] = terms.peer
        terms, deadline = replace(terms, epoch=self.epoch), self._clock() + timeout_s
        heard = self._clock()
        while True:
            self._check()
            left = deadline - self._clock()
            try:
                return self._keep(self._fabric.connect(url, terms, timeout_s=min(left, CONNECT_ATTEMPT_S)))
            except ChannelTimeout as error:
                heard = heard if isinstance(error, ChannelUnreachable) else self._clock()
                if left <= CONNECT_ATTEMPT_S or self._clock() - heard > SILENT_S:
                    raise

    def peer_in_error(self, error: Exception) -> str:
        """Return the name of the peer at the URL that ``error`` begins with; "" if this worker did not connect to
        it.
        """
        url, _, _ = str(error).partition(": ")
        return self._attempts.get(url, "")

    def listener_for(self, listener: EpochListener) -> SingleEpochListener:
        """Return ``listener`` restricted to peers of this epoch."""
        return SingleEpochListener(self, listener)

    def accept(self, listener: EpochListener, timeout_s: float) -> Channel:
        """Accept the next peer of this epoch. Raises ChannelTimeout, or ChannelAborted if the epoch is over."""
        deadline = self._clock() + timeout_s
        while True:
            self._check()
            left = deadline - self._clock()
            try:
                channel = listener.accept(self.epoch, timeout_s=max(0.0, min(left, POLL_S)))
            except ChannelTimeout:
                if left <= POLL_S:
                    raise
                continue
            if channel is not None:
                return self._keep(channel)

    def end_epoch(self, reason: str) -> None:
        """End the epoch: abort its channels, and those that are opened later."""
        with self._lock:
            self._end_reason = self._end_reason or reason
            channels = list(self._channels)
        for channel in channels:
            channel.abort(reason)

    def abort(self, reason: str) -> None:
        """Abort all channels; the peers' calls fail with the reason."""
        for channel in self._channels:
            channel.abort(reason)

    def close(self) -> None:
        """Close all channels. Only for the thread that opened them; idempotent."""
        with self._lock:
            self._end_reason = self._end_reason or f"epoch {self.epoch} is over"
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _check(self) -> None:
        if self._end_reason:
            raise ChannelAborted(self._end_reason)

    def _keep(self, channel: Channel) -> Channel:
        """Register an opened channel; close it here if the epoch has ended, as ``close`` would not find it any more."""
        with self._lock:
            over = self._end_reason
            if not over:
                self._channels.append(channel)
                return channel
        channel.abort(over)
        channel.close()
        raise ChannelAborted(over)


class SingleEpochListener:
    """A listener in one epoch. ``close`` leaves it open for the next epoch."""

    def __init__(self, fabric: EpochFabric, listener: EpochListener) -> None:
        self.url = listener.url
        self._fabric, self._listener = fabric, listener

    def accept(self, *, timeout_s: float) -> Channel:
        """Accept the next peer of this epoch."""
        return self._fabric.accept(self._listener, timeout_s)

    def close(self) -> None:
        """Do nothing."""
