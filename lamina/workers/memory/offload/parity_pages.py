"""K and V that are loaded from storage, as the parity worker (--kv-parity) gets them: from the pools of the others.

The parity worker stores no pages. It requests what each other worker of its rank has loaded, from that worker's pool
and not from its storage, where a page may have been saved anew since. The exclusive or of these is its own part. So the
parity is that of the bits that are in the pools. The sequence's blocks stay until all workers have reported the end of
the load, the parity worker too. A page that one worker could not load fails in the parity worker, too: else a loss
before that worker's report would rebuild whatever its blocks contain.

Each page is sent as soon as it is loaded, so a load may take as long as its storage needs for each page. A load whose
storage does not reply is abandoned there, too. Without a link no load has a
parity: then all workers reconnect in another epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from lamina.kv.pages import PageFragment
from lamina.kv.storage import StorageError
from lamina.netstack import ChannelError
from lamina.protocol.step_plan import Free, LoadKv, ProtocolError, StepPlan, Truncate, decode, encode
from lamina.workers.device_selection import CPU
from lamina.workers.memory.kv_transfer.peer_links import PeerLinks
from lamina.workers.memory.kv_transfer.transfer import TransferPart, TransferRefusedError
from lamina.workers.memory.kv_transfer.transfer_link import TransferLink, parts_from, parts_into, split_into
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import HostStaging

from .kv_load import LATE_LOAD_S, KvLoader, OpLoad, PageLoad
from .page_fragments import StoreFragments

PLAN_WAIT_S = 30.0  # seconds until the plan of a requested load, which may come before it
ANSWER_S = PLAN_WAIT_S + LATE_LOAD_S + 5.0  # seconds without a message of a worker that has to reply


class LoadedLayersRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for some layers of page ``page`` of the load ``transfer_id``."""

    transfer_id: int
    page: int
    first_layer: int
    last_layer: int  # the first one that is not wanted


class _Offer(NamedTuple):
    loader: KvLoader
    load: PageLoad
    op: OpLoad
    fragments: StoreFragments


class ParityReplies:
    """A worker's replies to the parity worker in an epoch. Only the thread that serves rounds calls ``begin``."""

    def __init__(self, links: PeerLinks, around: Runtime = RUNTIME) -> None:
        """``links``: to the parity worker; opened here."""
        self._offers: dict[int, _Offer] = {}  # by the load's number
        self._changed = around.condition()  # protects them
        links.open(ANSWER_S, self.answer)

    def begin(self, plan: StepPlan, loader: KvLoader, fragments: StoreFragments) -> None:
        """Offer what an applied plan loads into the pool of ``fragments``, until the plan that frees it."""
        gone = {op.sequence for op in plan.ops if isinstance(op, Free | Truncate)}
        loads = [load for op in plan.ops if isinstance(op, LoadKv) and (load := loader.load_of(op.sequence))]
        if not gone and not loads:
            return
        with self._changed:
            for number in [n for n, offer in self._offers.items() if offer.load.sequence in gone]:
                del self._offers[number]
            for load in loads:
                for each in load.ops:
                    self._offers[each.op.transfer_id] = _Offer(loader, load, each, fragments)
            self._changed.notify_all()

    def answer(self, data: bytes) -> Iterator[TransferPart]:
        """Yield the parts of a reply, once the page's layers are loaded. Raises TransferRefusedError, ProtocolError."""
        ask = decode(LoadedLayersRequest, data)
        with self._changed:
            self._changed.wait_for(lambda: ask.transfer_id in self._offers, PLAN_WAIT_S)
            offer = self._offers.get(ask.transfer_id)
        if offer is None or not 0 <= ask.page < len(offer.op.blocks):
            raise TransferRefusedError(f"no plan loads this: {ask}")
        if not 0 <= ask.first_layer < ask.last_layer <= offer.fragments.num_layers:
            raise ProtocolError(f"layers {ask.first_layer} to {ask.last_layer} are requested")
        offer.loader.wait_for_reply(offer.load, ask.last_layer - 1, (offer.op, ask.page))
        is_here = offer.load.error is None and offer.op.layers[ask.page] >= ask.last_layer
        if not is_here or ask.page >= offer.op.num_pages:
            raise TransferRefusedError(f"it was not loaded here: {ask}")
        if (blocks := offer.op.blocks[ask.page]) is None:
            raise TransferRefusedError(f"its blocks were freed: {ask}")
        layers = range(ask.first_layer, ask.last_layer)
        yield from parts_from(b"".join(offer.fragments.read(blocks, HostStaging(CPU), layers).values()))


class ParityPages:
    """The loads of the parity worker in an epoch. One thread uses it."""

    def __init__(self, links: PeerLinks, lost: Callable[[str], bool] = lambda error: True) -> None:
        """``links``: to all other memory workers of its rank; opened here. ``lost``: called at each read over a lost
        link, until it returns True.
        """
        self._links, self._lost, self._is_lost = links, lost, False
        links.open(ANSWER_S)

    def read(self, op: LoadKv, page: int, layers: range, into: Mapping[PageFragment, memoryview]) -> None:
        """Fill the buffers with the exclusive or of what all others have loaded. Raises StorageError."""
        ask = encode(LoadedLayersRequest(op.transfer_id, page, layers.start, layers.stop))
        sources = list(self._links.by_number.values())
        came = [bytearray(sum(view.nbytes for view in into.values())) for _ in sources]
        each = [source.fetch(ask, parts_into(data), ANSWER_S) for source, data in zip(sources, came, strict=True)]
        errors = list[ChannelError]()
        for source, transfer in zip(sources, each, strict=True):
            try:  # of all, before the next request: a link has one at a time
                source.wait(transfer)
            except ChannelError as e:
                errors.append(e)
                self._report_loss(source)
        if errors:
            raise StorageError(f"the parity of what was loaded is not known: {errors[0]}") from errors[0]
        parity = np.bitwise_xor.reduce([np.frombuffer(data, np.uint8) for data in came], axis=0)
        split_into(into.values(), parity.data)

    def _report_loss(self, source: TransferLink) -> None:
        if source.lost and not self._is_lost:
            self._is_lost = self._lost(f"{source.peer}: {source.lost}")
