"""The seam of the network stack: a fabric opens channels, a channel moves messages into granted slots.

The vocabulary is one-sided, because RDMA hardware works so, and the other transports can imitate it without loss. A
place in the peer's inbox is *reserved*, bytes are written there, and the *signal* (a sequence number) is put after
them. The receiver polls the signal; its CPU takes no part in the transfer.

Contract, the same for every transport (tests/contract/test_transports.py runs it over the whole table):

1. Order. Signals of one direction become visible in the order of ``put_signal``. When a signal is visible, all bytes of
   its message are visible. ``wait_signal`` returns messages in that order, each exactly once.
2. Ownership. Between ``reserve`` and ``put_signal`` the slot's bytes belong to the sender. Between ``wait_signal`` and
   ``release`` the arrival's bytes belong to the receiver and do not change. Touching a view outside its span is
   undefined. Arrivals are released in the order in which they came.
3. Flow. A direction has ``Geometry.slots`` slots. ``reserve`` never waits silently: with no slot free it raises
   ``NoResource`` once its timeout (default 0) has passed. A slot is free again when the peer has released it.
4. Bounds. A message is at most ``Geometry.slot_bytes`` long; more raises ``ValueError`` before anything is sent.
   Nothing that a peer writes can make this side touch memory outside the channel's own slots.
5. Time. Every blocking call takes a timeout and raises ``ChannelTimeout`` when it has passed. The death of a peer's
   process is noticed within ``DEATH_NOTICED_S``, that of its host within ``HOST_NOTICED_S``. It raises ``PeerFault``
   from the calls in progress and from all later ones. Messages that were complete before may still be received first.
6. Epoch. A channel lives in exactly one epoch, the top 16 bits of its 64-bit sequence numbers. A link is reset by
   connecting again with a higher epoch: fresh memory and numbers, so a late writer of the old epoch hits nothing. A
   channel cannot be revived.
7. Threads. One thread sends and one receives on a channel (they may be the same). ``abort`` and ``close`` may be called
   from any thread and wake both.

Peers authenticate each other with the fabric's key before either allocates anything for the other. They prove names
too: a connector names itself and the peer that it wants, and a listener of another name refuses. A name is text of at
most ``NAME_BYTES`` bytes in UTF-8, without a NUL. An empty one stands for a peer without a name, not for any peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .channel_terms import DEFAULT_LISTEN_TERMS, Geometry, ListenTerms, Terms

DEATH_NOTICED_S = 2.0
CONNECT_S = 10.0  # default time in which a listener must accept a connector
HOST_NOTICED_S = 15.0  # a dead host gives no other sign than silence
TAG_BYTES = 32


class ChannelError(Exception):
    """A transport failed; the text names the peer, the operation and the cause."""


class NoResource(ChannelError):  # noqa: N818
    """No free slot within the timeout: the peer has not released enough arrivals."""


class ChannelTimeout(ChannelError):  # noqa: N818
    """The deadline of a wait passed; the channel itself is still usable."""


class ChannelUnreachable(ChannelTimeout):
    """There is no reply from the peer's address, not even from its host; it may come later."""


class PeerFault(ChannelError):  # noqa: N818
    """The peer died, closed, or broke the protocol; the channel is unusable."""


class ChannelAborted(ChannelError):  # noqa: N818
    """``abort`` or ``close`` was called on this side; the channel is unusable."""


class HandshakeError(ChannelError):
    """The peer has another key, name, version or geometry than ours; nothing was allocated for it."""


@dataclass(slots=True)
class Slot:
    """A granted place in the peer's inbox. The sender writes to ``data``: the inbox itself if memory is shared,
    otherwise registered staging that ``put_signal`` transmits.
    """

    data: memoryview  # writable, flat, exactly the reserved size
    index: int  # position in the ring; put_signal takes slots in the order reserved


@dataclass(slots=True)
class Arrival:
    """One received message. ``data`` is readable until ``Channel.release``."""

    seqno: int  # epoch << 48 | count, count from 1
    tag: bytes  # TAG_BYTES, opaque to this layer
    data: memoryview  # read-only, flat


class Channel(Protocol):
    """One peer, one epoch, both directions. See the module's contract."""

    peer: str  # URL or address of the other side, for messages to people
    peer_name: str  # the name that the other side has proven
    epoch: int
    outbound: Geometry  # the peer's inbox
    inbound: Geometry  # this side's

    def reserve(self, nbytes: int, *, timeout_s: float = 0.0) -> Slot:
        """Grant the next slot of the peer's inbox, for a message of exactly ``nbytes``."""
        ...

    def put_signal(self, slot: Slot, tag: bytes) -> int:
        """Publish the slot: its bytes, then the signal.

        ``tag`` has at most TAG_BYTES and arrives zero-padded. Returns the signal's sequence number; after that the slot
        is not needed. A transport that has to wait for its wire raises PeerFault, after its own time limit, if the peer
        receives nothing.
        """
        ...

    def wait_signal(self, *, timeout_s: float) -> Arrival:
        """Return the next message in order. ``timeout_s=0`` polls."""
        ...

    def release(self, arrival: Arrival) -> None:
        """Return the arrival's slot to the sender; its ``data`` must not be touched afterwards.

        Raises ValueError out of order. Does nothing on a channel that is over, so it may stand in a ``finally``.
        """
        ...

    def abort(self, reason: str) -> None:
        """Fail this side's calls with ChannelAborted, the peer's with PeerFault. From any thread; idempotent."""
        ...

    def close(self) -> None:
        """Free all resources: memory, sockets, descriptors. Idempotent. Views that were handed out become invalid."""
        ...

    def calls(self) -> object | None:
        """Return a capsule of csrc/netstack/calls.h, by which other native modules use the channel without owning it;
        None if the channel is not native.
        """
        ...


class DeviceSide(Protocol):
    """A channel as kernels of one GPU use it. Each call puts a kernel on ``stream``, a CUDA handle, or, while that is
    captured, into the graph; it returns at once.

    The module's contract holds for messages, with these differences:

    1. Memory. Numbers that may change between replays of a graph are read by the running kernel from memory of the GPU:
       lengths (u64) and tags (TAG_BYTES). Addresses are part of the launch.
    2. Order. Kernels that send are ordered by the stream, or by edges of graphs; so are those that receive.
    3. Time. No kernel waits longer than ``timeout_ns`` for its peer, and none for a peer whose end was noticed.
    4. Slots. A kernel that has received frees the slot. The sender is sure to learn of it once two thirds of its slots
       are free, and with the next message to it. It also does once a kernel here waits for a slot itself, and at
       ``take_from_device``.
    5. Failure. ``status`` is the address of an int32 that is 0 at first. A kernel that fails sets it, and later ones
       with the same status do nothing. Their outputs stay as they were, so data damaged by a failure is not sent on.
       ``check`` raises the failure.
    6. Lanes. Messages of ``bulk`` are in order among themselves, and so are all others. Neither waits for queued
       messages of the other, nor takes its slots; each lane has the same number of its own. A transport without such
       queues has one lane for both. So both ends name the same lane for a message, and receive in the order of sending.
    7. Length. ``most``: bytes that a message of this launch may have at most; 0: few. Many blocks copy a long one.
    8. Several channels. Views whose ``fuses_with`` is equal, and not None, may be used in one launch, by any of them:
       ``send_all`` and ``receive_all``. The caller is inside of ``launching`` of all of them.
    """

    @property
    def recordable(self) -> bool:
        """True if calls may be captured. If False, a call may first wait up to ``timeout_ns`` until the peer's host has
        put the kernel that this one needs. Then both ends must be used by threads of their own.
        """
        ...

    @property
    def bulk(self) -> DeviceSide:
        """The lane for messages on which no other message may wait, from the connector to the listener only; or this
        lane.
        """
        ...

    def send(
        self, stream: int, source: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        """Put the ``*nbytes`` at ``source``, with the tag at ``tag``, once a slot is free."""
        ...

    def send_two(
        self, stream: int, first: int, second: int, nbytes: int, tag: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        """``send`` one message: ``nbytes[0]`` at ``first``, followed by ``nbytes[1]`` at ``second``."""
        ...

    def receive_due(
        self, stream: int, target: int, nbytes: int, tag: int, note: int, timeout_ns: int, status: int, most: int = 0
    ) -> None:
        """Copy the next message to ``target`` and free its slot, if it is the expected one: ``*nbytes`` long, with the
        tag at ``tag``. Another message is a failure, described at ``note``: its length and tag, then the expected ones.
        """
        ...

    @property
    def fuses_with(self) -> object:
        """A value that views have in common whose messages may be parts of one launch; None: there are none."""
        ...

    def share(
        self, nbytes: int, tag: int, note: int, status: int, at: tuple[int, int], width: tuple[int, int]
    ) -> bytes:
        """Return this channel's entry of a table for ``send_all`` and ``receive_all``, which lies in the GPU's memory.
        Addresses are those of ``send_two`` and ``receive_due``. The message is, of each row of the launch's tensors,
        the ``width`` bytes that begin at ``at``.
        """
        ...

    def send_all(
        self, stream: int, shares: int, count: int, rows: tuple[int, int, int, int], timeout_ns: int, most: int
    ) -> None:
        """Send a message over each of the ``count`` channels of the table at ``shares``, none of which waits for
        another one. ``rows``: the address of a tensor and the bytes from one of its rows to the next; then those of a
        second tensor, or zeros.
        """
        ...

    def receive_all(
        self, stream: int, shares: int, count: int, rows: tuple[int, int], timeout_ns: int, most: int
    ) -> None:
        """Receive a message of each of the ``count`` channels, which must be the expected one, into the rows of a
        tensor.
        """
        ...

    def launching(self) -> AbstractContextManager[bool]:
        """Enter this block to launch a graph that holds calls, or a launch of several channels. Within it the channel
        is not closed. Yields False if it is closed already and the graph's memory is gone; ``check`` raises then.
        """
        ...

    def check(self, status: int) -> None:
        """Raise the error that a ``status`` other than 0 means: ChannelTimeout, PeerFault, ChannelAborted."""
        ...


@runtime_checkable
class DeviceChannel(Protocol):
    """The additional calls of a Channel that kernels can use. Kernels and its calls must not use it at the same time.
    Kernels are sure to get messages of kernels, and calls those of calls.
    """

    @property
    def gpu(self) -> int:
        """The number of the GPU whose kernels can use the channel, as CUDA counts GPUs in this process."""
        ...

    def hand_to_device(self) -> DeviceSide:
        """Return the channel for kernels, which use it from now on. Slots that calls have reserved are put, arrivals
        are released. May raise ChannelError.
        """
        ...

    def take_from_device(self) -> None:
        """Let calls continue where the kernels ended; no kernel may be running any more."""
        ...


class Listener(Protocol):
    """A place where peers connect."""

    url: str  # the URL for Fabric.connect; contains the real port or name

    def accept(self, *, timeout_s: float) -> Channel:
        """Return the channel of the next authenticated peer. Other peers are dropped without ending the wait; a
        ChannelTimeout's text has the reason of the last one.
        """
        ...

    def close(self) -> None:
        """Stop listening; channels that were accepted live on. Idempotent."""
        ...


class Fabric(Protocol):
    """A transport, opened with the key that its peers share."""

    scheme: str
    in_process: bool  # True: both ends must live in one process
    remarks: Sequence[str]  # what it lacks on this host, and why: it works, at a price

    def listen(self, address: str = "", reception: ListenTerms = DEFAULT_LISTEN_TERMS) -> Listener:
        """Listen at ``address`` (the part of a URL after ``scheme://``); empty: any free private one."""
        ...

    def connect(self, url: str, terms: Terms, *, timeout_s: float = CONNECT_S) -> Channel:
        """Connect to a listener, which refuses if its name is not the one that ``terms`` want."""
        ...

    def close(self) -> None:
        """Close all listeners and channels of this fabric. Idempotent."""
        ...
