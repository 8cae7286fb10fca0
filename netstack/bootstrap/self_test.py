"""A trial of a channel: messages both ways, whose bytes both sides know and compare.

Two NICs are connected as soon as each side believes the other's card, before a packet has passed. A GID of another
network, a switch with a smaller MTU, or a firewall shows only with the first message, after seconds. So a connector
that has another transport runs a trial first. A trial uses all queues of a channel: its transport provides the
SelfTestPaths.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import shake_128
from time import monotonic
from typing import Protocol

from lamina.netstack.contract.channel_terms import Geometry
from lamina.netstack.contract.fabric import TAG_BYTES, Channel, ChannelError, PeerFault

SELF_TEST_TAG = Geometry(slots=2, slot_bytes=64 << 10)
SIZES = (
    8,
    4097,
    SELF_TEST_TAG.slot_bytes,
    1,
    SELF_TEST_TAG.slot_bytes,
    0,
)  # beyond every MTU; more than slots, so credit comes back
SELF_TEST_TIMEOUT_S = 5.0
THERE, BACK = b"there", b"back"
_SEED_BYTES = TAG_BYTES - 1


class SelfTestCalls(Protocol):
    """The calls that move a trial's messages, until ``deadline`` (of ``time.monotonic``). Both raise ChannelError."""

    def send(self, tag: bytes, payload: bytes, deadline: float) -> None: ...

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        """Return (tag, payload) of the next message."""
        ...


# Given a channel, and whether this side listens: yields the calls that move messages both ways.
SelfTestPath = Callable[[Channel, bool], AbstractContextManager[SelfTestCalls]]


class HostSelfTestCalls:
    """The channel's own calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, tag: bytes, payload: bytes, deadline: float) -> None:
        slot = self._channel.reserve(len(payload), timeout_s=_left(deadline))
        slot.data[:] = payload
        self._channel.put_signal(slot, tag)

    def receive(self, deadline: float) -> tuple[bytes, bytes]:
        arrival = self._channel.wait_signal(timeout_s=_left(deadline))
        came = arrival.tag, bytes(arrival.data)
        self._channel.release(arrival)
        return came


@contextmanager
def by_host(channel: Channel, listening: bool) -> Iterator[HostSelfTestCalls]:
    yield HostSelfTestCalls(channel)


def run_self_test(channel: Channel, timeout_s: float, means: Sequence[SelfTestPath] = (by_host,)) -> None:
    """Run the connector's side, over each of ``means`` in turn. Raises ChannelError with the reason of the failure."""
    deadline, seed = monotonic() + timeout_s, secrets.token_bytes(_SEED_BYTES)
    for turn, opened in enumerate(means):
        with opened(channel, False) as calls:
            for n, nbytes in enumerate(SIZES, turn * len(SIZES)):
                tag = seed + bytes([n])
                calls.send(tag, _payload(THERE, tag, nbytes), deadline)
                _check(channel, calls.receive(deadline), BACK, tag, nbytes)


def answer_self_test(channel: Channel, timeout_s: float, means: Sequence[SelfTestPath] = (by_host,)) -> None:
    """Run the listener's side. Raises ChannelError, which the peer receives too."""
    deadline, seed = monotonic() + timeout_s, b""
    try:
        for turn, opened in enumerate(means):
            with opened(channel, True) as calls:
                for n, nbytes in enumerate(SIZES, turn * len(SIZES)):
                    tag, payload = calls.receive(deadline)
                    seed = seed or tag[:_SEED_BYTES]
                    _check(channel, (tag, payload), THERE, seed + bytes([n]), nbytes)
                    calls.send(tag, _payload(BACK, tag, nbytes), deadline)
    except ChannelError as error:
        channel.abort(str(error))
        raise


def _check(channel: Channel, came: tuple[bytes, bytes], label: bytes, tag: bytes, nbytes: int) -> None:
    """Check that it is the message of ``tag``, with its bytes. Otherwise the channel is aborted."""
    if came != (tag, _payload(label, tag, nbytes)):
        why = f"a message of {nbytes} bytes arrived with other bytes than were sent"
        channel.abort(why)
        raise PeerFault(f"{channel.peer}: {why}")


def _payload(label: bytes, tag: bytes, nbytes: int) -> bytes:
    return shake_128(label + tag).digest(nbytes)


def _left(deadline: float) -> float:
    return max(0.0, deadline - monotonic())
