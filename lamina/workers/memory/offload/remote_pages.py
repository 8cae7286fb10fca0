"""Pages that lie on another host: a worker that lacks a fragment requests it from the memory workers there.

In an epoch each worker connects to each other one and sends requests. The other one replies from its storage backend,
on a thread of its own. A request is a PageRequest in msgpack. The reply to one with a key is the bytes of the
fragments, one after another, in parts; or that they are lost. The reply to one without a key is the keys of pages that
have all of the fragments, in parts that end with an empty one. Received pages are used, and not stored here: the driver
counts them as available as long as the other host has them.
"""

from __future__ import annotations

import enum
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lamina.kv.pages import PageFragment
from lamina.kv.storage import FragmentLostError, StorageBackend, StorageError
from lamina.netstack import Channel, ChannelError, ChannelTimeout, Geometry, Terms
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.protocol.control import Address
from lamina.protocol.offload_messages import MAX_LISTED_PAGES
from lamina.protocol.step_plan import KEY_BYTES, ProtocolError
from lamina.utils.background_thread import LowPriorityCall
from lamina.workers.epoch_channels import EpochFabric, SingleEpochListener
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.rpc import serve_requests

log = logging.getLogger(__name__)
PART_BYTES = 1 << 20  # bytes of one part of a reply
SLOTS = 4
# Seconds to connect and for the first reply: the other worker may still start; the epoch's end also ends it.
CONNECT_S = 600.0
ANSWER_S = 10.0  # seconds for a later part of a reply: the other end waits for its disk
# Seconds for other workers to connect, after they can be served: pages of theirs are useful, but not necessary.
ACCEPT_TIMEOUT_S = 60.0
END_S = 0.5  # seconds for a reply that is under way as the epoch ends
_TAG = struct.Struct(f"<I{CHECKSUM_BYTES}s")


class PageReplyKind(enum.IntEnum):
    PART = 1
    MISSING = 2


class PageRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for fragments. ``key``: of their page; empty: for the keys of pages that have all of the fragments."""

    key: bytes
    fragments: list[PageFragment]


_decode = msgspec.msgpack.Decoder(PageRequest).decode


class RemotePages:
    """The remote pages of one epoch of a memory worker. Only the thread that serves rounds calls methods other than
    ``read``.
    """

    def __init__(
        self,
        view: EpochFabric,
        listener: SingleEpochListener,
        peers: Sequence[Address],
        meter: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``peers``: all workers that have pages for each other, including this one; empty if there are none."""
        self._view, self._listener, self._meter, self._clock = view, listener, meter, clock
        self._peers = [peer for peer in peers if peer.url != listener.url]
        self._name = next((peer.name for peer in peers if peer.url == listener.url), "")
        self._names = {peer.name for peer in self._peers}
        self._due, self._until = set(self._names), math.inf  # the workers that are still to connect
        self._waiting_channels: list[Channel] = []  # not served before there is a storage backend
        self._medium: StorageBackend | None = None
        self._locations: dict[bytes, _PageSource] = {}
        self._threads: list[threading.Thread] = []
        self._reading = threading.Lock()
        self._connecting = LowPriorityCall(self._connect, "lamina-peers") if self._due else None

    @property
    def num_missing(self) -> int:
        """The number of workers that are still to connect; 0 after a time limit."""
        if self._due and self._clock() > self._until:
            log.warning("%s did not connect for pages in %g s", ", ".join(sorted(self._due)), ACCEPT_TIMEOUT_S)
            self._due.clear()
        return len(self._due)

    def accept(self, timeout_s: float) -> Channel | None:
        """Accept the next worker and return its channel; None if it connected to request pages. Raises as
        SingleEpochListener.
        """
        channel = self._listener.accept(timeout_s=timeout_s)
        if channel.peer_name not in self._names:
            return channel
        self._due.discard(channel.peer_name)
        self._waiting_channels.append(channel)
        self._hear()
        return None

    def serve(self, medium: StorageBackend) -> None:
        """Reply to requests from ``medium`` from now on."""
        self._medium, self._until = medium, self._clock() + ACCEPT_TIMEOUT_S
        self._hear()

    def set_locations(self, share: frozenset[PageFragment], own: Sequence[bytes] = ()) -> list[bytes]:
        """Return keys of pages of which another host has all of ``share``, followed by ``own``, which are here. These
        are at most MAX_LISTED_PAGES. All workers have connected before.
        """
        sources = self._reached() if share else {}
        for name, asked in sources.items():
            try:
                for key in asked.keys(share):
                    self._locations.setdefault(key, asked)
            except StorageError as e:  # a lost worker ends the epoch anyway
                log.warning("pages of %s are not found: %s", name, e)
        here = set(own)
        return [*(key for key in self._locations if key not in here), *own][-MAX_LISTED_PAGES:]

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Read a page like StorageBackend.read, from another host if this one lacks fragments. For one thread.
        Fragments of a host that does not reply are lost.
        """
        assert self._medium is not None
        try:
            self._medium.read(key, into)
        except FragmentLostError:
            if (asked := self._locations.get(key)) is None:
                raise
            try:
                with self._reading:
                    asked.page(key, into)
            except FragmentLostError:
                raise
            except StorageError as e:
                self._locations = {key: source for key, source in self._locations.items() if source is not asked}
                raise FragmentLostError(str(e)) from e
            self._meter.add("kv_peer_bytes", sum(memoryview(buffer).nbytes for buffer in into.values()))

    def stop(self) -> None:
        """Stop replying. After that the epoch's channels may be closed."""
        if self._connecting is None:
            return
        self._view.end_epoch(f"epoch {self._view.epoch} is over")
        for thread in self._threads:
            thread.join(END_S)
        if self._reading.acquire(timeout=END_S):
            self._reading.release()

    def _reached(self) -> dict[str, _PageSource]:
        if self._connecting is None:
            return {}
        try:
            return self._connecting.result(CONNECT_S)
        except TimeoutError as e:
            log.warning("no pages are requested of other workers: %s", e)
            return {}

    def _connect(self) -> dict[str, _PageSource]:
        inbox, opened = Geometry(slots=SLOTS, slot_bytes=PART_BYTES), dict[str, _PageSource]()
        for peer in self._peers:
            terms = Terms(outbound=inbox, inbound=inbox, name=self._name, peer=peer.name, key=peer.key)
            try:
                opened[peer.name] = _PageSource(self._view.connect(peer.url, terms, timeout_s=CONNECT_S))
            except ChannelError as e:  # a lost worker ends the epoch anyway
                log.warning("%s does not serve pages: %s", peer.name, e)
        return opened

    def _hear(self) -> None:
        while self._medium is not None and self._waiting_channels:
            work = _PageServer(self._waiting_channels.pop(), self._medium).run
            self._threads.append(threading.Thread(target=work, name="lamina-answer", daemon=True))
            self._threads[-1].start()


class _PageSource:
    """Sends requests to one other worker. One thread uses it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def keys(self, share: frozenset[PageFragment]) -> list[bytes]:
        """Return the keys of pages that it has. Raises StorageError."""
        keys, part = list[bytes](), self._ask(PageRequest(b"", sorted(share)), CONNECT_S)
        while part:
            if len(part) % KEY_BYTES or len(keys) > MAX_LISTED_PAGES:
                raise self._broken(f"{len(part)} bytes of keys after {len(keys)} keys")
            keys += [part[at : at + KEY_BYTES] for at in range(0, len(part), KEY_BYTES)]
            part = self._next(ANSWER_S)
        return keys

    def page(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill the buffers with fragments of a page. Raises StorageError."""
        views = [memoryview(buffer).cast("B") for buffer in into.values()]
        wanted, data = sum(view.nbytes for view in views), bytearray(self._ask(PageRequest(key, list(into)), ANSWER_S))
        while len(data) < wanted and (part := self._next(ANSWER_S)):
            data += part
        if len(data) != wanted:
            raise self._broken(f"{len(data)} bytes of fragments in place of {wanted}")
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def _ask(self, ask: PageRequest, limit_s: float) -> bytes:
        data = msgspec.msgpack.encode(ask)
        try:
            slot = self._channel.reserve(len(data), timeout_s=ANSWER_S)
            slot.data[:] = data
            self._channel.put_signal(slot, b"")
        except (ChannelError, ValueError) as e:
            raise StorageError(f"{self._channel.peer_name} cannot be reached: {e}") from e
        return self._next(limit_s)

    def _next(self, limit_s: float) -> bytes:
        try:
            arrival = self._channel.wait_signal(timeout_s=limit_s)
        except ChannelTimeout as e:
            raise self._broken(str(e)) from e  # a late part would pass for another reply
        except ChannelError as e:
            raise StorageError(f"{self._channel.peer_name} does not reply: {e}") from e
        data = bytes(arrival.data)
        kind, sent_checksum = _TAG.unpack(arrival.tag[: _TAG.size])
        self._channel.release(arrival)
        if kind == PageReplyKind.MISSING and not data:
            raise FragmentLostError(f"{self._channel.peer_name} no longer has it")
        if kind != PageReplyKind.PART or sent_checksum != checksum(data):
            raise self._broken("a reply is damaged, or is no valid reply")
        return data

    def _broken(self, why: str) -> StorageError:
        """Abort the channel, so that later messages are ignored, and return the error."""
        self._channel.abort(why)
        return StorageError(f"{self._channel.peer_name}: {why}")


class _PageServer:
    """Replies to requests of one other worker, on a thread of its own."""

    def __init__(self, channel: Channel, medium: StorageBackend) -> None:
        self._channel, self._medium = channel, medium

    def run(self) -> None:
        """Reply to requests until the channel ends."""
        try:
            for ask in serve_requests(self._channel, _decode):
                self._check(ask)
                self._answer(ask)
        except (
            ProtocolError,
            StorageError,
            ChannelError,
        ) as e:  # half of a reply would pass for that of another request
            self._channel.abort(str(e))

    def _check(self, ask: PageRequest) -> None:
        if len(ask.key) not in (0, KEY_BYTES) or not ask.fragments:
            raise ProtocolError(
                f"{self._channel.peer_name} requests {len(ask.fragments)} fragments of a page without a valid key"
            )
        if len({*ask.fragments}) < len(ask.fragments):  # a small request would have a reply of any size
            raise ProtocolError(f"{self._channel.peer_name} requests a fragment more than once")

    def _answer(self, ask: PageRequest) -> None:
        if not ask.key:
            self._send(b"".join(self._medium.keys(frozenset(ask.fragments), MAX_LISTED_PAGES)))
            self._put(PageReplyKind.PART, b"")
            return
        try:
            _, there = self._medium.read_page(ask.key, frozenset(ask.fragments))
            data = b"".join(there[fragment] for fragment in ask.fragments)
        except (StorageError, KeyError):
            self._put(PageReplyKind.MISSING, b"")
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        for at in range(0, len(data), PART_BYTES):
            self._put(PageReplyKind.PART, data[at : at + PART_BYTES])

    def _put(self, kind: PageReplyKind, data: bytes) -> None:
        slot = self._channel.reserve(len(data), timeout_s=ANSWER_S)
        slot.data[:] = data
        self._channel.put_signal(slot, _TAG.pack(kind, checksum(data)))
