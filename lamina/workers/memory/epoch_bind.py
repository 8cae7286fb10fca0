"""The first messages of an epoch: the Bind, which says what a memory worker stores, and the operands of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from lamina.config.resolve import LayerPath, layer_path
from lamina.netstack import Channel
from lamina.protocol.step_plan import BindRequest, MessageKey, MessageKind, ProtocolError, decode, encode
from lamina.workers.device_transport import can_use_device_path

from .epoch_messages import MessageInbox, check_name, other_epoch_error, send_message
from .kv_store import KvStore
from .worker_counters import Counters


def accept_bind(
    channel: Channel,
    open_store: Callable[[BindRequest], KvStore],
    meter: Counters,
    epoch: int,
    names: Sequence[str],
) -> KvStore:
    """Wait for a valid Bind on ``channel``, of replica 0, and return the store that ``open_store`` opens for it. After
    a refusal the peer may try again, or leave. ``names``: see EpochServer. Raises ChannelError, ProtocolError.
    """
    inbox = MessageInbox([channel], meter, epoch)
    while True:
        arrival = inbox.receive(channel)
        key = MessageKey.unpack(arrival.tag)
        if key.kind != MessageKind.BIND:
            raise ProtocolError(f"{key} in place of a bind")
        store = None
        try:
            bind = decode(BindRequest, arrival.data)
            if bind.epoch != epoch:
                raise ProtocolError(other_epoch_error("bind", bind.epoch, epoch))
            check_name(channel, 0, names)
            store = open_store(bind)
        except (ValueError, ImportError, MemoryError, ProtocolError) as e:
            answer, text = MessageKind.REFUSED, str(e).encode()
        else:
            has_device_path = _can_use_device_path(channel, store)
            store.bind_reply = structs.replace(store.bind_reply, device_path=has_device_path)
            answer, text = MessageKind.BOUND, encode(store.bind_reply)
        channel.release(arrival)
        send_message(channel, MessageKey(answer), text, meter)
        if store is not None:
            _receive_operands(channel, inbox, store)
            return store


def _receive_operands(channel: Channel, inbox: MessageInbox, store: KvStore) -> None:
    """Receive what all tokens share in each recurrent layer. Raises ProtocolError."""
    states = store.states
    for number, piece in enumerate(states.pieces if states else ()):
        if states is None or piece is None:
            continue
        arrival = inbox.receive(channel)
        if (key := MessageKey.unpack(arrival.tag)) != MessageKey(MessageKind.OPERANDS, layer=number):
            raise ProtocolError(f"{key} in place of the operands of recurrent layer {number}")
        states.set_operands(number, arrival.data)
        channel.release(arrival)


def _can_use_device_path(channel: Channel, store: KvStore) -> bool:
    bind = store.bind_request
    kernels = bind.device_path and can_use_device_path(channel, store.staging)
    path = layer_path(bind.partition, bind.replicas, bind.prefill_workers, kernels=kernels)
    return path is LayerPath.DEVICE
