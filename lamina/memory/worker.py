"""The memory worker: keeps the KV cache and computes core attention.

It serves the replicas of one model, a channel each, from a Connect to the next. When one of them is lost, or a newer
view begins, it lets go of all channels. The sequences stay: a Bind of the same shape finds them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from lamina.netstack import Channel, ChannelTimeout
from lamina.observe.trace import OFF, Recorder
from lamina.protocol.control import Connect
from lamina.protocol.plan import Bind, Keep, ProtocolError
from lamina.workers.devices import CPU, FREE_PART
from lamina.workers.view import ViewDoor, ViewFabric, ViewListener

from .meter import Meter
from .session import Session
from .store import Store, check_bind, read_rate

POLL_S = 1.0  # of a wait that only an event ends: somebody comes


class MemoryWorker:
    """Serves one view after the other. Holds state, decides nothing."""

    def __init__(self, device: torch.device = CPU, trace: Recorder = OFF, share: float = FREE_PART) -> None:
        """``share``: see Store."""
        self.device, self._share = device, share
        self._meter = Meter()
        self._trace = trace
        self._store: Store | None = None  # outlives the sessions
        self._lock = threading.Lock()
        self._fabric: ViewFabric | None = None  # of the session
        self._called = -1  # the newest view that the driver has named
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Since the start: attend_s, write_s, grant_s (writing what prefill workers send), wait_s, plan_s; steps, rows,
        turns (a step in a layer), native_turns of them, refused, dropped (messages of older views); stores (that were
        allocated), connects; stored_bytes that attention read; payload bytes_received, bytes_sent.

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

    def serve(self, door: ViewDoor, meeting: Connect) -> None:
        """Have one bind and the others join who come to ``door``, then serve steps until a channel ends or the view is
        over; close all channels. The store stays.

        It ends by an exception only: ChannelError, or ProtocolError where a peer broke the contract.
        """
        fabric = self._enter(meeting.view)
        try:
            listener = fabric.at(door)
            with torch.inference_mode():
                open_store = partial(self._open_store, meeting.keep)
                session = Session(_first(listener), open_store, self._meter, self._trace, meeting.view, meeting.joining)
                while session.missing:
                    self._join(session, listener)
                session.run()
        except ProtocolError as e:
            fabric.abort(str(e))
            raise
        finally:
            fabric.close()

    def _enter(self, view: int) -> ViewFabric:
        fabric = ViewFabric(view)
        self._meter.add("connects", 1)
        with self._lock:
            self._called = max(view, self._called)
            self._fabric = fabric
            reason = self._aborted or (_over(view, self._called) if view < self._called else "")
        if reason:
            fabric.leave(reason)
        return fabric

    def _join(self, session: Session, listener: ViewListener) -> None:
        session.check_idle()
        with suppress(ChannelTimeout):
            session.join(listener.accept(timeout_s=POLL_S))

    def kept(self) -> dict[int, int]:
        """Sequence -> tokens that it has in all layers. For the thread that serves, between two views."""
        return {} if self._store is None else self._store.written.report()

    def _open_store(self, keep: Sequence[Keep] | None, bind: Bind) -> Store:
        """The store that is there, with the sequences of ``keep``, where ``bind`` is of its shape. Else a new one in
        its place. Raises as Store; PlanError where ``keep`` is not here.
        """
        if self._store is not None and self._store.fits(bind):
            self._store.renew(bind)
        else:
            check_bind(bind)  # before the sequences of the old one are given up
            self._store = None  # both may not fit
            self._store = Store(bind, self.device, self._share)
            self._meter.add("stores", 1)
        if keep is not None:
            self._store.reconcile(keep)
        return self._store


def _over(view: int, newer: int) -> str:
    return f"view {view} is over: view {newer} begins"


def _first(listener: ViewListener) -> Channel:
    """That of the one who binds. Waits as long as the driver lives."""
    while True:
        with suppress(ChannelTimeout):
            return listener.accept(timeout_s=POLL_S)
