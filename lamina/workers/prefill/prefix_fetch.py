"""Prefix fetch: a prefill worker gets K and V of a prompt's beginning from another one, and computes the rest.

In an epoch each worker has a channel to each other one, and sends a request as soon as it receives a FetchPrefix. The
other worker replies from its store, on a thread of its own, while it computes. The reply has the blocks of one layer
after another, in parts. Each part stays in the channel until its layer is about to be attended.
"""

from __future__ import annotations

import enum
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from lamina.netstack import Channel, ChannelError, Geometry, ListenTerms, PeerFault, Terms
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.prefix_fetch import ConnectPrefillPeers, PrefixRequest
from lamina.protocol.step_plan import GRANTS_AHEAD, FetchPrefix, ProtocolError, StepPlan
from lamina.workers.compute.memory_worker_client import MissingKvError
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.block_bytes import BlockBytes
from lamina.workers.rpc import serve_requests
from lamina.workers.staging import Staging, open_staging

SLOTS = 4
REQUEST_BYTES, PART_BYTES = 1 << 8, 1 << 20  # bytes of a request; bytes of a part, unless a block is larger
_TAG = struct.Struct(f"<III{CHECKSUM_BYTES}s")
_decode = msgspec.msgpack.Decoder(PrefixRequest).decode


class PrefixMessageKind(enum.IntEnum):
    BLOCKS = 1
    MISSING = 2  # the worker does not have the blocks


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
    return Geometry(slots=SLOTS, slot_bytes=REQUEST_BYTES), Geometry(
        slots=SLOTS, slot_bytes=max(PART_BYTES, block_bytes)
    )


class PrefixFetch:
    """The prefix fetches of a prefill worker in one epoch: blocks that it fetches, and blocks that it sends."""

    def __init__(
        self,
        store: KvStore,
        staging: Staging,
        timeout_s: float,
        start: Callable[[Callable[[], None], str], None],
        trace: Recorder = NULL_RECORDER,
    ) -> None:
        """``start``: starts a thread, given its function and name. ``timeout_s``: of a step."""
        self._blocks, self._device = BlockBytes(store, PART_BYTES), store.device
        self._staging, self._timeout_s, self._start, self._trace = staging, timeout_s, start, trace
        self._sources: dict[int, Channel] = {}
        self._pending: _PendingFetch | None = None

    def connect(self, order: ConnectPrefillPeers, fabric: EpochFabric, listener: EpochListener, limit_s: float) -> None:
        """Connect to each other worker, and accept their connections. Raises ChannelError."""
        names = [prefix_listener_name(peer.name) for peer in order.peers]
        others = [number for number in range(len(names)) if number != order.own_index]
        due = {names[n] for n in others}
        asks, parts = prefix_inboxes(self._blocks.max_block_bytes)

        def connect(number: int) -> None:
            peer = order.peers[number]
            terms = Terms(outbound=asks, inbound=parts, name=names[order.own_index], peer=names[number], key=peer.key)
            self._sources[number] = fabric.connect(peer.url, terms, timeout_s=limit_s)

        def accept(until: set[str]) -> None:
            while due & until:
                channel = fabric.accept(listener, limit_s)
                if channel.peer_name not in due:
                    raise PeerFault(f"{channel.peer_name!r} has connected, and is not expected")
                due.discard(channel.peer_name)
                self._answer(channel)

        # Each worker connects to those with lower numbers first, so no two wait for each other.
        for number in (n for n in others if n < order.own_index):
            connect(number)
        accept({names[n] for n in others if n > order.own_index})
        for number in (n for n in others if n > order.own_index):
            connect(number)
        accept({names[n] for n in others})

    def request(self, plan: StepPlan) -> None:
        """Request the KV that a coming step fetches. Raises ChannelError, ProtocolError."""
        for op in plan.ops:
            if isinstance(op, FetchPrefix):
                data = msgspec.msgpack.encode(PrefixRequest(op.source, op.first, op.count, plan.batch, plan.step))
                slot = self._source(op).reserve(len(data), timeout_s=self._timeout_s)
                slot.data[:] = data
                self._source(op).put_signal(slot, b"")

    def begin_step(self, plan: StepPlan) -> None:
        """Begin the step of an applied plan. Raises ProtocolError."""
        self._pending = None
        for op in plan.ops:
            if isinstance(op, FetchPrefix):
                if self._pending is not None:
                    raise ProtocolError(f"step {plan.step} fetches for two sequences")
                ids = self._blocks.ids(op.sequence, op.first, op.count)
                if ids is None:
                    raise ProtocolError(f"step {plan.step}: {op} is not of whole blocks, or of layers with windows")
                self._pending = _PendingFetch(plan, op, self._source(op), ids, self._blocks.num_layers)

    def receive_layer(self, layer: int) -> int:
        """Wait for the fetched KV of ``layer`` and store it. Returns the bytes received. Raises ChannelError,
        ProtocolError.
        """
        due, begun = self._pending, time.perf_counter()
        if due is None or not due.layers or due.layers[0] != layer:
            return 0
        for part, run in enumerate(self._blocks.runs(layer, due.num_blocks)):
            self._take_part(due, layer, part, run)
        due.layers.popleft()
        nbytes = self._blocks.nbytes(layer, range(due.num_blocks))
        self._trace.add(Event.FETCH, begun, due.plan, layer, due.op.worker, nbytes)
        return nbytes

    def _take_part(self, due: _PendingFetch, layer: int, part: int, run: range) -> None:
        arrival, wanted = due.channel.wait_signal(timeout_s=self._timeout_s), self._blocks.nbytes(layer, run)
        try:
            kind, at, number, sent_checksum = _TAG.unpack_from(arrival.tag)
            if kind == PrefixMessageKind.MISSING:
                raise MissingKvError(f"prefill worker {due.op.worker} has no such tokens: {due.op}")
            came = (kind, at, number, arrival.data.nbytes)
            if came != (PrefixMessageKind.BLOCKS, layer, part, wanted) or sent_checksum != checksum(arrival.data):
                raise PeerFault(
                    f"the reply of prefill worker {due.op.worker} is damaged, or is not part {part} of layer {layer} "
                    f"of {wanted} bytes: {came}"
                )
            ids = [own[run.start : run.stop] for own in due.ids]
            self._blocks.scatter(layer, ids, arrival.data, self._staging)
        finally:
            due.channel.release(arrival)

    def _source(self, op: FetchPrefix) -> Channel:
        if op.worker not in self._sources:
            raise ProtocolError(f"{op}: there is no other prefill worker {op.worker}")
        return self._sources[op.worker]

    def _answer(self, channel: Channel) -> None:
        patience_s = (GRANTS_AHEAD + 1) * self._timeout_s  # steps that may be computed first
        lender = _PrefixSender(channel, self._blocks, self._device, patience_s, self._trace)
        self._start(lender.run, "lamina-answer")


class _PendingFetch:
    """The KV that the current step still fetches."""

    def __init__(
        self, plan: StepPlan, op: FetchPrefix, channel: Channel, ids: Sequence[Sequence[int]], layers: int
    ) -> None:
        self.plan, self.op, self.channel, self.ids = plan, op, channel, ids
        self.num_blocks = len(ids[0])
        self.layers = deque(range(layers))


class _PrefixSender:
    """Replies to one other worker, on a thread of its own. The driver ensures that the blocks it sends are not
    written.
    """

    def __init__(
        self, channel: Channel, blocks: BlockBytes, device: torch.device, timeout_s: float, trace: Recorder
    ) -> None:
        self._channel, self._blocks, self._device = channel, blocks, device
        self._timeout_s, self._trace = timeout_s, trace

    def run(self) -> None:
        """Reply to requests until the channel ends."""
        staging = open_staging(self._device)
        try:
            for ask in serve_requests(self._channel, _decode):
                self._answer(ask, staging)
        except (ProtocolError, ChannelError) as e:  # half of a reply would pass for that of another request
            self._channel.abort(str(e))

    def _answer(self, ask: PrefixRequest, staging: Staging) -> None:
        ids = self._blocks.ids(ask.sequence, ask.first, ask.count)
        if ids is None:
            self._channel.put_signal(
                self._channel.reserve(0, timeout_s=self._timeout_s), _tag(PrefixMessageKind.MISSING)
            )
            return
        for layer in range(self._blocks.num_layers):
            for part, run in enumerate(self._blocks.runs(layer, len(ids[0]))):
                own = [group[run.start : run.stop] for group in ids]
                begun, nbytes = time.perf_counter(), self._blocks.nbytes(layer, run)
                self._send(layer, part, own, nbytes, staging)
                self._trace.add(Event.LEND, begun, ask, layer, value=nbytes)

    def _send(self, layer: int, part: int, ids: Sequence[Sequence[int]], nbytes: int, staging: Staging) -> None:
        slot = self._channel.reserve(nbytes, timeout_s=self._timeout_s)
        self._blocks.gather(layer, ids, slot.data, staging)
        self._channel.put_signal(slot, _tag(PrefixMessageKind.BLOCKS, layer, part, checksum(slot.data)))


def _tag(kind: PrefixMessageKind, layer: int = 0, part: int = 0, sent_checksum: bytes = bytes(CHECKSUM_BYTES)) -> bytes:
    return _TAG.pack(kind, layer, part, sent_checksum)
