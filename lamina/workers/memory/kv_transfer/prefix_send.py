"""The beginnings of prompts that a memory worker sends to prefill workers, which compute the rest.

The plan that grants a prompt's first chunk says how many stored tokens precede it. They are sent at once, on a channel
of their own: whole blocks, layer by layer, while this worker serves rounds. Of tokens that are still being loaded, each
layer is sent as soon as it is there. If the load fails, whatever the blocks contain is sent, and the driver discards
what is computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.step_plan import MessageKey, MessageKind, PrefillGrant
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.kv_load import KvLoader, PageLoad
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import Staging

from .block_parts import block_parts, gather, max_block_bytes, whole_blocks
from .peer_links import PeerLinks
from .transfer import TransferPart, TransferRefusedError
from .transfer_link import inbox

SILENCE_S = 60.0  # seconds without room in a prefill worker's inbox: it may compute other chunks first


class PrefixSender:
    """The sends of one epoch. Only the thread that serves rounds calls ``send``."""

    def __init__(
        self,
        store: KvStore,
        links: PeerLinks,
        meter: Counters,
        trace: Recorder = NULL_RECORDER,
        epoch: int = 0,
        loads: KvLoader | None = None,
    ) -> None:
        """``links``: to all prefill workers, by number; opened here. ``loads``: if pages are loaded."""
        self._store, self._links, self._meter, self._trace, self._epoch = store, links, meter, trace, epoch
        self._loads = loads
        each = inbox(max_block_bytes(store))
        links.open(SILENCE_S, inboxes=(each, each), device=store.device)

    def send(self, grant: PrefillGrant, worker: int, layers: range) -> None:
        """Send ``layers`` of the tokens before an applied grant to prefill worker ``worker``; refuse them if they are
        no whole stored blocks.
        """
        ids = whole_blocks(self._store, grant.sequence, grant.first - grant.num_fetched, grant.num_fetched)
        load = self._loads.load_of(grant.sequence) if self._loads else None
        self._store.staging.record_event()()  # the device has written them

        def parts() -> Iterator[TransferPart]:
            if ids is None:
                raise TransferRefusedError(f"there are no such tokens: {grant}")
            for layer in layers:
                for number, piece in enumerate(self._store.layers[layer]):
                    for part in block_parts(self._store, layer, number, ids[piece.group], gather):
                        yield part._replace(copy=partial(self._copy, grant, load, part))

        self._links.by_number[worker].reply(grant.step, parts)

    def _copy(
        self, grant: PrefillGrant, load: PageLoad | None, part: TransferPart, message: memoryview, staging: Staging
    ) -> None:
        begun = self._trace.now()
        if load is not None and self._loads is not None:
            self._loads.wait_for_reply(load, part.layer)
        part.copy(message, staging)
        self._meter.add("bytes_sent", part.nbytes)
        key = MessageKey(MessageKind.KV, grant.step, epoch=self._epoch, layer=part.layer)
        self._trace.add(Event.LEND, begun, key, part.layer, grant.worker, part.nbytes)
