"""The memory worker: keeps a part of the KV cache and computes attention over it.

It serves the compute workers of one model, each by a channel, from one Connect to the next. When a worker is lost or a
newer epoch begins, it closes all channels. Its sequences stay: a Bind of the same shape finds them again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from msgspec import structs

from lamina.kv.arena import prefault
from lamina.kv.pages import PROMPT, Provenance
from lamina.kv.storage import StorageBackend, StorageConfig, StorageError, open_storage
from lamina.netstack import Channel, ChannelError, ChannelTimeout, Fabric
from lamina.observe.trace import NULL_RECORDER, Recorder
from lamina.protocol.control import ChannelLost, Connect, LinkClosedError, Quiesced, TransferPeer
from lamina.protocol.offload_messages import (
    MAX_LISTED_PAGES,
    LoadReady,
    OffloadConfig,
    PagesExpired,
    StoredPages,
    TransferDone,
)
from lamina.protocol.reshard import RebuildKv, Reshard
from lamina.protocol.step_plan import BindRequest, BlockScoresReport, ProtocolError, StripesCopied
from lamina.utils.build_info import build_id
from lamina.workers.device_selection import CPU, FREE_MEMORY_SHARE
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.worker_process import CorruptedMemoryError

from .epoch_bind import accept_bind
from .epoch_server import EpochServer
from .kv_store import KvStore, check_bind
from .kv_transfer.live_migration import LiveMigration
from .kv_transfer.parity_rebuild import ParityRebuilder
from .kv_transfer.peer_links import PeerLinks
from .kv_transfer.prefix_send import PrefixSender
from .kv_transfer.reshard import KvReshard
from .kv_transfer.transfer_mesh import TransferMesh
from .lease_limits import check_keeps_no_pages
from .memory_bandwidth import measure_read_bandwidth
from .offload.page_capacity import page_capacity
from .offload.page_transfers import PageTransfers
from .offload.parity_pages import ParityPages, ParityReplies
from .offload.remote_pages import RemotePages
from .preallocation import StorePreallocation
from .worker_counters import Counters

POLL_S = 1.0  # seconds of a wait for a new connection, which only an event ends
EPOCH_POLL_S = 0.02  # the same, while the driver may begin the next epoch at any time
# Seconds between two epochs that a worker asks for: each one counts against --max-recoveries.
RECONNECT_S = 600.0
ToDriver = StoredPages | TransferDone | LoadReady | PagesExpired | BlockScoresReport | StripesCopied | ChannelLost


class MemoryWorker:
    """Serves one epoch after another. Holds state and makes no decisions."""

    def __init__(
        self,
        device: torch.device = CPU,
        trace: Recorder = NULL_RECORDER,
        share: float = FREE_MEMORY_SHARE,
        report: Callable[[ToDriver], None] = lambda message: None,
        around: Runtime = RUNTIME,
    ) -> None:
        """``share``: see KvStore. ``report``: sends a message to the driver, from any thread."""
        self.device, self._report, self._runtime, self._clock = device, report, around, around.clock
        self._counters = Counters()
        self._trace = trace
        self.store: KvStore | None = None  # outlives the epochs
        self.preallocation = StorePreallocation(device, share, self._counters)  # takes the memory of the next store
        self._medium: StorageBackend | None = None  # storage of offloaded pages; outlives the epochs, too
        self._tier: OffloadConfig | None = None  # the options that it was opened with
        self.transfers: PageTransfers | None = None  # this epoch's transfers
        self._stored: StoredPages | None = None  # pages to report to the driver in this epoch
        self._links: PeerLinks | None = None  # this epoch's links to other memory workers
        self._pages: RemotePages | None = None  # this epoch's pages of other hosts
        self._parity: ParityPages | ParityReplies | None = None  # of what is loaded in this epoch
        self._parity_links: PeerLinks | None = None  # this epoch's links for it
        self._reconnected_at = -math.inf  # when this worker last asked for another epoch
        self._lock = threading.Lock()
        self._fabric: EpochFabric | None = None  # this epoch's fabric
        self._next_epoch = -1  # the newest epoch that the driver has named
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Return the counters since the start.

        Seconds: attend_s, write_s, mix_s (recurrent layers), score_s (scoring stored blocks), grant_s (K and V of
        prefill workers), wait_s, plan_s. Counts: steps, rows, turns (one step in one layer), native_turns and
        graph_turns (a part of turns), refused, dropped (messages of older epochs), stores (allocated ones), connects.
        Attention: stored_bytes that were read, remote_bytes of these (of sequences whose home is another worker).
        Messages: bytes_received, bytes_sent (payload). Offload: load_s, save_s, fetch_s, kv_loaded_bytes,
        kv_saved_bytes, state_loaded_bytes and state_saved_bytes (of these), kv_peer_bytes (loaded from another host),
        kv_fetched_pages, kv_failed_transfers. KV from other memory workers: move_s, move_cpu_s, moved_bytes.

        Safe from any thread.
        """
        return self._counters.snapshot()

    def read_bandwidth(self) -> float:
        """Measure how many bytes a second the worker's device reads."""
        return measure_read_bandwidth(self.device)

    def abort(self, reason: str) -> None:
        """End ``serve`` now, and at once if it is called again. Safe from any thread."""
        with self._lock:
            self._aborted, fabric = reason, self._fabric
        if fabric is not None:
            fabric.end_epoch(reason)

    def leave_epochs_before(self, epoch: int) -> None:
        """End epochs older than ``epoch``, whose Connect is about to be served. Safe from any thread."""
        with self._lock:
            self._next_epoch, fabric = max(epoch, self._next_epoch), self._fabric
        if fabric is not None and fabric.epoch < epoch:
            fabric.end_epoch(_epoch_over(fabric.epoch, epoch))

    def serve(self, listener: EpochListener, meeting: Connect, net: Fabric | None = None) -> None:
        """Serve one epoch: accept a Bind and all other workers of the epoch, then run steps until a channel ends.

        All channels are closed at the end. The store stays. Transfers of pages continue until
        ``reject_until_next_epoch`` ends, or ``close``. ``net``: connects to other workers that have pages; None if none
        have.

        Always ends by an exception. Raises ChannelError, also if the epoch is over, and ProtocolError if a peer broke
        the contract. CorruptedMemoryError ends this process first, so that no other worker sees damaged data.
        """
        fabric = self._enter_epoch(meeting.epoch, net)
        self._counters.add("connects", 1)
        names = [TransferPeer(name, is_awaited=True) for name in meeting.prefix_readers]
        each = (meeting.peers, names, meeting.parity_peers)
        links, readers, parity = (PeerLinks(fabric, x, self._runtime, meeting.start_timeout_s) for x in each)
        self._links, self._parity_links = links, parity
        self._pages = self._parity = None

        def accept() -> Channel | None:
            """Return the channel of the next compute or prefill worker; None if another one came, or none."""
            with suppress(ChannelTimeout):
                channel = fabric.accept(listener, POLL_S)
                return None if any(x.accept(channel) for x in (links, readers, parity)) else channel
            return None

        try:
            with _ended_by_damage(self._runtime.exit_process), torch.inference_mode():
                first = None
                while first is None:  # as long as the driver lives
                    first = accept()
                store = accept_bind(
                    first, partial(self.open_store, meeting), self._counters, meeting.epoch, meeting.joining_names
                )
                migration = prefixes = None
                if names:
                    loads = self.transfers.loader if self.transfers else None
                    prefixes = PrefixSender(store, readers, self._counters, self._trace, meeting.epoch, loads)
                if meeting.peers and self.transfers is None:
                    migration = LiveMigration(store, links, meeting.epoch, self._report, self._counters)
                server = EpochServer(
                    first,
                    store,
                    self._counters,
                    self._trace,
                    meeting.epoch,
                    meeting.joining_names,
                    self._clock,
                    page_transfers=self.transfers,
                    live_migration=migration,
                    prefixes=prefixes,
                    report=self._report,
                )
                while server.num_missing or links.num_missing or readers.num_missing or parity.num_missing:
                    if server.num_missing:  # else steps may come while other memory workers are still to come
                        server.check_channels()
                    if (channel := accept()) is not None:
                        server.add_channel(channel)
                self._tell_pages()
                server.run()
        except ProtocolError as e:
            fabric.abort(str(e))
            raise
        finally:
            links.stop()
            readers.stop()
            parity.stop()
            fabric.close()

    def reject_until_next_epoch(self, listener: EpochListener, epoch: int) -> None:
        """Refuse peers that still connect under ``epoch``, of which a channel has ended. A refused peer can report this
        to the driver; otherwise it would wait for a worker that is gone. Continues until the driver ends this worker or
        begins another epoch, since other workers may have noticed the loss first.
        """
        fabric = self._enter_epoch(epoch)
        with suppress(ChannelError):
            while True:
                with suppress(ChannelTimeout):
                    fabric.accept(listener, EPOCH_POLL_S).abort(f"epoch {epoch} has ended here: a worker of it is lost")
        fabric.close()
        self._end_transfers()

    def close(self) -> None:
        """Close the storage backend. Only for the thread that serves."""
        self._end_transfers()
        if self._medium is not None:
            self._medium.close()
            self._medium = self._tier = None

    def _end_transfers(self) -> None:
        """End all transfers. After ``abort``, pages that are due are still saved; after a loss they are not, as the
        pool changes.
        """
        transfers, self.transfers = self.transfers, None
        if transfers is not None:
            transfers.end(finish=bool(self._aborted))

    def reshard(self, listener: EpochListener, fabric: Fabric, order: Reshard) -> int:
        """Replace the store by one of another shape, with KV from other memory workers. Returns the bytes received. The
        old store is discarded even if this fails. Raises ChannelError, ProtocolError, CorruptedMemoryError, and as
        KvStore.
        """
        self._end_transfers()
        old, self.store = self.store, None  # this also stops _settle for it
        mesh = TransferMesh(order, self._enter_epoch(order.epoch, fabric), self._runtime)
        begun = time.process_time()
        try:
            with _ended_by_damage(self._runtime.exit_process), self._counters.time("move_s"), torch.inference_mode():
                self.store = self._reshard(listener, mesh, order, old)
        finally:
            self.preallocation.arena.clear()
            mesh.close()
        self._counters.add("move_cpu_s", time.process_time() - begun)
        if self.store is not None:
            self._runtime.start_background(partial(self._settle, self.store), "lamina-touch")
        self._counters.add("moved_bytes", mesh.nbytes)
        return mesh.nbytes

    def rebuild(self, listener: EpochListener, fabric: Fabric, order: RebuildKv) -> int:
        """Send the KV from which a lost worker's KV is rebuilt, or receive it into a new store. Returns the bytes
        received. Raises ChannelError, ProtocolError, PlanError, CorruptedMemoryError, and as KvStore.
        """
        mesh, store = TransferMesh(order, self._enter_epoch(order.epoch, fabric), self._runtime), None
        try:
            with _ended_by_damage(self._runtime.exit_process), self._counters.time("move_s"), torch.inference_mode():
                if order.bind is not None:
                    store = self.preallocation.open_store(order.bind)
                elif self.store is not None:
                    self.store.reconcile(order.surviving)
                    if self.store.checksums:
                        self.store.checksums.verify_surviving(order.surviving)
                ParityRebuilder(order, store or self.store, mesh).run(listener)
        finally:
            mesh.close()
        if store is not None:
            store.committed.reconcile(order.surviving)
            self.store = store
        self._counters.add("moved_bytes", mesh.nbytes)
        return mesh.nbytes

    def prepare(self, bind: BindRequest | None, offload: OffloadConfig | None = None, *, ahead: bool = False) -> None:
        """Allocate memory ahead of time for the store of ``bind``: for a ``reshard``, or with ``ahead`` for a first
        Bind. See StorePreallocation. Safe from any thread.
        """
        self.preallocation.prepare(bind, offload, self.store, is_first_store=ahead)

    def _settle(self, store: KvStore) -> None:
        """Touch the pages of memory that are not written yet, so that steps need not wait for the system to map
        them.
        """
        each = (x for layer in store.layers for piece in layer for x in piece.kv.tensors)
        prefault(each if self.device == CPU else [], lambda: self.store is store)

    def _reshard(
        self, listener: EpochListener, mesh: TransferMesh, order: Reshard, old: KvStore | None
    ) -> KvStore | None:
        new, given = None, old.nbytes + (old.states.nbytes if old.states else 0) if old else 0
        if old is not None and old.checksums:
            old.checksums.verify_surviving(order.surviving)
        if order.bind is not None:
            new = self.preallocation.open_resharded_store(order.bind, given)
            new.tables.reconcile(order.surviving, moved=True)
            if new.states:
                new.states.versions.adopt(order.surviving)
        mover = KvReshard(order, old, new, mesh)
        mover.connect(listener)
        for layer in range(mover.num_layers):
            if new is not None:
                new.allocate_next_layer()
            mover.transfer_layer(layer)
            if old is not None:
                tensors = [x for piece in old.layers[layer] for x in piece.kv.tensors]
                for tensor in tensors if old.bind_request.kv.zero_on_free else []:
                    tensor.zero_()
                self.preallocation.arena.release(tensors)
                old.layers[layer] = []
        for mixer in range(mover.num_mixers):
            mover.transfer_states(mixer)
        mesh.finish()
        if new is not None:
            new.committed.reconcile(order.surviving)
        return new

    def _enter_epoch(self, epoch: int, fabric: Fabric | None = None) -> EpochFabric:
        entered = EpochFabric(epoch, fabric, self._clock)
        with self._lock:
            self._next_epoch = max(epoch, self._next_epoch)
            self._fabric = entered
            reason = self._aborted or (_epoch_over(epoch, self._next_epoch) if epoch < self._next_epoch else "")
        if reason:
            entered.end_epoch(reason)
        return entered

    def _tell_pages(self) -> None:
        """Report to the driver which pages can be loaded, after all workers that may hold pages have connected."""
        stored, self._stored = self._stored, None
        if stored is not None and self._pages is not None and self.transfers is not None:
            find = self._pages.set_locations
            keys = find(self.transfers.fragments.whole_page_fragments, stored.keys)
            states = find(self.transfers.fragments.states.whole, stored.states)
            self._report(structs.replace(stored, keys=keys, states=states))

    def quiesced(self, epoch: int) -> Quiesced:
        """Return what is stored of each sequence in all layers. Only for the thread that serves, between two epochs."""
        states = self.store.states if self.store else None
        return Quiesced(
            epoch=epoch,
            surviving_tokens=self.surviving_tokens(),
            state_versions=states.versions.report() if states else {},
        )

    def surviving_tokens(self) -> dict[int, int]:
        """Return, for each sequence, the number of tokens stored in all layers. Only for the thread that serves,
        between two epochs.
        """
        return {} if self.store is None else self.store.committed.report()

    def open_store(self, meeting: Connect, bind: BindRequest) -> KvStore:
        """Return the present store with its surviving sequences if ``bind`` has its shape; else replace it by a new
        one. Raises as KvStore, and PlanError if the store lacks a surviving sequence.
        """
        self._end_transfers()  # begun by a Bind that was refused
        if self.store is not None and self.store.fits(bind):
            self.store.set_peers(bind)
        else:
            check_bind(bind)  # first, since the old store's sequences are then discarded
            self.store = None  # the memory may not hold both
            self.store = self.preallocation.open_store(bind)
        if meeting.surviving is not None:
            self.store.reconcile(meeting.surviving)
        if meeting.storage is not None:
            if meeting.parity_peers and self._parity is None:  # a Bind may come again
                assert self._parity_links is not None
                links, lost = self._parity_links, partial(self._report_lost_channel, meeting.epoch)
                self._parity = ParityPages(links, lost) if bind.parity else ParityReplies(links, self._runtime)
            self._open_tier(meeting.storage, self.store, meeting.epoch)
        return self.store

    def _report_lost_channel(self, epoch: int, error: str) -> bool:
        """Ask for another epoch, in which all workers reconnect; not again within RECONNECT_S. Returns whether it did
        so.
        """
        if (now := self._clock()) - self._reconnected_at <= RECONNECT_S:
            return False
        self._reconnected_at = now
        with suppress(LinkClosedError):
            self._report(ChannelLost(epoch, error, is_serving=True))
        return True

    def _open_tier(self, offload: OffloadConfig, store: KvStore, epoch: int) -> None:
        """Open the storage backend of offloaded pages. Raises ValueError if it cannot be opened."""
        check_keeps_no_pages(offload.backend)
        room = page_capacity(offload, store.bind_request, store.bind_reply.kv_bytes) if offload.keeps else 0
        medium, gone = self._medium_of(offload)
        recipe = Provenance(PROMPT, offload.chunk_tokens, build_id(), offload.ranks)
        report, meter, trace = self._report, self._counters, self._trace
        assert self._links is not None
        self._pages = self._pages or RemotePages(medium, self._links, meter)  # a Bind may come again
        self.transfers = PageTransfers(
            medium,
            store,
            report,
            meter,
            epoch,
            offload.rank,
            recipe,
            trace,
            read=self._pages.read,
            parity=self._parity,
            expires=offload.ttl_s > 0,
            keeps=offload.keeps,
        )
        try:
            keys = self.transfers.listed_pages(MAX_LISTED_PAGES)
            states = self.transfers.listed_states(MAX_LISTED_PAGES)
        except StorageError as e:
            raise ValueError(str(e)) from None
        self._stored = StoredPages(epoch=epoch, keys=keys, capacity=room, evicted=gone, states=states)

    def _medium_of(self, offload: OffloadConfig) -> tuple[StorageBackend, list[bytes]]:
        """Return the open storage backend and the keys of pages that it evicted, as other workers now share its size.
        Opens another one if options other than the number of workers have changed. Raises ValueError.
        """
        medium, had, gone = self._medium, self._tier, list[bytes]()
        if medium is None or had is None or had != structs.replace(offload, workers=had.workers):
            self.close()
            self._medium = medium = open_storage(offload.backend, _place(offload))
        elif had.workers != offload.workers:
            try:
                gone = medium.set_num_workers(offload.workers)
            except StorageError as e:
                raise ValueError(str(e)) from None
        self._tier = offload
        return medium, gone


def _place(offload: OffloadConfig) -> StorageConfig:
    return StorageConfig(
        offload.total_bytes,
        offload.identity,
        offload.workers,
        offload.policy,
        offload.directory,
        offload.secret,
        offload.server,
        memory_bytes=offload.memory_bytes,
        ttl_s=offload.ttl_s,
    )


@contextmanager
def _ended_by_damage(end: Callable[[str], None]) -> Iterator[None]:
    """End the process if its memory is damaged, before any other worker receives its data."""
    try:
        yield
    except CorruptedMemoryError as e:
        end(f"memory worker (pid {os.getpid()}): {e}: it ends, and its KV is computed again")
        raise


def _epoch_over(epoch: int, newer: int) -> str:
    return f"epoch {epoch} is over: epoch {newer} begins"
