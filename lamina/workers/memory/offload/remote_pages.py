"""Pages that lie on another host: a worker that lacks a fragment requests it from the memory workers there.

In an epoch each worker connects to each other one and sends requests. The other one replies from its storage backend:
with the bytes of a page's fragments, one after another, or with the keys of pages that have all of the fragments.
Received pages are used, and not stored here: the driver counts them as available as long as the other host has them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lamina.kv.pages import PageFragment
from lamina.kv.storage import FragmentLostError, PageGoneError, StorageBackend, StorageError
from lamina.netstack import ChannelError
from lamina.protocol.offload_messages import MAX_LISTED_PAGES
from lamina.protocol.step_plan import KEY_BYTES, ProtocolError, decode, encode
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer import TransferGoneError, TransferPart, TransferRefusedError
from lamina.workers.memory.kv_transfer.transfer_link import TransferLink, parts_from, parts_into, split_into
from lamina.workers.memory.worker_counters import Counters

log = logging.getLogger(__name__)
ANSWER_S = 10.0  # seconds for a later reply, and for each part: the other end waits for its disk
ACCEPT_TIMEOUT_S = 60.0  # seconds for other workers to connect, after they can be served
SIZE_BYTES = 8  # bytes of the length of a list of keys


class PageRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for fragments. ``key``: of their page; empty: for the keys of pages that have all of the fragments."""

    key: bytes
    fragments: list[PageFragment]


class RemotePages:
    """The remote pages of one epoch of a memory worker. Only the thread that serves rounds calls methods other than
    ``read``.
    """

    def __init__(self, medium: StorageBackend, links: PeerLinks, meter: Counters) -> None:
        """``links``: to all workers that have pages for each other; opened here, to reply to requests from
        ``medium``.
        """
        self._medium, self._links, self._meter = medium, links, meter
        self._locations: dict[bytes, TransferLink] = {}
        links.open(ANSWER_S, self._answer, accept_s=ACCEPT_TIMEOUT_S)

    def set_locations(self, share: frozenset[PageFragment], own: Sequence[bytes] = ()) -> list[bytes]:
        """Return keys of pages of which another host has all of ``share``, followed by ``own``, which are here. These
        are at most MAX_LISTED_PAGES. All workers have connected before.
        """
        elsewhere = dict[bytes, None]()
        for source in self._links.by_number.values() if share else ():
            try:
                for key in self._keys(source, share):
                    self._locations.setdefault(key, source)
                    elsewhere[key] = None
            except ChannelError as e:  # a lost worker ends the epoch anyway
                log.warning("pages of %s are not found: %s", source.peer, e)
        here = set(own)
        return [*(key for key in elsewhere if key not in here), *own][-MAX_LISTED_PAGES:]

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Read a page like StorageBackend.read, from another host if this one lacks fragments. For one thread.
        Fragments of a host that does not reply are lost. A page is gone if nothing of it is stored here nor there.
        """
        try:
            self._medium.read(key, into)
        except FragmentLostError as own:
            if (source := self._locations.get(key)) is None:
                raise
            try:
                source.wait(source.fetch(encode(PageRequest(key, list(into))), _parts_of(into), ANSWER_S))
            except ChannelError as e:
                if not isinstance(e, TransferRefusedError):
                    self._locations = {key: link for key, link in self._locations.items() if link is not source}
                is_gone = isinstance(own, PageGoneError) and isinstance(e, TransferGoneError)
                raise (PageGoneError if is_gone else FragmentLostError)(str(e)) from e
            self._meter.add("kv_peer_bytes", sum(memoryview(buffer).nbytes for buffer in into.values()))

    def _keys(self, source: TransferLink, share: frozenset[PageFragment]) -> list[bytes]:
        """Return the keys of pages that another worker has. Raises ChannelError."""
        keys = bytearray()

        def parts() -> Iterator[TransferPart]:
            size = bytearray(SIZE_BYTES)
            yield from parts_into(size)
            nbytes = int.from_bytes(size, "little")
            if nbytes % KEY_BYTES or nbytes > MAX_LISTED_PAGES * KEY_BYTES:
                raise ProtocolError(f"{nbytes} bytes of keys")
            keys.extend(bytes(nbytes))
            yield from parts_into(keys)

        ask = encode(PageRequest(b"", sorted(share)))
        source.wait(source.fetch(ask, parts(), self._links.start_s))  # the other worker may still start
        return [bytes(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]

    def _answer(self, data: bytes) -> Iterator[TransferPart]:
        """Yield the parts of a reply. Raises TransferRefusedError, ProtocolError."""
        ask = decode(PageRequest, data)
        if len(ask.key) not in (0, KEY_BYTES) or not ask.fragments:
            raise ProtocolError(f"{len(ask.fragments)} fragments of a page without a valid key are requested")
        if len({*ask.fragments}) < len(ask.fragments):  # a small request would have a reply of any size
            raise ProtocolError("a fragment is requested more than once")
        try:
            if ask.key:
                _, there = self._medium.read_page(ask.key, frozenset(ask.fragments))
                reply = b"".join(there[fragment] for fragment in ask.fragments)
            else:
                reply = b"".join(self._medium.keys(frozenset(ask.fragments), MAX_LISTED_PAGES))
                yield from parts_from(len(reply).to_bytes(SIZE_BYTES, "little"))
        except PageGoneError as e:
            raise TransferGoneError(str(e)) from e
        except (StorageError, KeyError) as e:
            raise TransferRefusedError(f"it is no longer there: {e}") from e
        yield from parts_from(reply)


def _parts_of(into: Mapping[PageFragment, bytearray | memoryview]) -> Iterator[TransferPart]:
    """Yield the parts that fill the buffers, one after another."""
    data = bytearray(sum(memoryview(buffer).nbytes for buffer in into.values()))
    yield from parts_into(data)
    split_into(into.values(), data)
