"""The common part of all transports: the contract's checks that need no wire, and the list of what a fabric
has open.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

from .channel_terms import Geometry
from .fabric import TAG_BYTES, Arrival, Slot

KEY_BYTES_MIN = 16
RDMA_DEVICE = "LAMINA_RDMA_DEVICE"  # set on a host: NAME, NAME:PORT or NAME:PORT:GID INDEX; default: the nearest port
RDMA_FLAG = "--rdma-device"  # the same for all hosts; it comes first
NAMED_BY = f"{RDMA_FLAG} or {RDMA_DEVICE}"
SPIN_S = 50e-6  # about one wake-up of a sleeper on another core; a peer on this core needs it more


class _Closable(Protocol):
    def close(self) -> None: ...


class BaseChannel(ABC):
    """Order and bounds of a channel; a transport implements four steps, ``abort`` and ``close``. The native transports
    have the same in csrc/netstack/native_channel.cpp.
    """

    def __init__(self, peer: str, epoch: int, outbound: Geometry, inbound: Geometry, peer_name: str) -> None:
        self.peer = peer
        self.peer_name = peer_name
        self.epoch = epoch
        self.outbound = outbound
        self.inbound = inbound
        self._granted: deque[Slot] = deque()
        self._arrived: deque[Arrival] = deque()

    def calls(self) -> object | None:
        """Return None: this channel is not native."""
        return None

    def reserve(self, nbytes: int, *, timeout_s: float = 0.0) -> Slot:
        if not 0 <= nbytes <= self.outbound.slot_bytes:
            raise ValueError(f"{self.peer}: a message has 0..{self.outbound.slot_bytes} bytes, not {nbytes}")
        index, data = self._grant(nbytes, timeout_s)
        slot = Slot(data, index)
        self._granted.append(slot)
        return slot

    def put_signal(self, slot: Slot, tag: bytes) -> int:
        if not self._granted or self._granted[0] is not slot:
            raise ValueError(f"{self.peer}: put_signal takes each reserved slot once, in the order reserved")
        if len(tag) > TAG_BYTES:
            raise ValueError(f"{self.peer}: a tag has at most {TAG_BYTES} bytes, not {len(tag)}")
        seqno = self._publish(slot, tag)
        self._granted.popleft()
        return seqno

    def wait_signal(self, *, timeout_s: float) -> Arrival:
        arrival = Arrival(*self._take(timeout_s))
        self._arrived.append(arrival)
        return arrival

    def release(self, arrival: Arrival) -> None:
        if not self._arrived or self._arrived[0] is not arrival:
            raise ValueError(f"{self.peer}: release takes each arrival once, in the order in which they came")
        self._arrived.popleft()
        self._give_back()

    @abstractmethod
    def _grant(self, nbytes: int, timeout_s: float) -> tuple[int, memoryview]:
        """Wait for a free slot; return its index and a writable view of ``nbytes``."""

    @abstractmethod
    def _publish(self, slot: Slot, tag: bytes) -> int:
        """Send the oldest granted slot; return its seqno."""

    @abstractmethod
    def _take(self, timeout_s: float) -> tuple[int, bytes, memoryview]:
        """Wait for the next message; return seqno, padded tag, read-only view."""

    @abstractmethod
    def _give_back(self) -> None:
        """Free the slot of the oldest arrival. Does nothing once the channel is unusable."""

    @abstractmethod
    def abort(self, reason: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class BaseFabric:
    """The key, and everything that was opened and not yet dropped."""

    scheme: str
    in_process: bool = False
    remarks: Sequence[str] = ()

    def __init__(self, key: bytes) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise ValueError(f"key needs {KEY_BYTES_MIN} bytes or more, not {len(key)}; use secrets.token_bytes(32)")
        self._key = key
        self._opened: WeakSet[_Closable] = WeakSet()

    def close(self) -> None:
        """Close all that is open, even if one of them fails; the failure is raised at the end."""
        with ExitStack() as stack:
            for opened in list(self._opened):
                stack.callback(opened.close)

    def _address(self, url: str) -> str:
        prefix = f"{self.scheme}://"
        if not url.startswith(prefix):
            raise ValueError(f"url {url!r} is not of this transport; it starts with {prefix}")
        return url.removeprefix(prefix)


def one_line(words: str) -> str:
    """Return a peer's text, which may contain anything, in a form for errors and logs."""
    return "".join(character if character.isprintable() else " " for character in words)


def rdma_device(told: str = "") -> str:
    """Return the RDMA device that was named: for all hosts, else for this one; "" if none was."""
    return told or os.environ.get(RDMA_DEVICE, "")


def usable_spin(spin_s: float) -> float:
    """Return how long a wait may spin before it sleeps: 0 on a host with one CPU. A process bound to one CPU spins. Its
    peer may be bound to another CPU; otherwise spins that fail soon become rare (csrc/netstack/engine.h).
    """
    return spin_s if (os.cpu_count() or 1) > 1 else 0.0
