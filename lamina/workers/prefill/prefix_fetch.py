"""Prefix fetch: a prefill worker gets K and V of a prompt's beginning from another one, and computes the rest.

In an epoch each worker has a channel to each other one, and sends a request as soon as it receives a FetchPrefix. The
other worker replies from its store while it computes. The transfer has one layer after another, so rows go through a
layer as soon as its blocks have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

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
from lamina.workers.memory.kv_transfer.transfer_link import (
    SLOTS,
    Transfer,
    TransferLink,
    TransferPart,
    TransferRefusedError,
    inbox,
)
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


class PrefixFetch:
    """The prefix fetches of a prefill worker in one epoch: blocks that it fetches, and blocks that it sends."""

    def __init__(
        self, store: KvStore, timeout_s: float, around: Runtime = RUNTIME, trace: Recorder = NULL_RECORDER
    ) -> None:
        """``timeout_s``: of a step."""
        self._store, self._timeout_s, self._runtime, self._trace = store, timeout_s, around, trace
        self._links: PeerLinks | None = None  # set by ``connect``
        self._pending: _PendingFetch | None = None

    def connect(self, order: ConnectPrefillPeers, fabric: EpochFabric, listener: EpochListener, limit_s: float) -> None:
        """Connect to each other worker, and accept their connections. Raises ChannelError."""
        own, inboxes = order.own_index, prefix_inboxes(max_block_bytes(self._store))
        peers = [
            TransferPeer(prefix_listener_name(peer.name), n != own, n != own, n == own, peer.url, peer.key)
            for n, peer in enumerate(order.peers)
        ]
        self._links = PeerLinks(fabric, peers, self._runtime)
        silence_s = (GRANTS_AHEAD + 1) * self._timeout_s  # steps that may be computed first
        self._links.open(silence_s, limit_s, limit_s, self._answer, inboxes, self._store.device)
        while self._links.num_missing:
            channel = fabric.accept(listener, limit_s)
            if not self._links.accept(channel):
                raise PeerFault(f"{channel.peer_name!r} has connected, and is not expected")

    def stop(self) -> None:
        """Write nothing to the store from now on, and end the epoch of the channels."""
        if self._links is not None:
            self._links.stop()

    def request(self, plan: StepPlan) -> None:
        """Request the KV that a coming step fetches. Raises ChannelError, ProtocolError."""
        for op in plan.ops:
            if isinstance(op, FetchPrefix) and op.worker != MEMORY_WORKERS:
                data = encode(PrefixRequest(op.source, op.first, op.count, plan.batch, plan.step))
                self._source(op).request(plan.step, data)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin the step of an applied plan. Raises ProtocolError."""
        self._pending = None
        for op in plan.ops:
            if isinstance(op, FetchPrefix) and op.worker != MEMORY_WORKERS:
                if self._pending is not None:
                    raise ProtocolError(f"step {plan.step} fetches for two sequences")
                ids = whole_blocks(self._store, op.sequence, op.first, op.count)
                if ids is None:
                    raise ProtocolError(
                        f"step {plan.step}: {op} does not begin with a block, or is of layers with windows"
                    )
                self._store.staging.record_event()()  # waits until the device no longer uses the blocks
                parts, link = list(layer_parts(self._store, ids, scatter)), self._source(op)
                transfer = link.expect(Transfer(plan.step, parts, self._timeout_s))
                self._pending = _PendingFetch(plan, op, parts, link, transfer)

    def receive_layer(self, layer: int) -> int:
        """Wait until the fetched KV of ``layer`` is stored. Returns its bytes. Raises ChannelError."""
        due, begun = self._pending, time.perf_counter()
        if due is None:
            return 0
        try:
            due.link.wait(due.transfer, layer)
        except TransferRefusedError as e:
            raise MissingKvError(f"prefill worker {due.op.worker}: {e}") from e
        nbytes = sum(part.nbytes for part in due.parts if part.layer == layer)
        self._trace.add(Event.FETCH, begun, due.plan, layer, due.op.worker, nbytes)
        return nbytes

    def _source(self, op: FetchPrefix) -> TransferLink:
        if self._links is None or op.worker not in self._links.by_number:
            raise ProtocolError(f"{op}: there is no other prefill worker {op.worker}")
        return self._links.by_number[op.worker]

    def _answer(self, data: bytes) -> Iterator[TransferPart]:
        """Yield the parts of a request. The driver ensures that the blocks are not written meanwhile. Raises
        TransferRefusedError, ProtocolError.
        """
        ask = decode(PrefixRequest, data)
        ids = whole_blocks(self._store, ask.sequence, ask.first, ask.count)
        if ids is None:
            raise TransferRefusedError(f"there are no such tokens: {ask}")
        for part in layer_parts(self._store, ids, gather):
            begun = time.perf_counter()
            yield part
            self._trace.add(Event.LEND, begun, ask, part.layer, value=part.nbytes)


class _PendingFetch(NamedTuple):
    """The KV that the current step fetches."""

    plan: StepPlan
    op: FetchPrefix
    parts: list[TransferPart]
    link: TransferLink
    transfer: Transfer
