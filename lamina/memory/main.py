"""Start of a memory worker: listen, tell the driver where, import what takes seconds; then serve view after view.

Compute workers load the model meanwhile, so torch is not imported here before the driver knows the address.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from lamina import netstack
from lamina.background import Background
from lamina.env import cluster_key
from lamina.netstack import ChannelError, Listener
from lamina.observe.tripwire import recorder
from lamina.protocol.blocks.tables import NoBlocksError
from lamina.protocol.control import (
    AskClock,
    AskRate,
    AskStats,
    AskTrace,
    Connect,
    ControlLink,
    Halt,
    Halted,
    LinkClosedError,
    MemoryReady,
    StartMemory,
    Stop,
)
from lamina.protocol.plan import ProtocolError
from lamina.protocol.recut import Leaving, MakeRoom, Rebuild, Recut, Recutted, RoomMade
from lamina.workers.process import on_notice, write_error
from lamina.workers.service import WorkerService
from lamina.workers.surroundings import HERE, Surroundings
from lamina.workers.view import ViewDoor

from .lease import check_within, reception, tell_reads

if TYPE_CHECKING:
    from .worker import MemoryWorker

log = logging.getLogger(__name__)
FROM_DRIVER = (
    StartMemory | Connect | Halt | MakeRoom | Recut | Rebuild | AskStats | AskClock | AskRate | AskTrace | Stop
)


def serve_memory(sock: socket.socket) -> None:
    """Serve one driver, over its control socket, until the link ends or says Stop."""
    link = ControlLink(sock, FROM_DRIVER)

    def leave() -> None:
        with suppress(LinkClosedError):
            link.send(Leaving())

    on_notice(leave)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if isinstance(start, StartMemory):
        MemoryServer(link, start).run()
    link.close()


class MemoryServer:
    """The life of a memory worker's process, or thread."""

    def __init__(self, link: ControlLink, start: StartMemory, around: Surroundings = HERE) -> None:
        self._link, self._start, self._around = link, start, around
        self._trace = recorder(start.trace)
        self._worker: MemoryWorker | None = None  # until it is loaded
        self._called = -1  # the view of the last Connect
        self._room: MakeRoom | None = None  # what was asked for last
        self._rooms = threading.Lock()  # one is made after the other
        self._loading = threading.Lock()
        self._fabric: netstack.Fabric | None = None
        self._limit: object = None  # of the multiprocessors, as long as it is held
        self._service = WorkerService(  # the last: messages are heeded from here on
            link,
            lambda: self._loaded().stats(),
            self._abort,
            self._trace,
            lambda: self._loaded().rate(),
            self._heed,
            around,
        )

    def run(self) -> None:
        service = self._service
        try:
            listener = self._listen()
            if listener is not None:
                service.link.send(MemoryReady(url=listener.url))
                worker = Background(self._loaded, "lamina-import").result()
                tell_reads(worker.stats)
                self._set_threads()
                door = ViewDoor(listener)
                while isinstance(order := service.next(block=True), Connect | Halt | MakeRoom | Recut | Rebuild):
                    if isinstance(order, MakeRoom):
                        continue  # it was heeded
                    if isinstance(order, Recut | Rebuild):
                        service.link.send(self._moved(worker, door, order))
                        continue
                    if isinstance(order, Halt):
                        service.link.send(Halted(view=order.view, kept=worker.kept()))
                        continue
                    try:
                        worker.leave(self._called)
                        worker.serve(door, order, self._fabric)
                    except (ChannelError, ProtocolError):  # why, the other end tells the driver
                        worker.turn_away(door, order.view)
        except LinkClosedError:
            pass  # the driver is gone: so are we
        except Exception as e:
            if not service.stopped.is_set():
                write_error()
                service.fail(f"memory worker: {type(e).__name__}: {e}")
                raise
        finally:
            if self._worker is not None:
                self._worker.close()
            if self._fabric is not None:
                self._fabric.close()

    def _moved(self, worker: MemoryWorker, door: ViewDoor, order: Recut | Rebuild) -> Recutted:
        assert self._fabric is not None
        try:
            if isinstance(order, Rebuild):
                return Recutted(view=order.view, nbytes=worker.rebuild(door, self._fabric, order))
            return Recutted(view=order.view, nbytes=worker.recut(door, self._fabric, order))
        except (ChannelError, ProtocolError, ValueError, MemoryError, NoBlocksError) as error:
            return Recutted(view=order.view, error=f"{type(error).__name__}: {error}")

    def _prepare(self, order: MakeRoom) -> None:
        error = ""
        with self._rooms:
            if order is not self._room:
                return  # threads begin in any order
            try:
                self._loaded().prepare(order.bind, order.tier, ahead=order.ahead)
            except Exception as e:  # noqa: BLE001 - whatever it is, nobody waits for this thread
                error = f"{type(e).__name__}: {e}"
        if order.ahead and error:
            log.warning("a spare memory worker takes its memory with a place, not before: %s", error)
        elif order.bind is not None and not order.ahead:
            with suppress(LinkClosedError):
                self._link.send(RoomMade(error, order.number))

    def _listen(self) -> Listener | None:
        """Open the place where other workers connect; None where that is impossible, and the driver was told why."""
        try:
            check_within("--memory-device", self._start.devices.memory_device != "cpu")
            gpu = None if self._start.devices.memory_device == "cpu" else self._pick_gpu()
            key = self._start.key or cluster_key()
            device = self._start.devices.rdma_device
            self._fabric = self._around.open_fabric(self._start.scheme, key=key, gpu=gpu, device=device)
            return self._fabric.listen(self._start.address, reception(self._start.name))
        except (ValueError, ImportError, ChannelError) as e:
            self._service.fail(f"memory worker: {e}", user_error=True)
            return None

    def _pick_gpu(self) -> int | None:
        """The number of this worker's GPU; None for a CPU. Raises ValueError where the GPU is not there."""
        from lamina.workers.devices import limit

        device = self._loaded().device
        if (sms := self._start.devices.memory_sms) and device.type != "cpu":
            self._limit = limit(device, sms)
        return device.index

    def _loaded(self) -> MemoryWorker:
        """The worker. Safe from any thread."""
        with self._loading:
            if self._worker is None:
                from lamina.workers.devices import pick, share

                from .worker import MemoryWorker

                start, asked = self._start, self._start.devices.memory_device
                device = pick("--memory-device", asked, start.device_number)
                parts = share(asked, start.device_users)
                self._worker = MemoryWorker(device, self._trace, parts, self._link.send, self._around)
            return self._worker

    def _set_threads(self) -> None:
        import torch

        threads = self._start.threads
        if threads not in (0, torch.get_num_threads()):  # once called, it wakes threads for tiny tensors too
            torch.set_num_threads(threads)

    def _heed(self, message: object) -> None:
        """Look at a message as it comes. A Connect or a Halt ends the view that is served, which may wait for ever for
        peers that have gone on; a MakeRoom begins beside it, and the worker goes on serving.
        """
        if isinstance(message, MakeRoom):
            self._room = message
            self._around.beside(partial(self._prepare, message), "lamina-prepare")
        if isinstance(message, Connect | Halt):
            self._called = message.view
            if self._worker is not None:
                self._worker.leave(message.view)

    def _abort(self, reason: str) -> None:
        if self._worker is not None:
            self._worker.abort(reason)
        if self._fabric is not None:
            self._fabric.close()
