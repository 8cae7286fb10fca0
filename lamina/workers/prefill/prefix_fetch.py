"""Prefix fetch: a prefill worker gets K and V of a prompt's beginning from other workers, and computes the rest.

In an epoch it has a channel to each other prefill worker, whose prompt cache has beginnings (``cached_prefixes``). It
sends a request there as soon as it receives a FetchPrefix. It has a second channel to each memory worker
(``stored_prefixes``), which a plan lets send. The others send from their stores meanwhile, one layer after another. So
rows go through a layer as soon as its blocks have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lamina.config.engine_config import Deadlines
from lamina.netstack import Geometry, ListenTerms, PeerFault
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.control import TransferPeer
from lamina.protocol.prefix_fetch import ConnectPrefillPeers, PrefixRequest
from lamina.protocol.step_plan import GRANTS_AHEAD, MEMORY_WORKERS, FetchPrefix, ProtocolError, StepPlan, decode, encode
from lamina.workers.compute.attention_client import MissingKvError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.block_parts import gather, layer_parts, max_block_bytes, scatter, whole_blocks
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer import Transfer, TransferPart, TransferRefusedError
from lamina.workers.memory.kv_transfer.transfer_link import SLOTS, TransferLink, inbox
from lamina.workers.runtime import RUNTIME, Runtime

REQUEST_BYTES = 1 << 8  # bytes of a request


def prefix_listener_name(worker: str) -> str:
    """Return the name of the listener at which other prefill workers connect to ``worker``."""
    return f"{worker}/prompts"


def prefix_listener_terms(worker: str, workers: int) -> ListenTerms:
    """Return the terms for all other ones of ``workers``, in up to two epochs; twice as many, as some may connect
    again.
    """
    return ListenTerms(name=prefix_listener_name(worker), channels=4 * workers)


def prefix_inboxes(block_bytes: int) -> tuple[Geometry, Geometry]:
    """Return the inboxes of the worker that receives requests, and of the one that sends them. ``block_bytes``: the
    most bytes of a layer's block.
    """
    return Geometry(slots=SLOTS, slot_bytes=REQUEST_BYTES), inbox(block_bytes)


class PrefixSource(NamedTuple):
    """The workers of one kind, which have beginnings of prompts.

    ``peers``: these and this worker, by number. ``inboxes``: see ``prefix_inboxes``. ``parts``: what one of them sends:
    of an op, of its blocks here by layer group, and of a peer's number. ``answer``: replies to requests; None:
    there are none.
    """

    peers: Sequence[TransferPeer]
    inboxes: tuple[Geometry, Geometry]
    parts: Callable[[FetchPrefix, Sequence[Sequence[int]], int], Iterator[TransferPart]]
    is_memory: bool = False  # each of the memory workers has a part of a beginning, and sends it without a request
    answer: Callable[[bytes], Iterator[TransferPart]] | None = None


def cached_prefixes(store: KvStore, order: ConnectPrefillPeers, trace: Recorder = NULL_RECORDER) -> PrefixSource:
    """Return the prompt caches of other prefill workers with the same layers, which get what this one has in turn."""
    own = order.own_index
    peers = [
        TransferPeer(prefix_listener_name(peer.name), n != own, n != own, n == own, peer.url, peer.key)
        for n, peer in enumerate(order.peers)
    ]

    def answer(data: bytes) -> Iterator[TransferPart]:
        """Yield the parts of a request. The driver ensures that the blocks are not written meanwhile. Raises
        TransferRefusedError.
        """
        ask = decode(PrefixRequest, data)
        ids = whole_blocks(store, ask.sequence, ask.first, ask.count)
        if ids is None:
            raise TransferRefusedError(f"there are no such tokens: {ask}")
        for part in layer_parts(store, ids, gather):
            begun = trace.now()
            yield part
            trace.add(Event.LEND, begun, ask, part.layer, value=part.nbytes)

    inboxes = prefix_inboxes(max_block_bytes(store))
    return PrefixSource(peers, inboxes, lambda op, ids, worker: layer_parts(store, ids, scatter), answer=answer)


class PrefixFetch:
    """The prefix fetches of a prefill worker in one epoch, from one kind of workers."""

    def __init__(
        self,
        store: KvStore,
        source: PrefixSource,
        fabric: EpochFabric,
        deadlines: Deadlines,
        around: Runtime = RUNTIME,
        trace: Recorder = NULL_RECORDER,
    ) -> None:
        self._store, self._source, self._fabric = store, source, fabric
        self._timeout_s, self._trace = deadlines.step_timeout_s, trace
        self._links = PeerLinks(fabric, source.peers, around, deadlines.start_timeout_s)
        self._pending: _PendingFetch | None = None

    def connect(self, listener: EpochListener | None = None) -> None:
        """Connect to each of the workers in the background, and accept at ``listener`` those that connect, too. Raises
        ChannelError.
        """
        source, silence_s = self._source, (GRANTS_AHEAD + 1) * self._timeout_s  # steps that may be computed first
        self._links.open(silence_s, source.answer, source.inboxes, self._store.device)
        while listener is not None and self._links.num_missing:
            channel = self._fabric.accept(listener, self._links.start_s)
            if not self._links.accept(channel):
                raise PeerFault(f"{channel.peer_name!r} has connected, and is not expected")

    def stop(self) -> None:
        """Write nothing to the store from now on, and end the epoch of the channels."""
        self._links.stop()

    def fetches(self, op: object) -> bool:
        """Return whether ``op`` fetches KV from these workers."""
        return isinstance(op, FetchPrefix) and (op.worker == MEMORY_WORKERS) == self._source.is_memory

    def request(self, plan: StepPlan) -> None:
        """Request the KV that a coming step fetches. Raises ChannelError, ProtocolError."""
        for op in self._ops(plan):
            data = encode(PrefixRequest(op.source, op.first, op.count, plan.batch, plan.step))
            for link in self._links_of(op).values():
                if not self._source.is_memory:
                    link.request(plan.step, data)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin the step of an applied plan. Raises ProtocolError."""
        self._pending = None
        for op in self._ops(plan):
            if self._pending is not None:
                raise ProtocolError(f"step {plan.step} fetches for two sequences")
            ids = whole_blocks(self._store, op.sequence, op.first, op.count)
            if ids is None:
                raise ProtocolError(f"step {plan.step}: {op} does not begin with a block, or is of layers with windows")
            self._store.staging.record_event()()  # waits until the device no longer uses the blocks
            transfers = [
                (link, link.expect(Transfer(plan.step, self._source.parts(op, ids, worker), self._timeout_s)))
                for worker, link in self._links_of(op).items()
            ]
            self._pending = _PendingFetch(plan, op, transfers)

    def receive_layer(self, layer: int) -> int:
        """Wait until the fetched KV of ``layer``, counted from the store's first one, is stored. Returns the bytes that
        have come since the last call. Raises ChannelError.
        """
        if (due := self._pending) is None:
            return 0
        begun = self._trace.now()
        for link, transfer in due.transfers:
            try:
                link.wait(transfer, layer)
            except TransferRefusedError as e:
                raise MissingKvError(f"{link.peer}: {e}") from e
        counted = sum(transfer.nbytes for _, transfer in due.transfers)
        self._pending, nbytes = due._replace(counted=counted), counted - due.counted
        self._trace.add(Event.FETCH, begun, due.plan, layer, due.op.worker, nbytes)
        return nbytes

    def _ops(self, plan: StepPlan) -> Iterator[FetchPrefix]:
        return (op for op in plan.ops if isinstance(op, FetchPrefix) and self.fetches(op))

    def _links_of(self, op: FetchPrefix) -> Mapping[int, TransferLink]:
        links = self._links.by_number
        if not self._source.is_memory:
            links = {op.worker: links[op.worker]} if op.worker in links else {}
        if not links:
            raise ProtocolError(f"{op}: there is no channel for it")
        return links


class _PendingFetch(NamedTuple):
    """The KV that the current step fetches."""

    plan: StepPlan
    op: FetchPrefix
    transfers: list[tuple[TransferLink, Transfer]]
    counted: int = 0  # bytes that ``receive_layer`` has returned
