"""Beginnings of prompts: K and V that one prefill worker has in its store, and another one computes behind.

Each worker has a channel to each other one under an epoch, and asks over it, as soon as it hears of a Fetch; who was
asked answers on a thread of its own, out of its store, while it computes. The answer is the blocks of one layer after
the other, in parts; each is taken before the layer is attended, and not before: until then it waits in the channel.
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
REQUEST_BYTES, PART_BYTES = 1 << 8, 1 << 20  # of an ask; of a part, unless a block has more
_TAG = struct.Struct(f"<III{CHECKSUM_BYTES}s")
_decode = msgspec.msgpack.Decoder(PrefixRequest).decode


class PrefixMessageKind(enum.IntEnum):
    BLOCKS = 1
    MISSING = 2  # they are not there


def prefix_listener_name(worker: str) -> str:
    """The name of the place where other prefill workers connect to ``worker``."""
    return f"{worker}/prompts"


def prefix_listener_terms(worker: str, workers: int) -> ListenTerms:
    """For the others of so many, under two epochs; twice as many, as some may come again."""
    return ListenTerms(name=prefix_listener_name(worker), channels=4 * workers)


def prefix_inboxes(block_bytes: int) -> tuple[Geometry, Geometry]:
    """The inbox of the worker that is asked, and of the one that asks; a layer's block has at most ``block_bytes``
    bytes.
    """
    return Geometry(slots=SLOTS, slot_bytes=REQUEST_BYTES), Geometry(
        slots=SLOTS, slot_bytes=max(PART_BYTES, block_bytes)
    )


class PrefixFetch:
    """The exchange of beginnings in one epoch of a prefill worker: blocks that it fetches, and blocks that it gives."""

    def __init__(
        self,
        store: KvStore,
        staging: Staging,
        timeout_s: float,
        start: Callable[[Callable[[], None], str], None],
        trace: Recorder = NULL_RECORDER,
    ) -> None:
        """``start``: a thread, by what it does and its name. ``timeout_s``: for a step."""
        self._blocks, self._device = BlockBytes(store, PART_BYTES), store.device
        self._staging, self._timeout_s, self._start, self._trace = staging, timeout_s, start, trace
        self._sources: dict[int, Channel] = {}
        self._pending: _PendingFetch | None = None

    def connect(self, order: ConnectPrefillPeers, fabric: EpochFabric, listener: EpochListener, limit_s: float) -> None:
        """Open a channel to each other worker, and take in theirs. Raises ChannelError."""
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
                    raise PeerFault(f"{channel.peer_name!r} has come, and is none that is still to come")
                due.discard(channel.peer_name)
                self._answer(channel)

        # Each worker connects to the workers before it first: so no two wait for each other.
        for number in (n for n in others if n < order.own_index):
            connect(number)
        accept({names[n] for n in others if n > order.own_index})
        for number in (n for n in others if n > order.own_index):
            connect(number)
        accept({names[n] for n in others})

    def request(self, plan: StepPlan) -> None:
        """A step is to come. Raises ChannelError, ProtocolError."""
        for op in plan.ops:
            if isinstance(op, FetchPrefix):
                data = msgspec.msgpack.encode(PrefixRequest(op.source, op.first, op.count, plan.batch, plan.step))
                slot = self._source(op).reserve(len(data), timeout_s=self._timeout_s)
                slot.data[:] = data
                self._source(op).put_signal(slot, b"")

    def begin_step(self, plan: StepPlan) -> None:
        """The step of ``plan``, which is applied. Raises ProtocolError."""
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
        """Have all that is fetched of ``layer`` in the store, once it has come: so many bytes. Raises ChannelError,
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
                    f"what came from prefill worker {due.op.worker} is damaged, or is not part {part} of layer {layer} "
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
        patience_s = (GRANTS_AHEAD + 1) * self._timeout_s  # steps before it may be computed
        lender = _PrefixSender(channel, self._blocks, self._device, patience_s, self._trace)
        self._start(lender.run, "lamina-answer")


class _PendingFetch:
    """What the step that is computed still gets."""

    def __init__(
        self, plan: StepPlan, op: FetchPrefix, channel: Channel, ids: Sequence[Sequence[int]], layers: int
    ) -> None:
        self.plan, self.op, self.channel, self.ids = plan, op, channel, ids
        self.num_blocks = len(ids[0])
        self.layers = deque(range(layers))


class _PrefixSender:
    """To one who asks, on a thread of its own. What is sent nobody writes meanwhile: the driver sees to that."""

    def __init__(
        self, channel: Channel, blocks: BlockBytes, device: torch.device, timeout_s: float, trace: Recorder
    ) -> None:
        self._channel, self._blocks, self._device = channel, blocks, device
        self._timeout_s, self._trace = timeout_s, trace

    def run(self) -> None:
        """Until the channel ends."""
        staging = open_staging(self._device)
        try:
            for ask in serve_requests(self._channel, _decode):
                self._answer(ask, staging)
        except (ProtocolError, ChannelError) as e:  # a half of an answer would pass for one of another ask
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
