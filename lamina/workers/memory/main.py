"""The start of a memory worker: listen, report the address, import slow modules; then serve one epoch after another.

Compute workers load the model meanwhile, so torch is not imported before the driver knows the address.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from lamina import netstack
from lamina.env import cluster_key
from lamina.netstack import ChannelError, Listener
from lamina.observe.failpoints import recorder
from lamina.protocol.blocks.block_tables import NoBlocksError
from lamina.protocol.control import (
    ClockRequest,
    Connect,
    ControlLink,
    LinkClosedError,
    MemoryReady,
    Quiesce,
    RateRequest,
    StartMemory,
    StatsRequest,
    Stop,
    TraceRequest,
)
from lamina.protocol.reshard import PrepareStore, RebuildKv, Reshard, ReshardDone, StorePrepared, TerminationNotice
from lamina.protocol.step_plan import ProtocolError
from lamina.utils.background_thread import LowPriorityCall
from lamina.workers.control_loop import ControlLoop
from lamina.workers.epoch_channels import EpochListener
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.worker_process import on_sigterm, write_error

from .lease_limits import check_allowed_for_guest, listener_terms, publish_reads

if TYPE_CHECKING:
    from .memory_worker import MemoryWorker

log = logging.getLogger(__name__)
FROM_DRIVER = (
    StartMemory
    | Connect
    | Quiesce
    | PrepareStore
    | Reshard
    | RebuildKv
    | StatsRequest
    | ClockRequest
    | RateRequest
    | TraceRequest
    | Stop
)


def serve_memory(sock: socket.socket) -> None:
    """Serve one driver over its control socket, until the link ends or Stop arrives."""
    link = ControlLink(sock, FROM_DRIVER)

    def leave() -> None:
        with suppress(LinkClosedError):
            link.send(TerminationNotice())

    on_sigterm(leave)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if isinstance(start, StartMemory):
        MemoryServer(link, start).run()
    link.close()


class MemoryServer:
    """The life of a memory worker's process, or thread."""

    def __init__(self, link: ControlLink, start: StartMemory, around: Runtime = RUNTIME) -> None:
        self._link, self._start, self._runtime = link, start, around
        self.trace = recorder(start.trace)
        self.worker: MemoryWorker | None = None  # set by _loaded
        self.next_epoch = -1  # the epoch of the last Connect
        self._store_preallocation: PrepareStore | None = None  # the last one that was requested
        self._prepare_thread = threading.Lock()  # serializes preparations
        self._loading = threading.Lock()
        self._fabric: netstack.Fabric | None = None
        self._limit: object = None  # holds the limit of multiprocessors
        self._service = ControlLoop(  # the last: it may call the methods below from now on
            link,
            lambda: self._loaded().stats(),
            self._abort,
            self.trace,
            lambda: self._loaded().read_bandwidth(),
            self.on_message,
            around,
        )

    def run(self) -> None:
        service = self._service
        try:
            listener = self._listen()
            if listener is not None:
                service.link.send(MemoryReady(url=listener.url))
                worker = LowPriorityCall(self._loaded, "lamina-import").result()
                publish_reads(worker.stats)
                self._set_threads()
                door = EpochListener(listener)
                while isinstance(
                    order := service.next_message(block=True), Connect | Quiesce | PrepareStore | Reshard | RebuildKv
                ):
                    if isinstance(order, PrepareStore):
                        continue  # was handled by _on_message
                    if isinstance(order, Reshard | RebuildKv):
                        service.link.send(self._reshard(worker, door, order))
                        continue
                    if isinstance(order, Quiesce):
                        service.link.send(worker.quiesced(order.epoch))
                        continue
                    try:
                        worker.leave_epochs_before(self.next_epoch)
                        worker.serve(door, order, self._fabric)
                    except (ChannelError, ProtocolError):  # the other end reports the reason to the driver
                        worker.reject_until_next_epoch(door, order.epoch)
        except LinkClosedError:
            pass  # the driver has ended, so this worker ends
        except Exception as e:
            if not service.is_stopped.is_set():
                write_error()
                service.report_failure(f"memory worker: {type(e).__name__}: {e}")
                raise
        finally:
            if self.worker is not None:
                self.worker.close()
            if self._fabric is not None:
                self._fabric.close()

    def _reshard(self, worker: MemoryWorker, listener: EpochListener, order: Reshard | RebuildKv) -> ReshardDone:
        assert self._fabric is not None
        try:
            if isinstance(order, RebuildKv):
                return ReshardDone(epoch=order.epoch, nbytes=worker.rebuild(listener, self._fabric, order))
            return ReshardDone(epoch=order.epoch, nbytes=worker.reshard(listener, self._fabric, order))
        except (ChannelError, ProtocolError, ValueError, MemoryError, NoBlocksError) as error:
            return ReshardDone(epoch=order.epoch, error=f"{type(error).__name__}: {error}")

    def _prepare(self, order: PrepareStore) -> None:
        error = ""
        with self._prepare_thread:
            if order is not self._store_preallocation:
                return  # threads may start in any order
            try:
                self._loaded().prepare(order.bind, order.storage, ahead=order.is_first_store)
            except Exception as e:  # noqa: BLE001 - no caller waits for this thread, whatever the error
                error = f"{type(e).__name__}: {e}"
        if order.is_first_store and error:
            log.warning("a spare memory worker will allocate its memory only when it replaces another: %s", error)
        elif order.bind is not None and not order.is_first_store:
            with suppress(LinkClosedError):
                self._link.send(StorePrepared(error, order.resize_number))

    def _listen(self) -> Listener | None:
        """Open the listener for other workers; None if that is impossible, which is then reported to the driver."""
        try:
            check_allowed_for_guest("--memory-device cuda", self._start.devices.memory_device != "cpu")
            gpu = None if self._start.devices.memory_device == "cpu" else self._pick_gpu()
            key = self._start.key or cluster_key()
            device = self._start.devices.rdma_device
            self._fabric = self._runtime.open_fabric(self._start.scheme, key=key, gpu=gpu, device=device)
            return self._fabric.listen(self._start.address, listener_terms(self._start.name))
        except (ValueError, ImportError, ChannelError) as e:
            self._service.report_failure(f"memory worker: {e}", user_error=True)
            return None

    def _pick_gpu(self) -> int | None:
        """Return the number of this worker's GPU; None for a CPU. Raises ValueError if the GPU does not exist."""
        from lamina.workers.device_selection import limit_sms

        device = self._loaded().device
        if (sms := self._start.devices.memory_sms) and device.type != "cpu":
            self._limit = limit_sms(device, sms)
        return device.index

    def _loaded(self) -> MemoryWorker:
        """Return the worker, and create it first if needed. Safe from any thread."""
        with self._loading:
            if self.worker is None:
                from lamina.workers.device_selection import memory_share, pick_device

                from .memory_worker import MemoryWorker

                start, asked = self._start, self._start.devices.memory_device
                device = pick_device("--memory-device", asked, start.device_number)
                parts = memory_share(asked, start.device_users)
                self.worker = MemoryWorker(device, self.trace, parts, self._link.send, self._runtime)
            return self.worker

    def _set_threads(self) -> None:
        import torch

        threads = self._start.threads
        if threads not in (0, torch.get_num_threads()):  # the call makes torch wake its threads even for tiny tensors
            torch.set_num_threads(threads)

    def on_message(self, message: object) -> None:
        """Handle a message on arrival, on the link's thread. A Connect or a Quiesce ends the present epoch, whose
        serving thread may wait for ever for peers that have left it. A PrepareStore starts in the background while the
        worker continues to serve.
        """
        if isinstance(message, PrepareStore):
            self._store_preallocation = message
            self._runtime.start_background(partial(self._prepare, message), "lamina-prepare")
        if isinstance(message, Connect | Quiesce):
            self.next_epoch = message.epoch
            if self.worker is not None:
                self.worker.leave_epochs_before(message.epoch)

    def _abort(self, reason: str) -> None:
        if self.worker is not None:
            self.worker.abort(reason)
        if self._fabric is not None:
            self._fabric.close()
