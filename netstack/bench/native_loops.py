"""The patterns with loops in C++: no Python between two messages, and no Python lock among threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lamina.netstack.contract.fabric import Channel, Fabric

from .floods import in_pairs
from .job import TIMEOUT_S, Job, Measured, Payloads

if TYPE_CHECKING:
    from lamina.netstack.host import native_module as native


def bounce_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    (channel,) = channels
    halves = 2 if job.pattern == "put_lat" else 1
    times = _bounce(channel, job, leads=True)[job.warm_up :]
    return Measured([t / halves for t in times], sum(times))


def bounce_server(_: Fabric, channel: Channel, job: Job) -> None:
    _bounce(channel, job, leads=False)


def flood_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    (channel,) = channels
    times = _flood(channel, job, 0, job.warm_up + job.rounds, leads=True)[job.warm_up :]
    return Measured(times, sum(times))


def pairs_client(_: Fabric, channels: Sequence[Channel], job: Job, __: float) -> Measured:
    def play(pair: int, first: int, rounds: int) -> list[float]:
        return _flood(channels[pair], job, first, rounds, leads=True)

    return in_pairs(job, len(channels), play)


def flood_server(_: Fabric, channel: Channel, job: Job) -> None:
    _flood(channel, job, 0, job.warm_up + job.rounds, leads=False)


def _bounce(channel: Channel, job: Job, *, leads: bool) -> list[float]:
    from lamina.netstack.host import native_module as native

    own, payloads = _own(channel), b"".join(Payloads(job.query).each)
    copies = job.pattern == "rtt"
    return _seconds(native.bounce(own, payloads, job.warm_up + job.rounds, leads, copies, TIMEOUT_S))


def _flood(channel: Channel, job: Job, first: int, rounds: int, *, leads: bool) -> list[float]:
    from lamina.netstack.host import native_module as native

    own, payloads = _own(channel), b"".join(Payloads(job.query).each)
    both = job.pattern == "both"
    return _seconds(native.flood(own, payloads, first, rounds, job.window, leads, both, TIMEOUT_S))


def _own(channel: Channel) -> native.Channel:
    from lamina.netstack.host import native_module as native

    if not isinstance(channel, native.Channel):
        raise ValueError(f"--driver native: {channel.peer} is no channel of the native module; use --driver python")
    return channel


def _seconds(nanoseconds: bytes) -> list[float]:
    return [t / 1e9 for t in memoryview(nanoseconds).cast("Q").tolist()]
