"""The messages on a memory worker's channels in one epoch, except those of prefill workers' grants."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError

from .kv_transfer.prefill_receive import PrefillReceiver
from .worker_counters import Counters

MAX_QUEUED_PLANS = 64  # plans that may wait here for their round


class MessageInbox:
    """Receives layer messages, and plans among them. One thread uses it."""

    def __init__(self, channels: Sequence[Channel], grants: PrefillReceiver, meter: Counters, epoch: int) -> None:
        """``channels``: of all replicas. ``grants``: served while no message arrives."""
        self._channels, self._grants, self._meter, self._view = channels, grants, meter, epoch
        self.plans: deque[tuple[MessageKey, bytes]] = deque()  # plans that arrived before their round
        self.refused_plans: dict[
            int, MessageKey
        ] = {}  # batch -> its last plan, if that was refused: its layer messages are dropped

    def next_message(self, replica: int) -> Arrival | None:
        """Return the next layer message of ``replica``. Returns None for a plan, which is queued, and for a dropped
        message: of a refused step, or of an older epoch.
        """
        channel = self._channels[replica]
        arrival = self.receive(channel)
        key = MessageKey.unpack(arrival.tag)
        if key.epoch < self._view:
            self._meter.add("dropped", 1)
        elif key.kind == MessageKind.PLAN and replica == 0:
            if len(self.plans) == MAX_QUEUED_PLANS:
                raise ProtocolError(f"{MAX_QUEUED_PLANS} plans in place of a layer message")
            self.plans.append((key, bytes(arrival.data)))
        elif not ((bad := self.refused_plans.get(key.batch)) and key == bad._replace(kind=key.kind, layer=key.layer)):
            return arrival
        channel.release(arrival)
        return None

    def receive(self, channel: Channel) -> Arrival:
        """Return the next message of a channel. Meanwhile, messages of prefill workers are stored. Waits as long as the
        peer and the driver live: an idle worker is no error.
        """
        while (arrival := self._poll(channel)) is None:
            self._grants.receive_one()
        self._meter.add("bytes_received", arrival.data.nbytes)
        return arrival

    def _poll(self, channel: Channel) -> Arrival | None:
        with self._meter.time("wait_s"):
            try:
                return channel.wait_signal(timeout_s=self._grants.poll_timeout_s)
            except ChannelTimeout:
                return None
