"""Beginnings of prompts: K and V that one prefill worker has in its store, and another one computes behind.

Each worker has a channel to each other one under a view, and asks over it, as soon as it hears of a Fetch; who was
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

from lamina.compute.links import LacksError
from lamina.memory.pages.stored_blocks import StoredBlocks
from lamina.memory.store import Store
from lamina.netstack import Channel, ChannelError, Geometry, PeerFault, Reception, Terms
from lamina.netstack.checksum import CHECKSUM_BYTES, checksum
from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.beginnings import BeginningAsk, MeetPrefill
from lamina.protocol.plan import GRANTS_AHEAD, Fetch, ProtocolError, StepPlan
from lamina.workers.asks import asks_over
from lamina.workers.staging import Staging, open_staging
from lamina.workers.view import ViewDoor, ViewFabric

SLOTS = 4
ASK_BYTES, PART_BYTES = 1 << 8, 1 << 20  # of an ask; of a part, unless a block has more
_TAG = struct.Struct(f"<III{CHECKSUM_BYTES}s")
_decode = msgspec.msgpack.Decoder(BeginningAsk).decode


class PartKind(enum.IntEnum):
    BLOCKS = 1
    GONE = 2  # they are not there


def prompts_name(worker: str) -> str:
    """The name of the place where other prefill workers connect to ``worker``."""
    return f"{worker}/prompts"


def prompts_reception(worker: str, workers: int) -> Reception:
    """For the others of so many, under two views; twice as many, as some may come again."""
    return Reception(name=prompts_name(worker), channels=4 * workers)


def prompts_inboxes(block_bytes: int) -> tuple[Geometry, Geometry]:
    """The inbox of the worker that is asked, and of the one that asks; a layer's block has at most ``block_bytes``
    bytes.
    """
    return Geometry(slots=SLOTS, slot_bytes=ASK_BYTES), Geometry(slots=SLOTS, slot_bytes=max(PART_BYTES, block_bytes))


class Beginnings:
    """The exchange of beginnings in one view of a prefill worker: blocks that it fetches, and blocks that it gives."""

    def __init__(
        self,
        store: Store,
        staging: Staging,
        timeout_s: float,
        start: Callable[[Callable[[], None], str], None],
        trace: Recorder = OFF,
    ) -> None:
        """``start``: a thread, by what it does and its name. ``timeout_s``: for a step."""
        self._blocks, self._device = StoredBlocks(store, PART_BYTES), store.device
        self._staging, self._timeout_s, self._start, self._trace = staging, timeout_s, start, trace
        self._sources: dict[int, Channel] = {}
        self._due: _FetchUnderWay | None = None

    def meet(self, order: MeetPrefill, fabric: ViewFabric, door: ViewDoor, limit_s: float) -> None:
        """Open a channel to each other worker, and take in theirs. Raises ChannelError."""
        names = [prompts_name(peer.name) for peer in order.peers]
        others = [number for number in range(len(names)) if number != order.me]
        due = {names[n] for n in others}
        asks, parts = prompts_inboxes(self._blocks.most_block_bytes)

        def connect(number: int) -> None:
            peer = order.peers[number]
            terms = Terms(outbound=asks, inbound=parts, name=names[order.me], peer=names[number], key=peer.key)
            self._sources[number] = fabric.connect(peer.url, terms, timeout_s=limit_s)

        def accept(until: set[str]) -> None:
            while due & until:
                channel = fabric.accept(door, limit_s)
                if channel.peer_name not in due:
                    raise PeerFault(f"{channel.peer_name!r} has come, and is none that is still to come")
                due.discard(channel.peer_name)
                self._answer(channel)

        # Each worker connects to the workers before it first: so no two wait for each other.
        for number in (n for n in others if n < order.me):
            connect(number)
        accept({names[n] for n in others if n > order.me})
        for number in (n for n in others if n > order.me):
            connect(number)
        accept({names[n] for n in others})

    def ask(self, plan: StepPlan) -> None:
        """A step is to come. Raises ChannelError, ProtocolError."""
        for op in plan.ops:
            if isinstance(op, Fetch):
                data = msgspec.msgpack.encode(BeginningAsk(op.source, op.first, op.count, plan.batch, plan.step))
                slot = self._source(op).reserve(len(data), timeout_s=self._timeout_s)
                slot.data[:] = data
                self._source(op).put_signal(slot, b"")

    def begin(self, plan: StepPlan) -> None:
        """The step of ``plan``, which is applied. Raises ProtocolError."""
        self._due = None
        for op in plan.ops:
            if isinstance(op, Fetch):
                if self._due is not None:
                    raise ProtocolError(f"step {plan.step} fetches for two sequences")
                ids = self._blocks.ids(op.sequence, op.first, op.count)
                if ids is None:
                    raise ProtocolError(f"step {plan.step}: {op} is not of whole blocks, or of layers with windows")
                self._due = _FetchUnderWay(plan, op, self._source(op), ids, self._blocks.num_layers)

    def take(self, layer: int) -> int:
        """Have all that is fetched of ``layer`` in the store, once it has come: so many bytes. Raises ChannelError,
        ProtocolError.
        """
        due, begun = self._due, time.perf_counter()
        if due is None or not due.layers or due.layers[0] != layer:
            return 0
        for part, run in enumerate(self._blocks.runs(layer, due.num_blocks)):
            self._take_part(due, layer, part, run)
        due.layers.popleft()
        nbytes = self._blocks.nbytes(layer, range(due.num_blocks))
        self._trace.add(Event.FETCH, begun, due.plan, layer, due.op.worker, nbytes)
        return nbytes

    def _take_part(self, due: _FetchUnderWay, layer: int, part: int, run: range) -> None:
        arrival, wanted = due.channel.wait_signal(timeout_s=self._timeout_s), self._blocks.nbytes(layer, run)
        try:
            kind, at, number, said = _TAG.unpack_from(arrival.tag)
            if kind == PartKind.GONE:
                raise LacksError(f"prefill worker {due.op.worker} has no such tokens: {due.op}")
            came = (kind, at, number, arrival.data.nbytes)
            if came != (PartKind.BLOCKS, layer, part, wanted) or said != checksum(arrival.data):
                raise PeerFault(
                    f"what came from prefill worker {due.op.worker} is damaged, or is not part {part} of layer {layer} "
                    f"of {wanted} bytes: {came}"
                )
            ids = [own[run.start : run.stop] for own in due.ids]
            self._blocks.put(layer, ids, arrival.data, self._staging)
        finally:
            due.channel.release(arrival)

    def _source(self, op: Fetch) -> Channel:
        if op.worker not in self._sources:
            raise ProtocolError(f"{op}: there is no other prefill worker {op.worker}")
        return self._sources[op.worker]

    def _answer(self, channel: Channel) -> None:
        patience_s = (GRANTS_AHEAD + 1) * self._timeout_s  # steps before it may be computed
        lender = _BeginningLender(channel, self._blocks, self._device, patience_s, self._trace)
        self._start(lender.run, "lamina-answer")


class _FetchUnderWay:
    """What the step that is computed still gets."""

    def __init__(self, plan: StepPlan, op: Fetch, channel: Channel, ids: Sequence[Sequence[int]], layers: int) -> None:
        self.plan, self.op, self.channel, self.ids = plan, op, channel, ids
        self.num_blocks = len(ids[0])
        self.layers = deque(range(layers))


class _BeginningLender:
    """To one who asks, on a thread of its own. What is sent nobody writes meanwhile: the driver sees to that."""

    def __init__(
        self, channel: Channel, blocks: StoredBlocks, device: torch.device, timeout_s: float, trace: Recorder
    ) -> None:
        self._channel, self._blocks, self._device = channel, blocks, device
        self._timeout_s, self._trace = timeout_s, trace

    def run(self) -> None:
        """Until the channel ends."""
        staging = open_staging(self._device)
        try:
            for ask in asks_over(self._channel, _decode):
                self._answer(ask, staging)
        except (ProtocolError, ChannelError) as e:  # a half of an answer would pass for one of another ask
            self._channel.abort(str(e))

    def _answer(self, ask: BeginningAsk, staging: Staging) -> None:
        ids = self._blocks.ids(ask.sequence, ask.first, ask.count)
        if ids is None:
            self._channel.put_signal(self._channel.reserve(0, timeout_s=self._timeout_s), _tag(PartKind.GONE))
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
        self._channel.put_signal(slot, _tag(PartKind.BLOCKS, layer, part, checksum(slot.data)))


def _tag(kind: PartKind, layer: int = 0, part: int = 0, said: bytes = bytes(CHECKSUM_BYTES)) -> bytes:
    return _TAG.pack(kind, layer, part, said)
