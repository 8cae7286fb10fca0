"""The memory worker: keeps the KV cache and computes core attention.

It serves the replicas of one model, a channel each. When one of them is lost, it lets go of all and waits for the next
one that binds; the sequences of the old ones are dropped.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from lamina.netstack import Channel, ChannelTimeout, Listener
from lamina.observe.trace import OFF, Recorder
from lamina.protocol.plan import ProtocolError
from lamina.workers.devices import CPU, FREE_PART

from .meter import Meter
from .session import Session
from .store import read_rate

POLL_S = 1.0  # of a wait that only an event ends: somebody comes


class MemoryWorker:
    """Serves channels, one after the other. Holds state, decides nothing."""

    def __init__(self, device: torch.device = CPU, trace: Recorder = OFF, share: float = FREE_PART) -> None:
        """``share``: see Store."""
        self.device, self._share = device, share
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
        return read_rate(self.device)

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
                session = Session(channel, self.device, self._meter, self._trace, self._share)
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
