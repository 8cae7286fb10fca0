"""The memory worker: keeps the KV cache and computes core attention.

It serves the replicas of one model, a channel each. When one of them is lost, it lets go of all and waits for the next
one that binds; the sequences of the old ones are dropped.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import torch

from lamina import netstack
from lamina.env import cluster_key
from lamina.netstack import Channel, ChannelError, ChannelTimeout, Listener
from lamina.observe.trace import OFF, Recorder, recorder

from .control import AskClock, AskRate, AskStats, AskTrace, ControlLink, LinkClosedError, MemoryReady, StartMemory, Stop
from .memory_store import read_rate
from .meter import Meter
from .service import Service
from .session import Session
from .stepplan import ProtocolError

POLL_S = 1.0  # of waits that only an event ends: somebody comes, the driver's Stop


class MemoryWorker:
    """Serves channels, one after the other. Holds state, decides nothing."""

    def __init__(self, device: torch.device | None = None, trace: Recorder = OFF) -> None:
        self._device = device or torch.device("cpu")
        self._meter = Meter()
        self._trace = trace
        self._channels: list[Channel] = []
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Since the start: attend_s, write_s, grant_s (writing what prefill workers send), wait_s, plan_s; steps, rows,
        refused; stored_bytes that attention read; payload bytes_received, bytes_sent.

        Safe from any thread.
        """
        return self._meter.read()

    def rate(self) -> float:
        """Bytes a second that its device reads, measured now."""
        return read_rate(self._device)

    def abort(self, reason: str) -> None:
        """End ``serve``, now and whenever it is called again. Safe from any thread."""
        self._aborted = reason
        for channel in list(self._channels):
            channel.abort(reason)

    def serve(self, channel: Channel, listener: Listener | None = None) -> None:
        """Bind, take the other replicas in from ``listener``, then serve steps until a channel ends; close all and drop
        the sequences.

        It ends by an exception only: ChannelError, or ProtocolError where a peer broke the contract.
        """
        try:
            self._add(channel)
            with torch.inference_mode():
                session = Session(channel, self._device, self._meter, self._trace)
                while session.missing:
                    self._join(session, listener)
                session.run()
        except ProtocolError as e:
            for each in self._channels:
                each.abort(str(e))
            raise
        finally:
            channels, self._channels = self._channels, []
            for each in channels:
                each.close()

    def _add(self, channel: Channel) -> None:
        self._channels.append(channel)
        if self._aborted:
            channel.abort(self._aborted)

    def _join(self, session: Session, listener: Listener | None) -> None:
        if listener is None:
            raise ProtocolError("a bind for several replicas where one can connect")
        session.check_idle()
        with suppress(ChannelTimeout):
            self._add(listener.accept(timeout_s=POLL_S))
            session.join(self._channels[-1])


def serve_memory(sock: socket.socket) -> None:
    """Serve one driver, over its control socket, until the link ends or says Stop."""
    link = ControlLink(sock, StartMemory | AskStats | AskClock | AskRate | AskTrace | Stop)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if isinstance(start, StartMemory):
        _Server(link, start).run()
    link.close()


class _Server:
    """The life of a memory worker's process, or thread."""

    def __init__(self, link: ControlLink, start: StartMemory) -> None:
        self._start = start
        trace = recorder(start.trace)
        self._worker = MemoryWorker(trace=trace)
        self._fabric: netstack.Fabric | None = None
        self._service = Service(link, self._worker.stats, self._abort, trace, self._worker.rate)

    def run(self) -> None:
        service, start = self._service, self._start
        try:
            if start.threads not in (0, torch.get_num_threads()):  # once called, it wakes threads for tiny tensors too
                torch.set_num_threads(start.threads)
            listener = self._listen()
            if listener is not None:
                service.link.send(MemoryReady(url=listener.url))
                while not service.stopped.is_set():
                    self._serve_next(listener)
        except LinkClosedError:
            pass  # the driver is gone: so are we
        except Exception as e:
            if not service.stopped.is_set():
                service.fail(f"memory worker: {type(e).__name__}: {e}")
                raise
        finally:
            if self._fabric is not None:
                self._fabric.close()

    def _listen(self) -> Listener | None:
        """None where that is impossible, and the driver knows why."""
        try:
            self._fabric = netstack.open(self._start.scheme, key=self._start.key or cluster_key())
            return self._fabric.listen(self._start.address)
        except (ValueError, ImportError, ChannelError) as e:
            self._service.fail(f"memory worker: {e}", user_error=True)
            return None

    def _serve_next(self, listener: Listener) -> None:
        try:
            channel = listener.accept(timeout_s=POLL_S)
        except ChannelTimeout:
            return  # nobody came yet
        with suppress(ChannelError, ProtocolError):
            self._worker.serve(channel, listener)  # the other end tells the driver why it ended; another may come

    def _abort(self, reason: str) -> None:
        self._worker.abort(reason)
        if self._fabric is not None:
            self._fabric.close()
