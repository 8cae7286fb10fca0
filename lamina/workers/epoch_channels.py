"""The channels that a worker has under one epoch: opened with the epoch as their epoch, and closed together.

A peer of an older epoch is turned away by its epoch, before any of its bytes are read: so no message of an older epoch
reaches a worker of a newer one. A peer of a newer epoch waits until this worker is in that epoch, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, ChannelUnreachable, Fabric, Listener, Terms

CONNECT_ATTEMPT_S = 1.0  # to be taken by a peer, before a worker looks whether its epoch is over
SILENT_S = 15.0  # of attempts that nothing answers; then a worker tells that it cannot reach a peer's host
POLL_S = 0.25  # while nobody comes, before a worker looks whether its epoch is over


class EpochListener:
    """A listener that stays open from epoch to epoch. One thread uses it."""

    def __init__(self, listener: Listener) -> None:
        self.url = listener.url
        self._listener = listener
        self._early_arrivals: list[Channel] = []  # of epochs that this worker is not in yet

    def accept(self, epoch: int, *, timeout_s: float) -> Channel | None:
        """The next peer of ``epoch``; None where another one came. Raises ChannelTimeout, ChannelAborted."""
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
    """Connects, and accepts, under one epoch. ``end_epoch`` may come from any thread."""

    def __init__(self, epoch: int, fabric: Fabric | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``fabric``: None for one who only accepts."""
        self.epoch = epoch
        self._fabric, self._clock = fabric, clock
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._attempts = dict[str, str]()  # the names of peers that were to be connected to, by URL
        self._end_reason = ""

    def connect(self, url: str, terms: Terms, *, timeout_s: float) -> Channel:
        """Connect as Fabric.connect does, in this epoch; but no longer than this epoch lasts, as the peer may
        have gone on, and take nobody of this epoch any more, nor to a host that is silent for SILENT_S.
        """
        if self._fabric is None:
            raise ValueError(f"{url}: this worker connects to nobody")
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
        """The name of the peer that ``error``, of a channel or of connecting, begins with; empty: of none that was
        connected to.
        """
        url, _, _ = str(error).partition(": ")
        return self._attempts.get(url, "")

    def listener_for(self, listener: EpochListener) -> SingleEpochListener:
        """The listener of ``listener`` for peers of this epoch."""
        return SingleEpochListener(self, listener)

    def accept(self, listener: EpochListener, timeout_s: float) -> Channel:
        """The next peer of this epoch. Raises ChannelTimeout; ChannelAborted once the epoch is over."""
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
        """The epoch is over: its channels are aborted, and so are those that would still be opened."""
        with self._lock:
            self._end_reason = self._end_reason or reason
            channels = list(self._channels)
        for channel in channels:
            channel.abort(reason)

    def abort(self, reason: str) -> None:
        """Tell all peers, whose calls fail with the reason."""
        for channel in self._channels:
            channel.abort(reason)

    def close(self) -> None:
        """Let go of all channels. For the thread that opened them; idempotent."""
        with self._lock:
            self._end_reason = self._end_reason or f"epoch {self.epoch} is over"
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _check(self) -> None:
        if self._end_reason:
            raise ChannelAborted(self._end_reason)

    def _keep(self, channel: Channel) -> Channel:
        """Behind the end of the epoch nobody else closes it."""
        with self._lock:
            over = self._end_reason
            if not over:
                self._channels.append(channel)
                return channel
        channel.abort(over)
        channel.close()
        raise ChannelAborted(over)


class SingleEpochListener:
    """An epoch's end of a door. It closes nothing: the door stays open for the next epoch."""

    def __init__(self, fabric: EpochFabric, listener: EpochListener) -> None:
        self.url = listener.url
        self._fabric, self._listener = fabric, listener

    def accept(self, *, timeout_s: float) -> Channel:
        """The channel of the next peer of this epoch."""
        return self._fabric.accept(self._listener, timeout_s)

    def close(self) -> None:
        """Nothing to do."""
