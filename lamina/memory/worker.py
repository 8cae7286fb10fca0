"""The memory worker: keeps the KV cache and computes core attention.

It serves the replicas of one model, a channel each, from a Connect to the next. When one of them is lost, or a newer
view begins, it lets go of all channels. The sequences stay: a Bind of the same shape finds them.
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

from lamina.build import build_id
from lamina.kv.media import Medium, MediumError, MediumPlace, open_medium
from lamina.kv.pages import PROMPT, Recipe
from lamina.kv.slabs import touch
from lamina.netstack import Channel, ChannelError, ChannelTimeout, Fabric
from lamina.observe.trace import OFF, Recorder
from lamina.protocol.control import Connect
from lamina.protocol.move_ops import StripesCopied
from lamina.protocol.plan import Bind, ProtocolError
from lamina.protocol.recut import Rebuild, Recut
from lamina.protocol.sparse_ops import Scored
from lamina.protocol.tiers import MOST_LISTED, GateOpened, StoredPages, TierPlace, Transferred
from lamina.workers.devices import CPU, FREE_PART
from lamina.workers.process import DamagedError
from lamina.workers.surroundings import HERE, Surroundings
from lamina.workers.view import ViewDoor, ViewFabric

from .copies import StripeCopies
from .lease import check_within
from .meter import Meter
from .moves import Mover
from .pages.peers import PeerPages
from .pages.room import room_of
from .pages.transfers import Transfers
from .rate import read_rate
from .rebuild import Rebuilder
from .room import StoreRoom
from .session import Session
from .store import Store, check_bind

POLL_S = 1.0  # of a wait that only an event ends: somebody comes
TURN_S = 0.02  # of the same, while the next view may be called for at any time
ToDriver = StoredPages | Transferred | GateOpened | Scored | StripesCopied


class MemoryWorker:
    """Serves one view after the other. Holds state, decides nothing."""

    def __init__(
        self,
        device: torch.device = CPU,
        trace: Recorder = OFF,
        share: float = FREE_PART,
        report: Callable[[ToDriver], None] = lambda message: None,
        around: Surroundings = HERE,
    ) -> None:
        """``share``: see Store. ``report``: to the driver, from any thread."""
        self.device, self._report, self._around, self._clock = device, report, around, around.clock
        self._meter = Meter()
        self._trace = trace
        self._store: Store | None = None  # outlives the sessions
        self._room = StoreRoom(device, share, self._meter)  # of the next one
        self._medium: Medium | None = None  # so does it
        self._tier: TierPlace | None = None  # where that is
        self._transfers: Transfers | None = None  # of the session
        self._stored: StoredPages | None = None  # to be told, of the session
        self._peers: PeerPages | None = None  # of the session
        self._lock = threading.Lock()
        self._fabric: ViewFabric | None = None  # of the session
        self._called = -1  # the newest view that the driver has named
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Since the start: attend_s, write_s, score_s (counting what rows attend), grant_s (writing what prefill
        workers send), wait_s, plan_s; steps, rows, turns (a step in a layer), native_turns and graph_turns of them,
        refused, dropped (messages of older views); stores (that were allocated), connects; stored_bytes that attention
        read, of which remote_bytes of sequences at home elsewhere; payload bytes_received, bytes_sent; load_s, save_s,
        fetch_s, kv_loaded_bytes, kv_saved_bytes (pages from and to the medium beside the pool), kv_peer_bytes of them
        (that another host had), kv_fetched_pages, kv_failed_transfers; move_s, move_cpu_s, moved_bytes (KV that came
        from other memory workers).

        Safe from any thread.
        """
        return self._meter.read()

    def rate(self) -> float:
        """Bytes a second that its device reads, measured now."""
        return read_rate(self.device)

    def abort(self, reason: str) -> None:
        """End ``serve``, now and whenever it is called again. Safe from any thread."""
        with self._lock:
            self._aborted, fabric = reason, self._fabric
        if fabric is not None:
            fabric.leave(reason)

    def leave(self, view: int) -> None:
        """A Connect of ``view`` is to be served: end those of older views. Safe from any thread."""
        with self._lock:
            self._called, fabric = max(view, self._called), self._fabric
        if fabric is not None and fabric.view < view:
            fabric.leave(_over(fabric.view, view))

    def serve(self, door: ViewDoor, meeting: Connect, net: Fabric | None = None) -> None:
        """Have one bind and the others join who come to ``door``, then serve steps until a channel ends or the view is
        over; close all channels. The store stays, and transfers go on until ``turn_away`` is over, or ``close``.
        ``net``: to reach others that have pages; None where none have.

        It ends by an exception only: ChannelError, ProtocolError where a peer broke the contract, or DamagedError,
        which ends a process before anybody hears of it.
        """
        fabric = self._enter(meeting.view, net)
        self._meter.add("connects", 1)
        peers = self._peers = PeerPages(fabric, fabric.at(door), meeting.peers, self._meter, self._clock)
        copies = StripeCopies(fabric, meeting.movers, self._report, self._meter, self._around)
        try:
            with _ended_by_damage(self._around.end), torch.inference_mode():
                open_store = partial(self._open_store, meeting)
                session = Session(
                    _first(peers, copies),
                    open_store,
                    self._meter,
                    self._trace,
                    meeting.view,
                    meeting.joining,
                    self._clock,
                )
                session.transfers, session.report = self._transfers, self._report
                if meeting.movers and self._store is not None:
                    copies.meet(self._store)
                    session.copies = copies
                while session.missing or peers.missing or copies.missing:
                    self._join(session, peers, copies)
                self._tell_pages()
                session.run()
        except ProtocolError as e:
            fabric.abort(str(e))
            raise
        finally:
            peers.end()
            copies.end()
            fabric.close()

    def turn_away(self, door: ViewDoor, view: int) -> None:
        """A channel of ``view`` has ended: until another view is called for, whoever still comes to ``door`` under that
        one is told so, and can tell the driver; else it would wait for a worker that is not there. By then the driver
        has said whether it ends, or has lost somebody: others may have heard of that before.
        """
        fabric = self._enter(view)
        with suppress(ChannelError):
            while True:
                with suppress(ChannelTimeout):
                    fabric.accept(door, TURN_S).abort(f"view {view} has ended here: a worker of it is lost")
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

    def recut(self, door: ViewDoor, fabric: Fabric, order: Recut) -> int:
        """Have another store in place of the one that there is, with KV that other memory workers have. Bytes that
        came. The store from before is gone, however this ends. Raises ChannelError, ProtocolError, DamagedError, and as
        Store.
        """
        self._end_transfers()
        old, self._store = self._store, None  # nobody settles that one any more
        view, begun = self._enter(order.view, fabric), time.thread_time()
        try:
            with _ended_by_damage(self._around.end), self._meter.time("move_s"), torch.inference_mode():
                self._store, nbytes = self._moved(door, view, order, old)
        finally:
            self._room.slabs.clear()
            view.close()
        self._meter.add("move_cpu_s", time.thread_time() - begun)
        if self._store is not None:
            self._around.beside(partial(self._settle, self._store), "lamina-touch")
        self._meter.add("moved_bytes", nbytes)
        return nbytes

    def rebuild(self, door: ViewDoor, fabric: Fabric, order: Rebuild) -> int:
        """Give what a lost worker's KV is made of, or have that KV, in a new store. Bytes that came. Raises
        ChannelError, ProtocolError, PlanError, DamagedError, and as Store.
        """
        view, store = self._enter(order.view, fabric), None
        try:
            with _ended_by_damage(self._around.end), self._meter.time("move_s"), torch.inference_mode():
                if order.bind is not None:
                    store = self._room.open(order.bind)
                elif self._store is not None:
                    self._store.reconcile(order.keep)
                    if self._store.sums:
                        self._store.sums.look(order.keep)
                rebuilder = Rebuilder(order, None if store else self._store, store, self._clock)
                rebuilder.meet(view, door)
                for layer in range(rebuilder.num_layers):
                    rebuilder.move(layer)
        finally:
            view.close()
        if store is not None:
            store.written.reconcile(order.keep)
            self._store = store
        self._meter.add("moved_bytes", rebuilder.nbytes)
        return rebuilder.nbytes

    def prepare(self, bind: Bind | None, tier: TierPlace | None = None, *, ahead: bool = False) -> None:
        """Take memory for the store of ``bind``, which a ``recut`` may bring, or ``ahead`` a Bind; see StoreRoom. Safe
        from any thread.
        """
        self._room.prepare(bind, tier, self._store, ahead=ahead)

    def _settle(self, store: Store) -> None:
        """Take the memory of what nobody has written yet."""
        each = (x for layer in store.layers for piece in layer for x in piece.kv.tensors)
        touch(each if self.device == CPU else [], lambda: self._store is store)

    def _moved(self, door: ViewDoor, view: ViewFabric, order: Recut, old: Store | None) -> tuple[Store | None, int]:
        new, given = None, old.nbytes if old else 0
        if old is not None and old.sums:
            old.sums.look(order.keep)
        if order.bind is not None:
            new = self._room.recut(order.bind, given)
            new.tables.reconcile(order.keep, moved=True)
        mover = Mover(order, old, new, self._clock)
        mover.meet(view, door)
        for layer in range(mover.num_layers):
            if new is not None:
                new.grow()
            mover.move(layer)
            if old is not None:
                tensors = [x for piece in old.layers[layer] for x in piece.kv.tensors]
                for tensor in tensors if old.bind.kv.zero_on_free else []:
                    tensor.zero_()
                self._room.slabs.give(tensors)
                old.layers[layer] = []
        if new is not None:
            new.written.reconcile(order.keep)
        return new, mover.nbytes

    def _enter(self, view: int, fabric: Fabric | None = None) -> ViewFabric:
        entered = ViewFabric(view, fabric, self._clock)
        with self._lock:
            self._called = max(view, self._called)
            self._fabric = entered
            reason = self._aborted or (_over(view, self._called) if view < self._called else "")
        if reason:
            entered.leave(reason)
        return entered

    def _join(self, session: Session, peers: PeerPages, copies: StripeCopies) -> None:
        if session.missing:  # else steps may come while other memory workers are still to come
            session.check_idle()
        with suppress(ChannelTimeout):
            if (channel := _next(peers, copies)) is not None:
                session.join(channel)

    def _tell_pages(self) -> None:
        """The driver hears which pages can be loaded, once all have come who may have some."""
        stored, self._stored = self._stored, None
        if stored is not None and self._peers is not None and self._transfers is not None:
            self._report(structs.replace(stored, keys=self._peers.learn(self._transfers.share, stored.keys)))

    def kept(self) -> dict[int, int]:
        """Sequence -> tokens that it has in all layers. For the thread that serves, between two views."""
        return {} if self._store is None else self._store.written.report()

    def _open_store(self, meeting: Connect, bind: Bind) -> Store:
        """The store that is there, with the sequences that stay, where ``bind`` is of its shape. Else a new one in
        its place. Raises as Store; PlanError where these are not here.
        """
        self._end_transfers()  # of a Bind that was refused
        if self._store is not None and self._store.fits(bind):
            self._store.renew(bind)
        else:
            check_bind(bind)  # before the sequences of the old one are given up
            self._store = None  # both may not fit
            self._store = self._room.open(bind)
        if meeting.keep is not None:
            self._store.reconcile(meeting.keep)
        if meeting.tier is not None:
            self._open_tier(meeting.tier, self._store, meeting.view)
        return self._store

    def _open_tier(self, tier: TierPlace, store: Store, view: int) -> None:
        """Raises ValueError where it cannot be had."""
        check_within("--kv-offloading-size or --kv-store-dir", wanted=True)
        room = room_of(tier, store.bind, store.bound.kv_bytes)
        medium, gone = self._medium_of(tier)
        recipe = Recipe(PROMPT, tier.chunk, build_id(), tier.ranks)
        said, meter, trace = self._report, self._meter, self._trace
        assert self._peers is not None
        self._peers.open(medium)
        read = self._peers.read
        self._transfers = Transfers(medium, store, said, meter, view, tier.rank, recipe, trace, read=read)
        try:
            keys = self._transfers.pages(MOST_LISTED)
        except MediumError as e:
            raise ValueError(str(e)) from None
        self._stored = StoredPages(view=view, keys=keys, room=room, gone=gone)

    def _medium_of(self, tier: TierPlace) -> tuple[Medium, list[bytes]]:
        """The one that is open, with all that it has, also where others have come to share its size: then some pages
        may have given way, whose keys are told. Raises ValueError.
        """
        medium, had, gone = self._medium, self._tier, list[bytes]()
        if medium is None or had is None or had != structs.replace(tier, workers=had.workers):
            self.close()
            self._medium = medium = open_medium(tier.medium, _place(tier))
        elif had.workers != tier.workers:
            try:
                gone = medium.divide(tier.workers)
            except MediumError as e:
                raise ValueError(str(e)) from None
        self._tier = tier
        return medium, gone


def _place(tier: TierPlace) -> MediumPlace:
    return MediumPlace(
        tier.size,
        tier.identity,
        tier.workers,
        tier.policy,
        tier.directory,
        tier.secret,
        tier.server,
        memory=tier.memory,
        ttl_s=tier.ttl_s,
    )


@contextmanager
def _ended_by_damage(end: Callable[[str], None]) -> Iterator[None]:
    """A process whose memory is damaged ends before anybody hears of it."""
    try:
        yield
    except DamagedError as e:
        end(f"memory worker (pid {os.getpid()}): {e}: it ends, and its KV is computed again")
        raise


def _over(view: int, newer: int) -> str:
    return f"view {view} is over: view {newer} begins"


def _first(peers: PeerPages, copies: StripeCopies) -> Channel:
    """That of the one who binds. Waits as long as the driver lives."""
    while True:
        with suppress(ChannelTimeout):
            if (channel := _next(peers, copies)) is not None:
                return channel


def _next(peers: PeerPages, copies: StripeCopies) -> Channel | None:
    """The next one who comes; None where it was another memory worker. Raises ChannelTimeout."""
    channel = peers.accept(POLL_S)
    return None if channel is None or copies.take(channel) else channel
