"""Transfers of KV into and out of this worker's memory, part by part, wherever the other end is: a peer or storage.

A part is copied under the lock of its TransferTable, unless its transfer has ended. So nothing is written to memory
after a transfer was cancelled or given up. A layer may be waited for: all parts up to it are copied then. A transfer
ends once: when all is copied, by an error, or without a word, when it is cancelled or its epoch ends.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lamina.netstack import PeerFault
from lamina.workers.staging import Staging


class TransferError(PeerFault):
    """A transfer has failed. The text names the peer and the transfer."""


class TransferRefusedError(TransferError):
    """The peer lacks the requested KV. Its other transfers continue."""


class TransferGoneError(TransferRefusedError):
    """The peer stores nothing of the requested KV, such as after it was evicted."""


class TransferPart(NamedTuple):
    """One message of a transfer. ``copy``: at the sender, copies KV into the message; at the receiver, out of it. The
    staging is that of the calling thread. ``layer``: of the KV, the first one if there are more. ``read``: where no
    peer sends it, returns the message.
    """

    nbytes: int
    copy: Callable[[Any, Staging], object]
    layer: int = 0
    read: Callable[[], Any] | None = None


ALL_LAYERS = sys.maxsize - 1  # of a wait


def _nothing(*transfer: object) -> None:
    pass


class Transfer:
    """A transfer under way, at either end. ``nbytes``: copied so far. ``error``: why it has failed. ``is_over``: True
    after its end.
    """

    def __init__(
        self,
        number: int,
        parts: Iterable[TransferPart],
        silence_s: float = math.inf,
        on_end: Callable[[Any], None] = _nothing,
    ) -> None:
        """``parts``: read one by one, the next one after the last one was copied. ``on_end``: called at the end, from
        any thread. ``silence_s``: seconds without a message of a peer that has to send it.
        """
        self.number, self.silence_s, self.on_end = number, silence_s, on_end
        self._parts = iter(parts)
        self.next_part: TransferPart | None = next(self._parts, None)
        self.index = self.nbytes = 0  # number of the next part
        self.started_at = 0.0
        self.is_over = False
        self.error: TransferError | None = None

    @property
    def next_layer(self) -> int:
        """The first layer that is not copied; above all layers if all are."""
        part = self.next_part
        return sys.maxsize if part is None else part.layer

    def has_layer(self, layer: int) -> bool:
        """Return whether all parts of the layers up to ``layer`` are copied."""
        return self.next_layer > layer

    def advance(self, nbytes: int) -> None:
        """Note that the next part is copied, with ``nbytes``."""
        self.nbytes += nbytes
        self.index += 1
        self.next_part = next(self._parts, None)


class TransferTable:
    """The transfers that are under way at one end, by number."""

    def __init__(self, changed: threading.Condition, peer: str) -> None:
        """``changed``: protects the transfers, and the memory into which parts are copied. Tables may share it.
        ``peer``: the name of the other end.
        """
        self._changed, self._peer = changed, peer
        self.under_way: dict[int, Transfer] = {}
        self.last = -1  # the highest number that was begun
        self.num_copied = 0  # parts, of all transfers
        self._given_up, self._is_stopped = "", False

    def begin(self, transfer: Transfer) -> bool:
        """Add a transfer. Returns whether it is under way: it has parts, and has not failed. None is after a stop."""
        with self._changed:
            self.last = max(self.last, transfer.number)
            transfer.is_over = transfer.next_part is None or bool(self._given_up) or self._is_stopped
            transfer.error = self.error_of(transfer, self._given_up) if self._given_up else None
            ends = transfer.is_over and not self._is_stopped
            if not transfer.is_over:
                self.under_way[transfer.number] = transfer
            self._changed.notify_all()
        if ends:
            transfer.on_end(transfer)
        return not transfer.is_over

    def copy_part(self, transfer: Transfer, nbytes: int, copy: Callable[[], object] = _nothing) -> bool:
        """Copy the next part, of ``nbytes``, unless the transfer has ended. Returns whether it was copied."""
        with self._changed:
            if transfer.is_over:
                return False
            copy()
            transfer.advance(nbytes)
            self.num_copied += 1
            if is_done := transfer.next_part is None:
                self._remove(transfer)
            self._changed.notify_all()
        if is_done:
            transfer.on_end(transfer)
        return True

    def fail(self, transfer: Transfer, reason: str, kind: type[TransferError] = TransferError) -> None:
        """Give a transfer up, unless it has ended."""
        with self._changed:
            if transfer.is_over:
                return
            transfer.error = self.error_of(transfer, reason, kind)
            self._remove(transfer)
            self._changed.notify_all()
        transfer.on_end(transfer)

    def fail_all(self, reason: str) -> None:
        """Give all transfers up, also later ones."""
        with self._changed:
            self._given_up = self._given_up or reason
            lost = list(self.under_way.values())
        for transfer in lost:
            self.fail(transfer, self._given_up)

    def error_of(self, transfer: Transfer, reason: str, kind: type[TransferError] = TransferError) -> TransferError:
        """Return an error that names the transfer."""
        return kind(f"{reason} (transfer {transfer.number} of {self._peer})")

    def cancel(self, number: int) -> bool:
        """End a transfer without ``on_end``, and return whether it was under way. Nothing of it is copied any more when
        this returns.
        """
        with self._changed:
            if (transfer := self.under_way.get(number)) is not None:
                self._remove(transfer)
                self._changed.notify_all()
            return transfer is not None

    def stop(self) -> None:
        """Cancel all transfers, and begin none."""
        with self._changed:
            self._is_stopped = True
            for number in list(self.under_way):
                self.cancel(number)

    def wait(self, transfer: Transfer, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until all parts up to ``layer`` are copied, or the transfer has ended. Returns whether this is so, after
        ``timeout_s`` seconds at most.
        """
        with self._changed:
            return self._changed.wait_for(lambda: transfer.is_over or transfer.has_layer(layer), timeout_s)

    def _remove(self, transfer: Transfer) -> None:
        transfer.is_over = True
        self.under_way.pop(transfer.number, None)
