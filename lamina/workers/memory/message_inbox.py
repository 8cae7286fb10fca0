"""What comes on the channels of a memory worker under one epoch, and is not for prefill workers' grants."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError

from .kv_transfer.prefill_receive import PrefillReceiver
from .worker_counters import Counters

MAX_QUEUED_PLANS = 64  # that may lie here before their round


class MessageInbox:
    """Layer messages, and plans beside them. Of one thread."""

    def __init__(self, channels: Sequence[Channel], grants: PrefillReceiver, meter: Counters, epoch: int) -> None:
        """``channels``: of all replicas. While nothing comes, ``grants`` are served."""
        self._channels, self._grants, self._meter, self._view = channels, grants, meter, epoch
        self.plans: deque[tuple[MessageKey, bytes]] = deque()  # that came before their round
        self.refused_plans: dict[
            int, MessageKey
        ] = {}  # batch -> its last plan, if refused: its layer messages are dropped

    def next_message(self, replica: int) -> Arrival | None:
        """The next layer message of ``replica``; None for a plan, which waits now, one of a refused step, or whatever
        is of an older epoch.
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
        """The next message. Waits as long as the peer and the driver live: an idle worker is no fault. While it waits,
        what prefill workers send is stored.
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
