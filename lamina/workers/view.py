"""The channels that a worker has under one view: opened with the view as their epoch, and closed together.

A peer of an older view is turned away by its epoch, before any of its bytes are read: so no message of an older view
reaches a worker of a newer one. A peer of a newer view waits until this worker is in that view, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, ChannelUnreachable, Fabric, Listener, Terms

ATTEMPT_S = 1.0  # to be taken by a peer, before a worker looks whether its view is over
SILENT_S = 15.0  # of attempts that nothing answers; then a worker tells that it cannot reach a peer's host
LOOK_S = 0.25  # while nobody comes, before a worker looks whether its view is over


class ViewDoor:
    """A listener that stays open from view to view. One thread uses it."""

    def __init__(self, listener: Listener) -> None:
        self.url = listener.url
        self._listener = listener
        self._early: list[Channel] = []  # of views that this worker is not in yet

    def next(self, view: int, *, timeout_s: float) -> Channel | None:
        """The next peer of ``view``; None where another one came. Raises ChannelTimeout, ChannelAborted."""
        for channel in self._early:
            if channel.epoch <= view:
                self._early.remove(channel)
                return _of(view, channel)
        channel = self._listener.accept(timeout_s=timeout_s)
        if channel.epoch > view:
            self._early.append(channel)
            return None
        return _of(view, channel)


def _of(view: int, channel: Channel) -> Channel | None:
    if channel.epoch == view:
        return channel
    channel.abort(f"view {channel.epoch} is over: this worker is in view {view}")
    channel.close()
    return None


class ViewFabric:
    """Connects, and accepts, under one view. ``leave`` may come from any thread."""

    def __init__(self, view: int, fabric: Fabric | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``fabric``: None for one who only accepts."""
        self.view = view
        self._fabric, self._clock = fabric, clock
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._asked = dict[str, str]()  # the names of peers that were to be connected to, by URL
        self._over = ""

    def connect(self, url: str, terms: Terms, *, timeout_s: float) -> Channel:
        """Connect as Fabric.connect does, in this view's epoch; but no longer than this view lasts, as the peer may
        have gone on, and take nobody of this view any more, nor to a host that is silent for SILENT_S.
        """
        if self._fabric is None:
            raise ValueError(f"{url}: this worker connects to nobody")
        self._asked[url] = terms.peer
        terms, deadline = replace(terms, epoch=self.view), self._clock() + timeout_s
        heard = self._clock()
        while True:
            self._check()
            left = deadline - self._clock()
            try:
                return self._keep(self._fabric.connect(url, terms, timeout_s=min(left, ATTEMPT_S)))
            except ChannelTimeout as error:
                heard = heard if isinstance(error, ChannelUnreachable) else self._clock()
                if left <= ATTEMPT_S or self._clock() - heard > SILENT_S:
                    raise

    def peer_of(self, error: Exception) -> str:
        """The name of the peer that ``error``, of a channel or of connecting, begins with; empty: of none that was
        connected to.
        """
        url, _, _ = str(error).partition(": ")
        return self._asked.get(url, "")

    def at(self, door: ViewDoor) -> ViewListener:
        """The listener of ``door`` for peers of this view."""
        return ViewListener(self, door)

    def accept(self, door: ViewDoor, timeout_s: float) -> Channel:
        """The next peer of this view. Raises ChannelTimeout; ChannelAborted once the view is over."""
        deadline = self._clock() + timeout_s
        while True:
            self._check()
            left = deadline - self._clock()
            try:
                channel = door.next(self.view, timeout_s=max(0.0, min(left, LOOK_S)))
            except ChannelTimeout:
                if left <= LOOK_S:
                    raise
                continue
            if channel is not None:
                return self._keep(channel)

    def leave(self, reason: str) -> None:
        """The view is over: its channels are aborted, and so are those that would still be opened."""
        with self._lock:
            self._over = self._over or reason
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
            self._over = self._over or f"view {self.view} is over"
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _check(self) -> None:
        if self._over:
            raise ChannelAborted(self._over)

    def _keep(self, channel: Channel) -> Channel:
        """Behind the end of the view nobody else closes it."""
        with self._lock:
            over = self._over
            if not over:
                self._channels.append(channel)
                return channel
        channel.abort(over)
        channel.close()
        raise ChannelAborted(over)


class ViewListener:
    """A view's end of a door. It closes nothing: the door stays open for the next view."""

    def __init__(self, fabric: ViewFabric, door: ViewDoor) -> None:
        self.url = door.url
        self._fabric, self._door = fabric, door

    def accept(self, *, timeout_s: float) -> Channel:
        """The channel of the next peer of this view."""
        return self._fabric.accept(self._door, timeout_s)

    def close(self) -> None:
        """Nothing to do."""
