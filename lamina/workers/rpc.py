"""Asks that come over a channel, and a thread that answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from lamina.netstack import Channel, ChannelTimeout
from lamina.protocol.step_plan import ProtocolError

LOOK_S = 1.0  # for the next ask, which only the end of the epoch ends
Ask = TypeVar("Ask")


def serve_requests(channel: Channel, decode: Callable[[bytes], Ask]) -> Iterator[Ask]:
    """One after the other, until the channel ends: raises ChannelError then, ProtocolError for what is no ask."""
    while True:
        try:
            arrival = channel.wait_signal(timeout_s=LOOK_S)
        except ChannelTimeout:
            continue
        try:
            ask = decode(bytes(arrival.data))
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"what {channel.peer_name} asks is not understood: {e}") from None
        finally:
            channel.release(arrival)
        yield ask
