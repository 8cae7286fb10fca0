"""Requests that arrive over a channel, for a thread that replies to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from lamina.netstack import Channel, ChannelTimeout
from lamina.protocol.step_plan import ProtocolError

LOOK_S = 1.0  # seconds of a wait for the next request, which only the end of the epoch ends
Ask = TypeVar("Ask")


def serve_requests(channel: Channel, decode: Callable[[bytes], Ask]) -> Iterator[Ask]:
    """Yield one request after another, until the channel ends. Raises ChannelError then, and ProtocolError for a
    message that is no request.
    """
    while True:
        try:
            arrival = channel.wait_signal(timeout_s=LOOK_S)
        except ChannelTimeout:
            continue
        try:
            ask = decode(bytes(arrival.data))
        except msgspec.MsgspecError as e:
            raise ProtocolError(f"a request of {channel.peer_name} is not understood: {e}") from None
        finally:
            channel.release(arrival)
        yield ask
