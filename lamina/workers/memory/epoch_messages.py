"""The messages of one epoch on a memory worker: those that arrive, and how it replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lamina.netstack import Arrival, Channel, ChannelTimeout
from lamina.protocol.step_plan import MessageKey, MessageKind, ProtocolError

from .kv_transfer.prefill_receive import IDLE_S, PrefillReceiver
from .worker_counters import Counters

MAX_QUEUED_PLANS = 64  # plans that may wait here for their round
RESERVE_S = 60.0  # seconds for a compute worker to free a slot


class MessageInbox:
    """Receives layer messages, and plans among them. One thread uses it."""

    def __init__(
        self, channels: Sequence[Channel], meter: Counters, epoch: int, grants: PrefillReceiver | None = None
    ) -> None:
        """``channels``: of all replicas. ``grants``: served while no message arrives; None: no prefill workers."""
        self._channels, self._meter, self._view = channels, meter, epoch
        self.grants = grants
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
            self.receive_grant()
        self._meter.add("bytes_received", arrival.data.nbytes)
        return arrival

    def _poll(self, channel: Channel) -> Arrival | None:
        with self._meter.time("wait_s"):
            try:
                return channel.wait_signal(timeout_s=self.poll_timeout_s)
            except ChannelTimeout:
                return None

    @property
    def poll_timeout_s(self) -> float:
        """The seconds to wait for decoding before the next ``receive_grant``."""
        return IDLE_S if self.grants is None else self.grants.poll_timeout_s

    def receive_grant(self) -> None:
        """Store one message of a prefill worker if one has arrived."""
        if self.grants is not None:
            self.grants.receive_one()


def send_message(channel: Channel, key: MessageKey, data: bytes, meter: Counters) -> None:
    """Send a message that is no O, such as a reply to a Bind."""
    slot = channel.reserve(len(data), timeout_s=RESERVE_S)
    slot.data[:] = data
    meter.add("bytes_sent", len(data))
    channel.put_signal(slot, key.pack())


def check_name(channel: Channel, number: int, names: Sequence[str]) -> None:
    """Raise ProtocolError if ``channel`` does not belong to the worker of that number. ``names``: by number."""
    name = names[number] if number < len(names) else ""
    if channel.peer_name != name:
        raise ProtocolError(f"worker {number} is {name!r} by the driver, and {channel.peer_name!r} came for it")


def other_epoch_error(what: str, epoch: int, own: int) -> str:
    return f"{what} is of epoch {epoch}, this worker is in epoch {own}"
