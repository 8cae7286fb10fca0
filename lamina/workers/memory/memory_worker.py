"""The memory worker: keeps the KV cache and computes core attention.

It serves the replicas of one model, a channel each, from a Connect to the next. When one of them is lost, or a newer
epoch begins, it lets go of all channels. The sequences stay: a Bind of the same shape finds them.
"""

from __future__ import annotations

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
from lamina.protocol.control import Connect
from lamina.protocol.migration_ops import StripesCopied
from lamina.protocol.offload_messages import MAX_LISTED_PAGES, LoadReady, OffloadConfig, StoredPages, TransferDone
from lamina.protocol.reshard import RebuildKv, Reshard
from lamina.protocol.sparse_ops import BlockScoresReport
from lamina.protocol.step_plan import BindRequest, ProtocolError
from lamina.utils.build_info import build_id
from lamina.workers.device_selection import CPU, FREE_MEMORY_SHARE
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.worker_process import CorruptedMemoryError

from .epoch_server import EpochServer
from .kv_store import KvStore, check_bind
from .kv_transfer.live_migration import LiveMigration
from .kv_transfer.parity_rebuild import ParityRebuilder
from .kv_transfer.reshard import KvTransfer
from .lease_limits import check_allowed_for_guest
from .memory_bandwidth import measure_read_bandwidth
from .offload.page_capacity import page_capacity
from .offload.page_transfers import PageTransfers
from .offload.remote_pages import RemotePages
from .preallocation import StorePreallocation
from .worker_counters import Counters

POLL_S = 1.0  # of a wait that only an event ends: somebody comes
EPOCH_POLL_S = 0.02  # of the same, while the next epoch may be called for at any time
ToDriver = StoredPages | TransferDone | LoadReady | BlockScoresReport | StripesCopied


class MemoryWorker:
    """Serves one epoch after the other. Holds state, decides nothing."""

    def __init__(
        self,
        device: torch.device = CPU,
        trace: Recorder = NULL_RECORDER,
        share: float = FREE_MEMORY_SHARE,
        report: Callable[[ToDriver], None] = lambda message: None,
        around: Runtime = RUNTIME,
    ) -> None:
        """``share``: see Store. ``report``: to the driver, from any thread."""
        self.device, self._report, self._runtime, self._clock = device, report, around, around.clock
        self._counters = Counters()
        self._trace = trace
        self._store: KvStore | None = None  # outlives the epochs
        self._preallocation = StorePreallocation(device, share, self._counters)  # of the next one
        self._medium: StorageBackend | None = None  # so does it
        self._tier: OffloadConfig | None = None  # where that is
        self._transfers: PageTransfers | None = None  # of the epoch
        self._stored: StoredPages | None = None  # to be reported in this epoch
        self._peers: RemotePages | None = None  # of the epoch
        self._lock = threading.Lock()
        self._fabric: EpochFabric | None = None  # of the epoch
        self._next_epoch = -1  # the newest epoch that the driver has named
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Since the start: attend_s, write_s, score_s (counting what rows attend), grant_s (writing what prefill
        workers send), wait_s, plan_s; steps, rows, turns (a step in a layer), native_turns and graph_turns of them,
        refused, dropped (messages of older epochs); stores (that were allocated), connects; stored_bytes that attention
        read, of which remote_bytes of sequences at home elsewhere; payload bytes_received, bytes_sent; load_s, save_s,
        fetch_s, kv_loaded_bytes, kv_saved_bytes (pages from and to the medium beside the pool), kv_peer_bytes of them
        (that another host had), kv_fetched_pages, kv_failed_transfers; move_s, move_cpu_s, moved_bytes (KV that came
        from other memory workers).

        Safe from any thread.
        """
        return self._counters.snapshot()

    def read_bandwidth(self) -> float:
        """Bytes a second that its device reads, measured now."""
        return measure_read_bandwidth(self.device)

    def abort(self, reason: str) -> None:
        """End ``serve``, now and whenever it is called again. Safe from any thread."""
        with self._lock:
            self._aborted, fabric = reason, self._fabric
        if fabric is not None:
            fabric.end_epoch(reason)

    def leave_epochs_before(self, epoch: int) -> None:
        """A Connect of ``epoch`` is to be served: end those of older epochs. Safe from any thread."""
        with self._lock:
            self._next_epoch, fabric = max(epoch, self._next_epoch), self._fabric
        if fabric is not None and fabric.epoch < epoch:
            fabric.end_epoch(_epoch_over(fabric.epoch, epoch))

    def serve(self, listener: EpochListener, meeting: Connect, net: Fabric | None = None) -> None:
        """Have one bind and the others join who come to ``listener``,
        then serve steps until a channel ends or the epoch is
        over; close all channels. The store stays, and transfers go on until ``reject_until_next_epoch`` is over, or
        ``close``. ``net``: to reach others that have pages; None where none have.

        It ends by an exception only: ChannelError, ProtocolError where a peer broke the contract, or
        CorruptedMemoryError, which ends a process before anybody hears of it.
        """
        fabric = self._enter_epoch(meeting.epoch, net)
        self._counters.add("connects", 1)
        peers = self._peers = RemotePages(
            fabric, fabric.listener_for(listener), meeting.peers, self._counters, self._clock
        )
        copies = LiveMigration(fabric, meeting.migration_peers, self._report, self._counters, self._runtime)
        try:
            with _ended_by_damage(self._runtime.exit_process), torch.inference_mode():
                open_store = partial(self._open_store, meeting)
                server = EpochServer(
                    _first(peers, copies),
                    open_store,
                    self._counters,
                    self._trace,
                    meeting.epoch,
                    meeting.joining_names,
                    self._clock,
                )
                server.page_transfers, server.report = self._transfers, self._report
                if meeting.migration_peers and self._store is not None:
                    copies.start(self._store)
                    server.live_migration = copies
                while server.num_missing or peers.num_missing or copies.num_missing:
                    self._join(server, peers, copies)
                self._tell_pages()
                server.run()
        except ProtocolError as e:
            fabric.abort(str(e))
            raise
        finally:
            peers.stop()
            copies.stop()
            fabric.close()

    def reject_until_next_epoch(self, listener: EpochListener, epoch: int) -> None:
        """A channel of ``epoch`` has ended: until another epoch is called for, whoever still comes to ``listener``
        under that one is told so, and can tell the driver; else it would wait for a worker that is not there. By then
        the driver has said whether it ends, or has lost somebody: others may have heard of that before.
        """
        fabric = self._enter_epoch(epoch)
        with suppress(ChannelError):
            while True:
                with suppress(ChannelTimeout):
                    fabric.accept(listener, EPOCH_POLL_S).abort(f"epoch {epoch} has ended here: a worker of it is lost")
        fabric.close()
        self._end_transfers()

    def close(self) -> None:
        """Let go of the medium. For the thread that serves."""
        self._end_transfers()
        if self._medium is not None:
            self._medium.close()
            self._medium = self._tier = None

    def _end_transfers(self) -> None:
        """Behind the driver's end what is to be saved is saved; behind a loss it is not, and the pool changes."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.end(finish=bool(self._aborted))

    def reshard(self, listener: EpochListener, fabric: Fabric, order: Reshard) -> int:
        """Have another store in place of the one that there is, with KV that other memory workers have. Bytes that
        came. The store from before is gone, however this ends. Raises ChannelError, ProtocolError,
        CorruptedMemoryError, and as Store.
        """
        self._end_transfers()
        old, self._store = self._store, None  # nobody settles that one any more
        view, begun = self._enter_epoch(order.epoch, fabric), time.thread_time()
        try:
            with _ended_by_damage(self._runtime.exit_process), self._counters.time("move_s"), torch.inference_mode():
                self._store, nbytes = self._reshard(listener, view, order, old)
        finally:
            self._preallocation.arena.clear()
            view.close()
        self._counters.add("move_cpu_s", time.thread_time() - begun)
        if self._store is not None:
            self._runtime.start_background(partial(self._settle, self._store), "lamina-touch")
        self._counters.add("moved_bytes", nbytes)
        return nbytes

    def rebuild(self, listener: EpochListener, fabric: Fabric, order: RebuildKv) -> int:
        """Give what a lost worker's KV is made of, or have that KV, in a new store. Bytes that came. Raises
        ChannelError, ProtocolError, PlanError, CorruptedMemoryError, and as Store.
        """
        view, store = self._enter_epoch(order.epoch, fabric), None
        try:
            with _ended_by_damage(self._runtime.exit_process), self._counters.time("move_s"), torch.inference_mode():
                if order.bind is not None:
                    store = self._preallocation.open_store(order.bind)
                elif self._store is not None:
                    self._store.reconcile(order.surviving)
                    if self._store.checksums:
                        self._store.checksums.verify_surviving(order.surviving)
                rebuilder = ParityRebuilder(order, None if store else self._store, store, self._clock)
                rebuilder.connect(view, listener)
                for layer in range(rebuilder.num_layers):
                    rebuilder.transfer_layer(layer)
        finally:
            view.close()
        if store is not None:
            store.committed.reconcile(order.surviving)
            self._store = store
        self._counters.add("moved_bytes", rebuilder.nbytes)
        return rebuilder.nbytes

    def prepare(self, bind: BindRequest | None, offload: OffloadConfig | None = None, *, ahead: bool = False) -> None:
        """Take memory for the store of ``bind``, which a ``reshard`` may bring, or ``ahead`` a Bind;
        see StorePreallocation. Safe from any thread.
        """
        self._preallocation.prepare(bind, offload, self._store, is_first_store=ahead)

    def _settle(self, store: KvStore) -> None:
        """Take the memory of what nobody has written yet."""
        each = (x for layer in store.layers for piece in layer for x in piece.kv.tensors)
        prefault(each if self.device == CPU else [], lambda: self._store is store)

    def _reshard(
        self, listener: EpochListener, view: EpochFabric, order: Reshard, old: KvStore | None
    ) -> tuple[KvStore | None, int]:
        new, given = None, old.nbytes if old else 0
        if old is not None and old.checksums:
            old.checksums.verify_surviving(order.surviving)
        if order.bind is not None:
            new = self._preallocation.open_resharded_store(order.bind, given)
            new.tables.reconcile(order.surviving, moved=True)
        mover = KvTransfer(order, old, new, self._clock)
        mover.connect(view, listener)
        for layer in range(mover.num_layers):
            if new is not None:
                new.allocate_next_layer()
            mover.transfer_layer(layer)
            if old is not None:
                tensors = [x for piece in old.layers[layer] for x in piece.kv.tensors]
                for tensor in tensors if old.bind_request.kv.zero_on_free else []:
                    tensor.zero_()
                self._preallocation.arena.release(tensors)
                old.layers[layer] = []
        if new is not None:
            new.committed.reconcile(order.surviving)
        return new, mover.nbytes

    def _enter_epoch(self, epoch: int, fabric: Fabric | None = None) -> EpochFabric:
        entered = EpochFabric(epoch, fabric, self._clock)
        with self._lock:
            self._next_epoch = max(epoch, self._next_epoch)
            self._fabric = entered
            reason = self._aborted or (_epoch_over(epoch, self._next_epoch) if epoch < self._next_epoch else "")
        if reason:
            entered.end_epoch(reason)
        return entered

    def _join(self, server: EpochServer, peers: RemotePages, copies: LiveMigration) -> None:
        if server.num_missing:  # else steps may come while other memory workers are still to come
            server.check_channels()
        with suppress(ChannelTimeout):
            if (channel := _next(peers, copies)) is not None:
                server.add_channel(channel)

    def _tell_pages(self) -> None:
        """The driver hears which pages can be loaded, once all have come who may have some."""
        stored, self._stored = self._stored, None
        if stored is not None and self._peers is not None and self._transfers is not None:
            self._report(
                structs.replace(
                    stored, keys=self._peers.set_locations(self._transfers.whole_page_fragments, stored.keys)
                )
            )

    def surviving_tokens(self) -> dict[int, int]:
        """Sequence -> tokens that it has in all layers. For the thread that serves, between two epochs."""
        return {} if self._store is None else self._store.committed.report()

    def _open_store(self, meeting: Connect, bind: BindRequest) -> KvStore:
        """The store that is there, with the sequences that stay, where ``bind`` is of its shape. Else a new one
        in its place. Raises as Store; PlanError where these are not here.
        """
        self._end_transfers()  # of a Bind that was refused
        if self._store is not None and self._store.fits(bind):
            self._store.set_peers(bind)
        else:
            check_bind(bind)  # before the sequences of the old one are given up
            self._store = None  # both may not fit
            self._store = self._preallocation.open_store(bind)
        if meeting.surviving is not None:
            self._store.reconcile(meeting.surviving)
        if meeting.storage is not None:
            self._open_tier(meeting.storage, self._store, meeting.epoch)
        return self._store

    def _open_tier(self, offload: OffloadConfig, store: KvStore, epoch: int) -> None:
        """Raises ValueError where it cannot be had."""
        check_allowed_for_guest("--kv-offloading-size or --kv-offload dir=", wanted=True)
        room = page_capacity(offload, store.bind_request, store.bind_reply.kv_bytes)
        medium, gone = self._medium_of(offload)
        recipe = Provenance(PROMPT, offload.chunk_tokens, build_id(), offload.ranks)
        report, meter, trace = self._report, self._counters, self._trace
        assert self._peers is not None
        self._peers.serve(medium)
        read = self._peers.read
        self._transfers = PageTransfers(medium, store, report, meter, epoch, offload.rank, recipe, trace, read=read)
        try:
            keys = self._transfers.listed_pages(MAX_LISTED_PAGES)
        except StorageError as e:
            raise ValueError(str(e)) from None
        self._stored = StoredPages(epoch=epoch, keys=keys, capacity=room, evicted=gone)

    def _medium_of(self, offload: OffloadConfig) -> tuple[StorageBackend, list[bytes]]:
        """The one that is open, with all that it has, also where others have come to share its size: then some pages
        may have given way, whose keys are told. Raises ValueError.
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
    """A process whose memory is damaged ends before anybody hears of it."""
    try:
        yield
    except CorruptedMemoryError as e:
        end(f"memory worker (pid {os.getpid()}): {e}: it ends, and its KV is computed again")
        raise


def _epoch_over(epoch: int, newer: int) -> str:
    return f"epoch {epoch} is over: epoch {newer} begins"


def _first(peers: RemotePages, copies: LiveMigration) -> Channel:
    """That of the one who binds. Waits as long as the driver lives."""
    while True:
        with suppress(ChannelTimeout):
            if (channel := _next(peers, copies)) is not None:
                return channel


def _next(peers: RemotePages, copies: LiveMigration) -> Channel | None:
    """The next one who comes; None where it was another memory worker. Raises ChannelTimeout."""
    channel = peers.accept(POLL_S)
    return None if channel is None or copies.accept(channel) else channel
