"""Replies to prefill workers that fetch the beginning of a prompt from this memory worker.

The plan that grants the prompt's first chunk says which stored tokens its prefill worker fetches. The prefill worker
asks for them on a channel of its own. It receives whole blocks, layer by layer, while this worker serves rounds. Of
tokens that are still being loaded, it receives each layer as soon as that is there. If the load fails, it gets whatever
the blocks contain, and the driver discards what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.prefix_fetch import PrefixRequest
from lamina.protocol.step_plan import (
    Free,
    MessageKey,
    MessageKind,
    PrefillGrant,
    ProtocolError,
    StepPlan,
    Truncate,
    decode,
)
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.kv_load import KvLoader, PageLoad
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import Staging

from .block_parts import block_parts, gather, max_block_bytes, whole_blocks
from .peer_links import PeerLinks
from .transfer_link import TransferPart, TransferRefusedError, inbox

PLAN_WAIT_S = 30.0  # seconds until the plan that grants a request, which may come before it
SILENCE_S = 60.0  # seconds without room in a prefill worker's inbox: it may compute other chunks first


class PrefixReplies:
    """The replies of one epoch. Only the thread that serves rounds calls ``begin``."""

    def __init__(
        self,
        store: KvStore,
        links: PeerLinks,
        meter: Counters,
        trace: Recorder = NULL_RECORDER,
        epoch: int = 0,
        around: Runtime = RUNTIME,
        loads: KvLoader | None = None,
    ) -> None:
        """``links``: to all prefill workers; opened here. ``loads``: if pages are loaded."""
        self._store, self._meter, self._trace, self._epoch = store, meter, trace, epoch
        self._offers: dict[int, _Offer] = {}  # by sequence
        self._loads = loads
        self._changed = around.condition()  # protects them
        each = inbox(max_block_bytes(store))
        links.open(SILENCE_S, self.answer, (each, each), store.device)

    def begin(self, plan: StepPlan) -> None:
        """Offer the tokens that an applied plan lets a prefill worker fetch, if they are whole stored blocks."""
        for op in plan.ops:
            if isinstance(op, Free | Truncate):
                with self._changed:
                    self._offers.pop(op.sequence, None)
            elif isinstance(op, PrefillGrant) and op.num_fetched:
                ids = whole_blocks(self._store, op.sequence, op.first - op.num_fetched, op.num_fetched)
                if ids is None:
                    continue  # the request is refused
                self._store.staging.record_event()()  # the device has written them
                with self._changed:
                    load = self._loads.load_of(op.sequence) if self._loads else None
                    self._offers[op.sequence] = _Offer(op, ids, load)
                    self._changed.notify_all()

    def answer(self, data: bytes) -> Iterator[TransferPart]:
        """Yield the parts of a request. Raises TransferRefusedError, ProtocolError."""
        ask, store = decode(PrefixRequest, data), self._store
        if not 0 <= ask.first_layer < ask.last_layer <= len(store.layers):
            raise ProtocolError(f"layers {ask.first_layer} to {ask.last_layer} of {len(store.layers)} are requested")
        with self._changed:
            self._changed.wait_for(lambda: ask.sequence in self._offers, PLAN_WAIT_S)
            offer = self._offers.get(ask.sequence)
        if offer is None or (offer.op.first, offer.op.num_fetched) != (ask.first + ask.count, ask.count):
            raise TransferRefusedError(f"no plan lets a prefill worker fetch this: {ask}")

        def gather_loaded(stored: Tensor, ids: Sequence[int], message: Tensor, staging: Staging) -> None:
            if offer.load is not None and self._loads is not None:
                self._loads.wait_for_reply(offer.load, layer)
            gather(stored, ids, message, staging)

        for layer in range(ask.first_layer, ask.last_layer):
            for number, piece in enumerate(store.layers[layer]):
                for part in block_parts(store, layer, number, offer.ids[piece.group], gather_loaded):
                    begun = self._trace.now()
                    yield part
                    self._meter.add("bytes_sent", part.nbytes)
                    key = MessageKey(MessageKind.KV, offer.op.step, epoch=self._epoch, layer=layer)
                    self._trace.add(Event.LEND, begun, key, layer, offer.op.worker, part.nbytes)


class _Offer(NamedTuple):
    """Tokens that a grant lets a prefill worker fetch. ``ids``: their blocks, by layer group. ``load``: of these
    tokens, if it is still under way.
    """

    op: PrefillGrant
    ids: list[Sequence[int]]
    load: PageLoad | None
