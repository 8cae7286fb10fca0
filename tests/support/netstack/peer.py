"""A peer in its own process: ``peer.py ROLE`` connects to $PEER_URL and plays the role until it is killed."""

from __future__ import annotations

import os
import sys
from time import monotonic

from lamina import netstack
from lamina.netstack import Channel, Fabric, Geometry, Terms

SIZE = 1 << 20
LONG_S = 60.0


def echo(channel: Channel) -> None:
    while True:
        arrival = channel.wait_signal(timeout_s=LONG_S)
        slot = channel.reserve(arrival.data.nbytes, timeout_s=LONG_S)
        slot.data[:] = arrival.data
        channel.put_signal(slot, arrival.tag)
        channel.release(arrival)


def wait(channel: Channel) -> None:
    """Says that it is there and waits for a message that never comes."""
    channel.put_signal(channel.reserve(0), b"ready")
    receive_to_the_end(channel)


def receive_to_the_end(channel: Channel) -> None:
    """Takes what comes; prints what ended the channel, and how many seconds after the last message."""
    while True:
        start = monotonic()
        try:
            channel.release(channel.wait_signal(timeout_s=LONG_S))
        except netstack.ChannelError as error:
            return print(type(error).__name__, monotonic() - start, flush=True)


def put(channel: Channel) -> None:
    """Puts as fast as it can, so that a kill at any moment is likely to hit a put."""
    payload = bytes(range(256)) * (SIZE // 256)
    while True:
        slot = channel.reserve(SIZE, timeout_s=LONG_S)
        slot.data[:] = payload
        channel.put_signal(slot, b"put")


def fill(channel: Channel) -> None:
    """Puts messages of one byte value, $PEER_FILL, as fast as it can."""
    payload = bytes([int(os.environ["PEER_FILL"])]) * SIZE
    while True:
        slot = channel.reserve(SIZE, timeout_s=LONG_S)
        slot.data[:] = payload
        channel.put_signal(slot, b"fill")


def half(channel: Channel) -> None:
    """One whole message, then half of another that is never signalled."""
    channel.put_signal(channel.reserve(0), b"whole")
    slot = channel.reserve(SIZE)
    slot.data[: SIZE // 2] = b"h" * (SIZE // 2)
    channel.wait_signal(timeout_s=LONG_S)


def listen(fabric: Fabric) -> None:
    """Listens at $PEER_URL's address, accepts one peer, tells it nothing; prints its own, then that it accepted."""
    listener = fabric.listen(os.environ["PEER_URL"].partition("://")[2])
    print(listener.url, flush=True)
    channel = listener.accept(timeout_s=LONG_S)
    print("accepted", flush=True)
    receive_to_the_end(channel)


def main() -> None:
    url = os.environ["PEER_URL"]
    fabric = netstack.open(url.partition("://")[0], key=bytes.fromhex(os.environ["PEER_KEY"]))
    if sys.argv[1] == "listen":
        return listen(fabric)
    geometry = Geometry(slots=4, slot_bytes=SIZE)
    epoch = int(os.environ.get("PEER_EPOCH", "0"))
    channel = fabric.connect(url, Terms(outbound=geometry, inbound=geometry, epoch=epoch))
    return {"echo": echo, "wait": wait, "put": put, "fill": fill, "half": half}[sys.argv[1]](channel)


if __name__ == "__main__":
    main()
