"""A trial of a channel: messages there and back, each of whose bytes both sides know and compare.

Two NICs are connected as soon as each believes what the other has said of itself, before one packet has passed. A GID
of another network, a switch whose MTU is smaller, a firewall: all show with the first message, after seconds. Who has
another way tries first.
"""

from __future__ import annotations

import secrets
from hashlib import shake_128
from time import monotonic

from lamina.netstack.contract.fabric import TAG_BYTES, Channel, ChannelError, PeerFault
from lamina.netstack.contract.terms import Geometry

TRIAL = Geometry(slots=2, slot_bytes=64 << 10)
SIZES = (8, 4097, TRIAL.slot_bytes, 1, TRIAL.slot_bytes, 0)  # beyond every MTU; more than slots, so credit comes back
TRIAL_S = 5.0
THERE, BACK = b"there", b"back"
_SEED_BYTES = TAG_BYTES - 1


def run_trial(channel: Channel, timeout_s: float) -> None:
    """The connector's side. Raises ChannelError with what did not pass."""
    deadline, seed = monotonic() + timeout_s, secrets.token_bytes(_SEED_BYTES)
    for n, nbytes in enumerate(SIZES):
        tag = seed + bytes([n])
        _send(channel, THERE, tag, nbytes, deadline)
        _receive(channel, BACK, tag, nbytes, deadline)


def answer_trial(channel: Channel, timeout_s: float) -> None:
    """The listener's side. Raises ChannelError, of which the peer is told."""
    deadline, seed = monotonic() + timeout_s, b""
    try:
        for n, nbytes in enumerate(SIZES):
            tag = _receive(channel, THERE, seed and seed + bytes([n]), nbytes, deadline)
            seed = tag[:_SEED_BYTES]
            _send(channel, BACK, tag, nbytes, deadline)
    except ChannelError as error:
        channel.abort(str(error))
        raise


def _send(channel: Channel, label: bytes, tag: bytes, nbytes: int, deadline: float) -> None:
    slot = channel.reserve(nbytes, timeout_s=_left(deadline))
    slot.data[:] = _payload(label, tag, nbytes)
    channel.put_signal(slot, tag)


def _receive(channel: Channel, label: bytes, tag: bytes, nbytes: int, deadline: float) -> bytes:
    """The tag of the next message, which is ``tag`` unless that is empty."""
    arrival = channel.wait_signal(timeout_s=_left(deadline))
    if arrival.data != _payload(label, arrival.tag, nbytes) or arrival.tag != (tag or arrival.tag):
        why = f"a message of {nbytes} bytes came with others than were sent"
        channel.abort(why)
        raise PeerFault(f"{channel.peer}: {why}")
    channel.release(arrival)
    return arrival.tag


def _payload(label: bytes, tag: bytes, nbytes: int) -> bytes:
    return shake_128(label + tag).digest(nbytes)


def _left(deadline: float) -> float:
    return max(0.0, deadline - monotonic())
